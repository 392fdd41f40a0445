"""What is a checkpoint? The facts of one immutable state: ledger, image and pages at one frontier."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from state.coverage import Coverage, Form
from state.media import Placed


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An immutable state on the device. Two checkpoints are equal only if they are the same object.

    `id` has 128 random bits, as hex; it stays the same when the checkpoint moves, and a fork gets its own. It may come
    from outside and be anybody's, so that here nothing is found by it: `serial` says which of all that its memory ever
    kept it is; 0: none yet.
    `ledger`: the session's token ids, F+1 in form `decode` (the last is the anchor), F in form `prompt`. `media`: what
    its placeholders stand for. `parent`: id of the checkpoint that this one's sequence went on from. `fork_origin`: id
    of the checkpoint it was forked from. `slot`, `pages`, `draft_pages`: where it lies; the pages hold positions
    [0, F), in order. `created`: seconds since 1970.
    """

    id: str
    kind: str
    form: Form
    frontier: int
    ledger: tuple[int, ...]
    coverage: Coverage
    parent: str | None
    fork_origin: str | None
    slot: int
    pages: tuple[int, ...]
    draft_pages: tuple[int, ...]
    created: float
    media: Placed = ()
    serial: int = 0


def new_checkpoint_id() -> str:
    return secrets.token_hex(16)
