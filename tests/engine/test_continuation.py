"""Save, move, fork, continue: what goes on from a checkpoint equals what was never interrupted (decision 16).

A turn is cut by its budget at some frontier and continued from its turn end by an append-like prompt: the ledger as it
is. Greedy and seeded outputs are compared with one undisturbed run. Frontiers lie inside and beyond one page (64) and
one window (256).
"""

from __future__ import annotations

import functools

import pytest

from deployment.engine.commands import Export, Fork, Import, Sampling
from deployment.engine.events import Exported, Failed, Imported
from state.session_record import SessionRecord
from tests.engine.driving import Driver, golden, models, prompt, seeded

BACKENDS = ["none", "dflash", "dflash2"]
TOTAL = 26


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def long_prompt(tokens: int) -> tuple[int, ...]:
    """A prompt of that many tokens: golden texts one after another."""
    ids: list[int] = []
    for case in golden():
        ids += case["prompt"] + case["greedy"]
    return tuple(ids[:tokens])


@functools.cache
def undisturbed(backend: str, ids: tuple[int, ...], sampling: Sampling, tokens: int = TOTAL) -> tuple[int, ...]:
    return Driver(backend, images=8).run(ids, sampling=sampling, max_tokens=tokens, ignore_eos=True).token_ids


def interrupted(driver: Driver, session: str, ids: tuple[int, ...], sampling: Sampling, at: int) -> tuple[int, ...]:
    """Runs a turn of `at` tokens in a session; returns its ledger."""
    finished = driver.run(ids, session=session, sampling=sampling, max_tokens=at, ignore_eos=True)
    assert finished.finish_reason == "length"
    return ids + finished.token_ids


def go_on(driver: Driver, session: str, ledger: tuple[int, ...], sampling: Sampling, tokens: int):
    """Continues a ledger; returns the new tokens, and what was reused."""
    turn = driver.submit(ledger, session=session, sampling=sampling, max_tokens=tokens, ignore_eos=True)
    driver.steps()
    return driver.streamed(turn), driver.started(turn)


# page-aligned or not, ring wrapped or not: the frontier of the first turn's end is prompt + at - 1
FRONTIERS = [(30, 6), (60, 5), (200, 12), (250, 7), (251, 6), (300, 17), (530, 9)]


@pytest.mark.parametrize("case", range(len(FRONTIERS)))
def test_greedy_continuation_equals_the_undisturbed_run(backend, case):
    """Every frontier for every backend; the three ways to go on take turns over them."""
    length, at = FRONTIERS[case]
    move = ("device", "peer", "fork")[(case + BACKENDS.index(backend)) % 3]
    greedy = Sampling()
    ids = long_prompt(length)
    expected = undisturbed(backend, ids, greedy)
    source = Driver(backend, images=8)
    ledger = interrupted(source, "s", ids, greedy, at)
    assert ledger[length:] == expected[:at]
    destination, session = moved(source, backend, move)
    tokens, started = go_on(destination, session, ledger, greedy, TOTAL - at)
    assert started.reused == len(ledger) - 1 and started.prefilled == 1
    assert started.hit == ("peer" if move == "peer" else "device")
    assert ledger[length:] + tokens == expected


@pytest.mark.parametrize("length, at, move", [(60, 5, "peer"), (300, 17, "peer"), (250, 9, "fork")])
def test_seeded_continuation_equals_the_undisturbed_run(backend, length, at, move):
    """With drafting off and DFlash, a seed's tokens do not depend on where rounds begin. DFlash2's do: there the
    moved session is compared with one that was interrupted at the same place and never moved."""
    ids, sampling = long_prompt(length), seeded()
    source, stayed = Driver(backend, images=8), Driver(backend, images=8)
    ledger = interrupted(source, "s", ids, sampling, at)
    assert interrupted(stayed, "s", ids, sampling, at) == ledger
    destination, session = moved(source, backend, move)
    tokens, _ = go_on(destination, session, ledger, sampling, TOTAL - at)
    assert tokens == go_on(stayed, "s", ledger, sampling, TOTAL - at)[0]
    if backend != "dflash2":
        assert ledger[length:] + tokens == undisturbed(backend, ids, sampling)


def moved(source: Driver, backend: str, move: str) -> tuple[Driver, str]:
    if move == "device":
        return source, "s"
    if move == "fork":
        assert isinstance(source.call(Fork("f", "s", "child")), Imported)
        return source, "child"
    record = SessionRecord("s", source.engine._sessions.checkpoints("s")[-1].ledger, branch="kept")
    exported = source.call(Export("e", "s", record))
    assert isinstance(exported, Exported)
    destination = Driver(backend, images=8)
    imported = destination.call(Import("i", "s", exported.document))
    assert isinstance(imported, Imported) and imported.record == record and imported.foreign is None
    return destination, "s"


