"""One turn that is stopped, goes on, goes on elsewhere, or is told again from its log: always the same turn."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from deployment.engine.commands import Sampling, Submit
from deployment.engine.events import Event, Finished, Round, Tokens
from deployment.engine.runners import Deliver, Ended, Runner, ThreadRunner
from deployment.engine.service import EngineService
from deployment.keeper import SessionKeeper
from deployment.ownership.log import Numbered
from deployment.parsing.turn_text import TurnText
from deployment.running import RunningTurn
from deployment.session_log import began_record, ended_record, logged_turns, round_record
from deployment.turn_stream import Place, TurnStream
from deployment.turns import Prompt
from deployment.wire import Closed, Delta, Moved, Opened, TurnEvent, TurnRequest
from tests.engine.driving import models, options, prompt

OPTIONS = options("dflash2", lanes=2, images=4)
PROMPT = Prompt(prompt(0), len(prompt(0)) - 1)
REQUEST = TurnRequest("0" * 32, "history", (), max_tokens=24)
SUBMIT = Submit(
    REQUEST.turn,
    PROMPT.ids,
    sampling=Sampling(temperature=1.0, seed=3, logprobs=1),
    max_tokens=24,
    ignore_eos=True,
    stop_strings=("never to be seen",),
)


class Log:
    """A turn's log that takes its time. `receipts`: published ids whose rounds all copies have."""

    def __init__(self) -> None:
        self.records: list[Numbered] = [began_record(REQUEST, PROMPT, 3, 1.0)]
        self.receipts = 0

    def round(self, one: Round) -> None:
        self.records.append(round_record(one, REQUEST.turn, 0))

    async def told(self) -> None:
        await asyncio.sleep(0.001)
        committed = [record for record in self.records if hasattr(record, "held_back")]
        self.receipts = sum(len(cast(Any, record).token_ids) for record in committed)

    async def ended(self, finished: Finished) -> None:
        self.records.append(ended_record(finished, REQUEST.turn, 0, 2.0))
        await self.told()


class Turn:
    """One turn on an engine, and what it tells. It begins after what `records` say of it."""

    def __init__(self, service: EngineService, records: list[Numbered] | None = None, submit: Submit = SUBMIT) -> None:
        self.log = Log()
        self.stream = TurnStream(
            REQUEST.turn, 1, len(PROMPT.ids), lambda _: TurnText(service.tokenizer, PROMPT.opener)
        )  # fmt: skip
        course = over = None
        if records is not None:
            self.log.records = list(records)
            (logged,) = logged_turns(records)
            course, over = logged.course(0), logged.finished()
        self.running = RunningTurn(
            "r", "m", REQUEST, submit, PROMPT, None, service, cast(SessionKeeper, None), self.stream, lambda last: None,
            self.log, course, over,
        )  # fmt: skip

    async def told(self) -> list[TurnEvent]:
        return [told.event async for told in self.stream.read(Place())]

    async def until(self, ids: int) -> None:
        """So many ids are published."""
        published = 0
        async for told in self.stream.read(Place()):
            published += len(told.event.token_ids) if isinstance(told.event, Delta) else 0
            if published >= ids:
                return


class Held:
    """Keeps an engine that has published so many ids of a turn from going on: who stops the turn in its middle is never
    too late, however busy the machine is."""

    def __init__(self) -> None:
        self._ids = math.inf
        self._released = threading.Event()

    def runner(self, deliver: Deliver, ended: Ended) -> Runner:
        def held(events: Sequence[Event]) -> None:
            deliver(events)
            self._ids -= sum(len(event.token_ids) for event in events if isinstance(event, Tokens))
            if self._ids <= 0:
                assert self._released.wait(60), "nobody has stopped the turn"

        return ThreadRunner(models("dflash2"), OPTIONS, held, ended)

    async def stopped(self, turn: Turn, ids: int) -> None:
        """The next turn of the engine, which has not begun yet, is stopped after so many ids."""
        self._ids = ids
        await turn.until(ids)
        stopping = asyncio.create_task(turn.running.suspend())
        await asyncio.sleep(0)  # the engine is asked to
        self._released.set()
        await stopping


def run(steps: Callable[[EngineService], Awaitable[None]], held: Held | None = None) -> None:
    async def scenario() -> None:
        service = EngineService(models("dflash2"), OPTIONS, held and held.runner)
        try:
            async with asyncio.timeout(60):
                await steps(service)
        finally:
            await asyncio.to_thread(service.close)

    asyncio.run(scenario())


