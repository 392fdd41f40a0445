"""Where media stand in a prompt: placeholders in its text, spans in its ids, embeddings in its chunks.

    image:  <|vision_start|> <|image_pad|> ... <|vision_end|>           one placeholder an embedding
    video:  <|vision_start|> {<t seconds> <|vision_start|> <|video_pad|> ... <|vision_end|>} <|vision_end|>

The chat template writes one placeholder an item, between a start and an end; `expand` writes as many as there are
embeddings, and for a video as many groups as it has frames, each after its time. Source: research of transformers'
Qwen3-VL processor (5.10 and later; older ones left the outer pair away).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from model.errors import MediaError, ModelError
from model.media import MediaItem
from model.target import Inserted
from model.tokenizer import Tokenizer
from model.vision_config import VisionConfig


@dataclass(frozen=True)
class MediaTokens:
    """How the tokens that stand for media are spelled."""

    image: str
    video: str
    start: str
    end: str

    @classmethod
    def of(cls, config: VisionConfig, tokenizer: Tokenizer) -> MediaTokens:
        """Raises ModelError where the tokenizer does not know an id."""
        ids = (config.image_token_id, config.video_token_id, config.start_token_id, config.end_token_id)
        try:
            return cls(*(tokenizer.token(i) for i in ids))
        except ValueError as error:
            raise ModelError(f"the vision_config does not fit the tokenizer: {error}") from None


@dataclass(frozen=True)
class MediaSpan:
    """One frame of an item in a sequence: placeholders at ordinals [start, start + rows * columns), by rows.

    They stand for the embeddings from `offset` on of the sequence's item number `item`.
    """

    start: int
    rows: int
    columns: int
    item: int
    offset: int

    @property
    def length(self) -> int:
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        return self.start + self.length


def expand(text: str, items: Sequence[MediaItem], tokens: MediaTokens) -> str:
    """The rendered prompt with each item's placeholder written out. `items` in the order in which they stand in it.

    Raises MediaError if placeholders and items do not match: also where a text spells one out itself.
    """
    pieces = re.split(f"({re.escape(tokens.image)}|{re.escape(tokens.video)})", text)
    kinds = ["image" if token == tokens.image else "video" for token in pieces[1::2]]
    given = [item.kind for item in items]
    if kinds != given:
        raise MediaError(f"the prompt has placeholders for {_listed(kinds)}, but is sent with {_listed(given)}")
    pieces[1::2] = [_written(item, tokens) for item in items]
    return "".join(pieces)


def find_spans(ids: Sequence[int], items: Sequence[MediaItem], config: VisionConfig) -> tuple[MediaSpan, ...]:
    """Where the items' placeholders are among the ids of an expanded prompt. Raises MediaError if they do not match."""
    kind_of = {config.image_token_id: "image", config.video_token_id: "video"}
    runs = _runs([i for i, token in enumerate(ids) if token in kind_of], ids)
    frames = [(number, item, frame) for number, item in enumerate(items) for frame in range(item.frames)]
    if len(runs) != len(frames):
        raise MediaError(
            f"placeholders: the prompt has {len(runs)} runs of them, but its media have {len(frames)} frames"
        )
    spans = []
    for (start, stop), (number, item, frame) in zip(runs, frames, strict=True):
        span = MediaSpan(start, item.rows, item.columns, number, frame * item.rows * item.columns)
        kind = kind_of[ids[start]]
        if span.stop != stop or kind != item.kind:
            raise MediaError(
                f"placeholders: the prompt has {stop - start} of {kind} at {start}, but frame {frame} of its"
                f" {item.kind} {number} has {span.length}"
            )
        spans.append(span)
    return tuple(spans)


def inserted(
    spans: Sequence[MediaSpan], start: int, stop: int, embeddings: Callable[[int], torch.Tensor]
) -> Inserted | None:
    """What a chunk of the ordinals [start, stop) has in place of its placeholders; None if it has none.

    `embeddings` gives those of an item, [n, H]; it is asked only for items that the chunk shows a part of.
    """
    rows: list[torch.Tensor] = []
    columns: list[torch.Tensor] = []
    for span in spans:
        begin, end = max(start, span.start), min(stop, span.stop)
        if begin < end:
            first = span.offset - span.start
            rows.append(embeddings(span.item)[first + begin : first + end])
            columns.append(torch.arange(begin - start, end - start))
    if not rows:
        return None
    return Inserted(torch.cat(rows), torch.cat(columns).to(rows[0].device))


def _written(item: MediaItem, tokens: MediaTokens) -> str:
    frame = item.rows * item.columns
    if item.kind == "image":
        return tokens.image * frame
    return "".join(f"<{time:.1f} seconds>{tokens.start}{tokens.video * frame}{tokens.end}" for time in item.times)


def _runs(places: list[int], ids: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending places -> [start, stop) of each run of neighbours with one id."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place and ids[place - 1] == ids[place]:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


def _listed(kinds: Sequence[str]) -> str:
    return ", ".join(kinds) or "no media"
