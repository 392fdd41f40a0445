"""A turn that is cut after any round goes on elsewhere as if nothing had happened: the same ids, rounds and events.

Whatever its controls; with nothing to go on from, with the state that it was suspended at, and with one behind it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from deployment.engine.commands import Export, Import, Resumed, Submit, Suspend, TokenLogprob
from deployment.engine.events import (
    Event,
    Failed,
    Finished,
    Imported,
    PromptLogprobs,
    Round,
    Started,
    Suspended,
    Tokens,
)
from deployment.engine.options import Backend
from state.session_record import SessionRecord
from tests.engine.driving import Driver
from tests.engine.test_mixtures import Small, random_submit

KEPT = ("nothing", "the state at the cut", "a state behind the cut")


def ran(driver: Driver, submit: Submit) -> list[Event]:
    driver.engine.execute(submit)
    driver.steps()
    return driver.of(submit.turn)


def rounds(events: Sequence[Event]) -> list[Round]:
    return [event for event in events if isinstance(event, Round)]


def resumed_after(told: Sequence[Round]) -> Resumed:
    return Resumed(
        tuple(token for event in told for token in event.token_ids),
        tuple(event.accepted for event in told if event.accepted is not None),
        tuple(entry for event in told for entry in event.logprobs),
    )


def rest(events: Sequence[Event], cut: int) -> list[Event]:
    """What comes of a turn after its first `cut` rounds and what they published."""
    after: list[Event] = [event for event in events if isinstance(event, Round | Tokens | Finished | Failed)]
    told = rounds(events)[:cut]
    free = [published(told[:end]) for end in (cut - 1, cut)] if cut else [0, 0]
    passed = after.index(told[-1]) + 1 + (free[0] < free[1]) if cut else 0
    return after[passed:]


def published(told: Sequence[Round]) -> int:
    return sum(len(event.token_ids) for event in told) - told[-1].held_back if told else 0


def assert_same(came: Sequence[Event], stayed: Sequence[Event]) -> None:
    """Equal but for the wall time, and for the last bits of log-probabilities: a prefill rounds otherwise."""
    assert [exact(event) for event in came] == [exact(event) for event in stayed]
    assert numbers(came) == pytest.approx(numbers(stayed), abs=1e-4)


def exact(event: Event) -> Event:
    match event:
        case Finished():
            return replace(event, seconds=0.0)
        case Failed(committed=Finished() as committed):
            return replace(event, committed=exact(committed))
        case Round() | Tokens():
            return replace(event, logprobs=tuple(TokenLogprob(entry.token, 0.0, ()) for entry in event.logprobs))
        case _:
            return event


def numbers(events: Sequence[Event]) -> list[float]:
    return [entry.logprob for event in events if isinstance(event, Round | Tokens) for entry in event.logprobs]


def suspended(driver: Driver, submit: Submit, cut: int) -> Suspended | None:
    """Runs a turn until it has told `cut` rounds or more, and takes it out. None: it ended with them."""
    driver.engine.execute(submit)
    while len(rounds(driver.of(submit.turn))) < cut:
        assert driver.engine.step()
    driver.engine.execute(Suspend("suspend", submit.turn))
    answer = driver.of(submit.turn)[-1]
    assert not driver.engine.step() and not driver.engine.memory.sequences
    return answer if isinstance(answer, Suspended) else None


def moved(source: Driver, destination: Driver, ledger: tuple[int, ...]) -> None:
    """Session `s`, as far as its engine holds any state of it."""
    document = source.call(Export("e", "s", SessionRecord("s", ledger))).document
    assert isinstance(destination.call(Import("i", "s", document)), Imported)


def check_cut(submit: Submit, whole: Sequence[Event], cut: int, kept: str, engine: Callable[[], Driver]) -> list[Event]:
    """Returns what came of the turn after the cut."""
    destination, frontier = engine(), 0
    if kept != "nothing":
        source = engine()
        answer = suspended(source, submit, cut if kept == "the state at the cut" else random.Random(cut).randrange(cut))
        told = rounds(source.of(submit.turn))
        assert_same(told, rounds(whole)[: len(told)])
        if answer is not None:
            committed = resumed_after(told).token_ids
            frontier, cut = answer.frontier, max(cut, len(told))
            assert (answer.session, answer.committed) == (submit.session, len(committed))
            assert frontier == len(submit.prompt_ids) + len(committed) - 1 if committed else frontier == 0
            moved(source, destination, submit.prompt_ids + committed)
    resumed = resumed_after(rounds(whole)[:cut])
    came = ran(destination, replace(submit, resumed=resumed))
    assert_same(rest(came, 0), rest(whole, cut))
    assert not resumed.token_ids or not any(isinstance(event, PromptLogprobs) for event in came), "they were told"
    for started in [event for event in came if isinstance(event, Started)]:
        ledger = len(submit.prompt_ids) + len(resumed.token_ids)
        assert started.reused + started.prefilled == ledger - bool(resumed.token_ids)
        if resumed.token_ids or submit.sampling.prompt_logprobs is None:
            assert started.reused == frontier
    return came


@pytest.mark.soak
def test_a_turn_cut_after_any_round_goes_on_as_if_nothing_had_happened_whatever_its_controls() -> None:
    for seed in range(24, 2000):
        check_seed(seed)


@pytest.mark.parametrize("seed", range(24))
def test_a_turn_cut_after_any_round_goes_on_in_another_engine_as_if_nothing_had_happened(seed: int) -> None:
    check_seed(seed)


def check_seed(seed: int) -> None:
    """One turn with random controls, cut at its beginning, at its end and in between."""
    rng = random.Random(seed)
    backend: Backend = ("none", "dflash", "dflash2")[seed % 3]

    def engine() -> Small:
        return Small(backend, lanes=1, images=4, image_min_tokens=100, prefill_chunk=rng.choice([3, 64]))

    submit = replace(random_submit(rng, "t"), session="s", max_tokens=rng.choice([None, 9, 30]))
    submit = replace(submit, sampling=replace(submit.sampling, sub=seed % 4))  # the choices of one request
    whole = ran(engine(), submit)
    last = len(rounds(whole))
    for cut in {0, last, rng.randrange(1 + last), rng.randrange(1 + last)}:
        kept = KEPT[(cut + seed // 3) % len(KEPT)] if 0 < cut < last else "nothing"
        came = check_cut(submit, whole, cut, kept, engine)
        if cut == last and isinstance(whole[-1], Finished):
            assert len(came) == 1, "nothing was left to do"