def shown(events: list[TurnEvent]) -> list[TurnEvent]:
    """Without what says how long it took and where it began, and without log-probabilities."""
    deltas: list[TurnEvent] = [
        replace(event, rounds=(), logprobs=tuple(replace(fact, logprob=0.0, top=()) for fact in event.logprobs))
        for event in events
        if isinstance(event, Delta)
    ]
    return [*deltas, *(replace(event, seconds=0.0) for event in events if isinstance(event, Closed))]


def logprobs(events: list[TurnEvent]) -> list[float | None]:
    facts = [fact for event in events if isinstance(event, Delta) for fact in event.logprobs]
    return [value for fact in facts for value in (fact.logprob, *(logprob for _, logprob in fact.top))]


def assert_same(events: list[TurnEvent], expected: list[TurnEvent]) -> None:
    """Log-probabilities as near as another way of computing them comes."""
    assert shown(events) == shown(expected)
    assert logprobs(events) == pytest.approx(logprobs(expected), abs=1e-3)


def test_a_turn_goes_on_after_any_of_its_rounds_and_tells_the_same_and_so_does_one_that_is_over():
    async def steps(service: EngineService) -> None:
        whole = Turn(service)
        expected = await whole.told()
        assert isinstance(expected[-1], Closed) and len(whole.log.records) > 6
        for length in range(1, len(whole.log.records) + 1):
            again = Turn(service, whole.log.records[:length])
            events = await again.told()
            assert isinstance(events[0], Opened) and sum(isinstance(event, Opened) for event in events) == 1
            assert_same(events, expected)
            if length < len(whole.log.records):  # what is over is not written again
                assert [type(record) for record in again.log.records] == [type(r) for r in whole.log.records]

    run(steps)


def test_nothing_is_told_before_all_copies_have_it():
    async def steps(service: EngineService) -> None:
        turn = Turn(service)
        seen = 0
        async for told in turn.stream.read(Place()):
            if isinstance(told.event, Delta):
                seen += len(told.event.token_ids)
                assert turn.log.receipts >= seen
        assert seen == 24

    run(steps)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_turn_that_is_stopped_goes_on_here_or_elsewhere_as_if_nothing_had_happened(elsewhere: bool):
    async def steps(service: EngineService) -> None:
        expected = await Turn(service).told()
        turn = Turn(service)
        await held.stopped(turn, 6)
        told = list(turn.log.records)
        await asyncio.sleep(0.05)
        assert turn.log.records == told and not turn.stream.over
        turn.running.go_on(Moved("there") if elsewhere else None)
        events = await turn.told()
        if elsewhere:
            assert events[-1] == Moved("there") and turn.stream.moved
            rest = await Turn(service, told).told()
            assert shown(rest)[: len(shown(events))] == shown(events)
            events = rest
        assert_same(events, expected)

    held = Held()
    run(steps, held)


def test_a_turn_that_has_ended_cannot_be_stopped_any_more():
    async def steps(service: EngineService) -> None:
        turn = Turn(service)
        await turn.told()
        await turn.running.suspend()
        assert turn.stream.over and not turn.stream.moved

    run(steps)


def test_a_turn_that_is_cancelled_while_it_stands_still_or_before_it_began_does_not_run_to_its_end():
    async def steps(service: EngineService) -> None:
        long = replace(SUBMIT, max_tokens=2000)
        early = Turn(service, submit=long)
        early.running.cancel()
        last = (await early.told())[-1]
        assert getattr(last, "finish_reason", "") == "cancelled" or getattr(last, "code", "") == "turn_cancelled"
        turn = Turn(service, submit=long)
        await held.stopped(turn, 4)
        turn.running.cancel()
        turn.running.go_on(None)
        last = (await turn.told())[-1]
        assert isinstance(last, Closed) and last.finish_reason == "cancelled" and last.completion_tokens < 200

    held = Held()
    run(steps, held)


def test_a_turn_whose_session_is_another_owners_logs_nothing_more():
    async def steps(service: EngineService) -> None:
        turn = Turn(service, submit=replace(SUBMIT, max_tokens=2000))
        await turn.until(4)
        turn.running.moved()
        written = len(turn.log.records)
        assert isinstance((await turn.told())[-1], Moved)
        assert len(turn.log.records) == written

    run(steps)