def test_acceptance_after_a_move_is_that_of_the_undisturbed_run_and_falls_with_a_zeroed_ring():
    """The draft context must travel: without it the text is right all the same, so only acceptance can tell."""

    def rounds_after(tamper: bool) -> list[int]:
        source = Driver("dflash2", images=8)
        ids = prompt(10)
        ledger = interrupted(source, "s", ids, Sampling(), 12)
        destination, session = moved(source, "dflash2", "peer")
        if tamper:
            for plane in (destination.engine.memory.images.rings.keys, destination.engine.memory.images.rings.values):
                plane.zero_()
        turn = destination.submit(ledger, session=session, max_tokens=60, ignore_eos=True)
        destination.steps()
        return list(destination.finished(turn).rounds)

    moved_rounds, zeroed = rounds_after(False), rounds_after(True)
    source = Driver("dflash2", images=8)
    ledger = interrupted(source, "s", prompt(10), Sampling(), 12)
    turn = source.submit(ledger, session="s", max_tokens=60, ignore_eos=True)
    source.steps()
    assert moved_rounds == list(source.finished(turn).rounds)
    assert len(zeroed) > len(moved_rounds)


def test_parent_and_fork_go_on_without_touching_each_other(backend):
    driver = Driver(backend, images=8)
    ids = long_prompt(100)
    ledger = interrupted(driver, "s", ids, Sampling(), 9)
    driver.call(Fork("f", "s", "child"))
    child, _ = go_on(driver, "child", (*ledger, 290), Sampling(), 20)
    parent, _ = go_on(driver, "s", ledger, Sampling(), TOTAL - 9)
    assert ledger[100:] + parent == undisturbed(backend, ids, Sampling())
    assert child == undisturbed(backend, (*ledger, 290), Sampling(), 20)


def test_turn_start_is_captured_at_the_boundary_and_a_regeneration_goes_on_from_it(backend):
    driver = Driver(backend, images=8)
    ids = long_prompt(150)
    turn = driver.submit(ids, session="s", stable_boundary=140, max_tokens=8, ignore_eos=True)
    driver.steps()
    assert [(c.kind, c.frontier) for c in driver.captured(turn)] == [("turn_start", 140), ("turn_end", 157)]
    again = driver.submit(ids, session="s", stable_boundary=140, max_tokens=8, ignore_eos=True)
    driver.steps()
    assert driver.started(again).reused == 140 and driver.started(again).hit == "device"
    assert driver.streamed(again) == driver.streamed(turn)


def test_a_prompt_that_leaves_the_ledger_reuses_only_what_is_an_exact_prefix(backend):
    driver = Driver(backend, images=8)
    ids = long_prompt(150)
    driver.run(ids, session="s", stable_boundary=100, max_tokens=8, ignore_eos=True)
    edited = (*ids[:120], 290, *ids[121:])
    turn = driver.submit(edited, session="s", max_tokens=8, ignore_eos=True)
    driver.steps()
    assert driver.started(turn).reused == 100
    assert driver.streamed(turn) == undisturbed(backend, edited, Sampling(), 8)


def test_a_state_cut_in_the_middle_is_refused_and_nothing_is_kept():
    source = Driver("dflash2", images=8)
    interrupted(source, "s", prompt(0), Sampling(), 4)
    document = source.call(Export("e", "s")).document
    destination = Driver("dflash2", images=8)
    for end in (0, 10, len(document) // 2, len(document) - 1):
        answer = destination.call(Import("i", "s", document[:end]))
        assert isinstance(answer, Failed) and answer.code == "bad_state"
    assert not destination.engine.memory.checkpoints and not destination.engine.memory.sequences


def test_bf16_with_fp16_values_saves_and_continues_like_the_undisturbed_run():
    """The stored formats of a GPU, on the CPU: BF16 K, FP16 V in rings and draft pages, BF16 pages, FP32 state."""
    driver, other = Driver("dflash", dtype="bfloat16"), Driver("dflash", dtype="bfloat16")
    assert models("dflash", dtype="bfloat16").geometry.ring_value_dtype.itemsize == 2
    ids = long_prompt(70)
    ledger = interrupted(driver, "s", ids, Sampling(), 6)
    document = driver.call(Export("e", "s")).document
    other.call(Import("i", "s", document))
    assert other.call(Export("e2", "s")).document == document
    assert go_on(other, "s", ledger, Sampling(), 10)[0] == go_on(driver, "s", ledger, Sampling(), 10)[0]
