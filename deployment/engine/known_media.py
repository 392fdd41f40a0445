"""One copy of the same image, however many turns, checkpoints and sessions show it."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakValueDictionary

from state.media import Media, Placed


class KnownMedia:
    """Knows an item as long as anything holds it: clients send all of a conversation's images with every turn."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[object, ...], Media] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._known)

    def shared(self, placed: Placed) -> Placed:
        """The same, with items that are known where they are."""
        return tuple(replace(one, media=self._known.setdefault(_key(one.media), one.media)) for one in placed)


def _key(media: Media) -> tuple[object, ...]:
    return media.digest, media.rows, media.columns, media.times
