"""How do a prompt's images and videos get into its text and ids? By the model's own placeholders, as many as each has
embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployment.engine.loading import Vision
from deployment.engine.placing import placed
from model.media import MediaItem
from model.placeholders import expand
from state.media import Placed


@dataclass(frozen=True)
class ShownMedia:
    """`items`: of the messages that are rendered, in their order. `vision` None: of a model of text alone, to which no
    text is a placeholder."""

    vision: Vision | None = None
    items: Sequence[MediaItem] = ()

    def written(self, text: str) -> str:
        """Rendered text with a placeholder for each embedding. Raises MediaError where text and items do not match, as
        where a message spells a placeholder out."""
        return text if self.vision is None else expand(text, self.items, self.vision.tokens)

    def placed(self, ids: Sequence[int], after: int = 0) -> Placed:
        """Where the items stand in `ids`, which follow `after` others. Raises MediaError."""
        return () if self.vision is None else placed(ids, self.items, self.vision.tower.config, after)


NO_MEDIA = ShownMedia()
