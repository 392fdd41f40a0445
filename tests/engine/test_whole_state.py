"""Saved, moved, loaded, continued: what comes is what would have come, at every frontier from one to three windows.

Decision 16, on a model whose ring has 32 positions: whether a page is full or a ring wrapped, whatever the last round
committed, and whichever way the state takes. Compared are tokens, rounds (which only a right draft context gives), and
the bytes of the state after the turn.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from deployment.engine.commands import Export, Import, Sampling
from deployment.engine.events import Failed, Imported
from deployment.engine.options import Backend
from state.checkpoint import Checkpoint
from state.coverage import Coverage
from state.memory import StateMemory
from tests.engine.tiny import TinyDriver
from tests.engine.ways import (
    MORE,
    SAMPLED,
    WAYS,
    WIDTH,
    Case,
    Continued,
    World,
    continued,
    exported,
    pairwise,
    product,
    state_of,
    taken,
    undisturbed,
)

world = functools.cache(World)


def check(case: Case) -> None:
    here = world(case.backend)
    ledger = here.saved(case)
    saved = state_of(here.source, "s")
    driver, session = here.moved(case, ledger)
    assert state_of(driver, session) == saved, f"{case}: the state that came is not the one that left"
    came = continued(driver, session, ledger, case.sampling)
    stayed = continued(here.source, "s", ledger, case.sampling)
    assert came == stayed, case
    nothing = here.from_nothing(ledger, case.sampling)
    assert (came.tokens, came.rounds) == (nothing.tokens, nothing.rounds), case
    if case.sampling == Sampling():
        known = undisturbed(case.frontier - case.committed)
        assert came.tokens == known[case.frontier + 1 : case.frontier + 1 + MORE], case


@pytest.mark.parametrize("way", WAYS)
def test_what_goes_on_from_a_saved_session_is_what_never_stopped(way: str) -> None:
    for case in pairwise():
        if case.way == way:
            check(case)


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_every_combination_goes_on_as_what_never_stopped(way: str) -> None:
    for case in product():
        if case.way == way:
            check(case)


def test_every_two_levels_of_two_factors_meet_in_some_case() -> None:
    chosen, every = (
        [(c.frontier, c.committed, c.backend, c.sampling, c.way) for c in cases] for cases in (pairwise(), product())
    )
    for first, second in itertools.combinations(range(5), 2):
        assert {(c[first], c[second]) for c in chosen} == {(c[first], c[second]) for c in every}


def test_what_is_compared_accepts_drafts_now_and_then() -> None:
    """Else no comparison of rounds could tell a right draft context from a wrong one."""
    cases = pairwise()[:40]
    rounds = [world(c.backend).from_nothing(undisturbed(c.frontier), SAMPLED).rounds for c in cases]
    assert 0 < sum(map(sum, rounds)) < sum(map(len, rounds)) * (WIDTH - 1)


# ------------------------------------------------------------------------------------------------ negative controls

Fault = Callable[[StateMemory, Checkpoint, StateMemory, Checkpoint], Coverage]
"""Puts something wrong into a checkpoint, with the help of one that is a token behind. Returns what it then covers."""


def zeroed_ring(memory: StateMemory, checkpoint: Checkpoint, _: StateMemory, __: Checkpoint) -> Coverage:
    memory.images.rings.clear(checkpoint.slot)
    return replace(checkpoint.coverage, ring=(0, 0))


def ring_of_another_frontier(memory: StateMemory, good: Checkpoint, old: StateMemory, behind: Checkpoint) -> Coverage:
    moved = old.images.rings.export_slot(behind.slot, behind.frontier)
    memory.images.rings.import_slot(good.slot, good.frontier, *moved)
    return replace(good.coverage, ring=behind.coverage.ring)


def gdn_one_token_behind(memory: StateMemory, good: Checkpoint, old: StateMemory, behind: Checkpoint) -> Coverage:
    memory.images.gdn[good.slot] = old.images.gdn[behind.slot]
    return replace(good.coverage, gdn=behind.frontier)


FAULTS: dict[Fault, str] = {zeroed_ring: "ring", ring_of_another_frontier: "ring", gdn_one_token_behind: "gdn"}


def faulty(fault: Fault, case: Case) -> tuple[int, ...]:
    """Session `child` of the source is `s` with the fault; returns the ledger."""
    here = world(case.backend)
    before = here.saved(replace(case, frontier=case.frontier - 1, committed=case.committed - 1))
    behind = TinyDriver(case.backend, lanes=1, images=2, pages=24)
    taken(behind, exported(here.source, before), case.frontier - 1)
    ledger = here.saved(case)
    assert ledger[: case.frontier] == before
    here.moved(replace(case, way="device"), ledger)
    (child,) = here.source.engine._sessions.checkpoints("child")
    (old,) = behind.engine.memory.checkpoints
    coverage = fault(here.source.engine.memory, child, behind.engine.memory, old)
    object.__setattr__(child, "coverage", coverage)
    return ledger


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("backend", ["dflash", "dflash2"])
def test_a_state_whose_planes_disagree_is_refused_and_only_that_keeps_it_from_going_on_wrong(
    fault: Fault, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world(backend)
    differ: list[bool] = []
    for frontier in range(36, 97, 5):
        case = Case(frontier, 2, backend, SAMPLED, "host")
        ledger = faulty(fault, case)
        assert_refused(here.source.call(Export("e", "child")), FAULTS[fault])
        with monkeypatch.context() as unchecked:
            unchecked.setattr("state.codec.check_coverage", lambda *facts: None)
            document = here.source.call(Export("e", "child")).document
            assert_refused(here.elsewhere.call(Import("i", "s", document)), FAULTS[fault])
            assert not here.elsewhere.engine.memory.checkpoints
            for module in ("document", "memory"):
                unchecked.setattr(f"state.{module}.check_coverage", lambda *facts: None)
            assert isinstance(here.elsewhere.call(Import("i", "s", document)), Imported)
            wrong = continued(here.elsewhere, "s", ledger, SAMPLED)
        stayed = continued(here.source, "s", ledger, SAMPLED)
        assert wrong.segments != stayed.segments
        differ.append(visible(wrong) != visible(stayed))
    assert any(differ), "what a client gets must tell as well"


def visible(turn: Continued) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return turn.tokens, turn.rounds


def assert_refused(answer: object, plane: str) -> None:
    assert isinstance(answer, Failed) and answer.code == "bad_state" and plane in answer.message, answer
