"""Whose tokens does a history have that comes back as text? Those that the model chose, where its session has them
(decision 20).

A model may say a text in other tokens than the tokenizer would. A history that is encoded anew leaves the session's
tokens there, and all state behind that place is of no use. So where both say the same, from the beginning up to a
special token, the session's stay. What a template writes in another way than it was generated, as one that drops
earlier thinking does, is encoded anew, and all that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deployment.common_prefix import common_prefix
from deployment.turns import Prompt
from model.tokenizer import Tokenizer


@dataclass(frozen=True)
class _Kept:
    """Tokens of the ledger, `kept`, from `at` on in the new prompt; they stand for `own`, from `start` on in the old
    one."""

    start: int
    at: int
    own: tuple[int, ...]
    kept: tuple[int, ...]


def spliced(tokenizer: Tokenizer, prompt: Prompt, ledger: Sequence[int]) -> Prompt:
    """The same prompt, in the ledger's tokens as far as that says the same."""
    kept = _kept(tokenizer, prompt.ids, ledger)
    if not kept:
        return prompt
    ids: list[int] = []
    done = 0
    for one in kept:
        ids += (*prompt.ids[done : one.start], *one.kept)
        done = one.start + len(one.own)
    media = tuple(replace(one, starts=tuple(_moved(kept, start) for start in one.starts)) for one in prompt.media)
    return Prompt(
        (*ids, *prompt.ids[done:]),
        _moved(kept, prompt.stable_boundary),
        _moved(kept, prompt.system_boundary),
        media,
    )


def _kept(tokenizer: Tokenizer, ids: Sequence[int], ledger: Sequence[int]) -> list[_Kept]:
    """Tokens on both sides of a special one never depend on each other, so that runs between them are compared."""
    kept: list[_Kept] = []
    start = begin = moved = 0
    while True:
        end, stop = _run_end(tokenizer, ids, start), _run_end(tokenizer, ledger, begin)
        own, theirs = tuple(ids[start:end]), tuple(ledger[begin:stop])
        if own != theirs:
            if tuple(tokenizer.encode(tokenizer.decode(theirs))) != own:
                return kept
            kept.append(_Kept(start, start + moved, own, theirs))
            moved += len(theirs) - len(own)
        if end == len(ids) or stop == len(ledger) or ids[end] != ledger[stop]:
            return kept
        start, begin = end + 1, stop + 1


def _run_end(tokenizer: Tokenizer, ids: Sequence[int], start: int) -> int:
    return next((place for place in range(start, len(ids)) if tokenizer.is_special(ids[place])), len(ids))


def _moved(kept: Sequence[_Kept], place: int) -> int:
    """Where a place of the old prompt is in the new one; inside what was replaced, the last one that is the same."""
    moved = place
    for one in kept:
        if place <= one.start:
            break
        if place < one.start + len(one.own):
            return one.at + min(place - one.start, common_prefix(one.own, one.kept))
        moved = place - one.start - len(one.own) + one.at + len(one.kept)
    return moved
