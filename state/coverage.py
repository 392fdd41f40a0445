"""Do all planes of a state agree on one frontier? The one check, called on capture, fork, import and restore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from state.errors import CoverageError
from state.geometry import StateGeometry

Form = Literal["decode", "prompt"]
"""`decode`: the ledger has F+1 tokens, the last is the anchor. `prompt`: F tokens; the next comes from a prompt."""

FORMS: tuple[Form, ...] = ("decode", "prompt")


@dataclass(frozen=True)
class Coverage:
    """What each plane covers, in token positions.

    `target_kv`: columns [0, n) of the target's pages; `gdn`, `conv`: the frontier that the recurrent state stands at;
    `hidden`: n if it is the hidden of token n-1; `ring`: positions [start, end), None without local draft layers;
    `draft_kv`: columns [0, n) of the draft pages, None without full-attention draft layers.
    """

    form: Form
    frontier: int
    ledger_tokens: int
    target_kv: int
    gdn: int
    conv: int
    hidden: int
    ring: tuple[int, int] | None
    draft_kv: int | None


def full_coverage(geometry: StateGeometry, form: Form, frontier: int) -> Coverage:
    """What a usable state of this geometry covers at a frontier."""
    return Coverage(
        form=form,
        frontier=frontier,
        ledger_tokens=frontier + 1 if form == "decode" else frontier,
        target_kv=frontier,
        gdn=frontier,
        conv=frontier,
        hidden=frontier,
        ring=(max(0, frontier - geometry.window), frontier) if geometry.ring_layers else None,
        draft_kv=frontier if geometry.full_layers else None,
    )


def check_coverage(coverage: Coverage, geometry: StateGeometry) -> None:
    """Returns if every plane covers exactly the frontier; else raises `CoverageError` naming the first that does not.

    More than the frontier is refused like less: a recurrent state cannot be taken back, and a plane whose facts
    differ from the others' was made by something else.
    """
    if coverage.form not in FORMS:
        raise CoverageError("form", coverage.form, " or ".join(FORMS))
    if coverage.frontier < 1:
        raise CoverageError("frontier", coverage.frontier, "at least 1")
    needed = full_coverage(geometry, coverage.form, coverage.frontier)
    for plane in ("ledger_tokens", "target_kv", "gdn", "conv", "hidden", "ring", "draft_kv"):
        has, needs = getattr(coverage, plane), getattr(needed, plane)
        if has != needs:
            raise CoverageError(plane, has, needs)
