"""A request's turns as they run, and what the interface makes of their events."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from deployment.answer import Choices
from deployment.body_reading import parse
from deployment.chat_format import ChatFormat
from deployment.engine.commands import Sampling, Submit
from deployment.engine.errors import EngineError
from deployment.engine.events import Event, Started
from deployment.engine.runners import ThreadRunner
from deployment.engine.service import EngineService
from deployment.errors import Refused, RequestError
from deployment.held_turn import call_later
from deployment.keeper import SessionKeeper
from deployment.ownership import Epoch, SessionKey
from deployment.parsing.turn_text import TurnText
from deployment.request_reading import Asking, turn_request
from deployment.running import RunningTurn, TurnLog
from deployment.schemas import TurnBody
from deployment.session import Session
from deployment.turn_desk import TurnDesk
from deployment.turn_stream import Place, TurnStream
from deployment.turn_table import TurnTable
from deployment.turns import Prompt, choices
from deployment.wire import Closed, Delta, Opened, TokenFact, TurnEvent, TurnRequest
from tests.engine.driving import models, options, prompt

PROMPT = prompt(0)


def stream_of(service: EngineService, request: TurnRequest, start: int = len(PROMPT)) -> TurnStream:
    return TurnStream(request.turn, request.n, start, lambda _: TurnText(service.tokenizer, PROMPT[-1:]))


async def told(stream: TurnStream) -> list[TurnEvent]:
    return [one.event async for one in stream.read(Place())]


def events_of(request: TurnRequest, turn_log: TurnLog | None = None, **fields: Any) -> list[TurnEvent]:
    """All events of a request's choices, from an engine of its own, in the order in which they came."""

    async def scenario() -> list[TurnEvent]:
        service = EngineService(models("dflash2"), options("dflash2", lanes=4, images=2))
        submit = Submit(
            request.turn, PROMPT, max_tokens=request.max_tokens, ignore_eos=True, stop_strings=request.stop, **fields
        )
        stream = stream_of(service, request)
        try:
            for one in choices(submit, request.n):
                RunningTurn(
                    "r", "m", request, one, Prompt(PROMPT, len(PROMPT) - 1), None, service,
                    cast(SessionKeeper, None), stream, lambda last: None, turn_log,
                )  # fmt: skip
            return await told(stream)
        finally:
            await asyncio.to_thread(service.close)

    return asyncio.run(scenario())


def asked(**fields: Any) -> TurnRequest:
    return TurnRequest(turn="t", mode="history", messages=(), max_tokens=16, **fields)


def contents(events: list[TurnEvent], n: int = 1) -> list[str]:
    return ["".join(e.content for e in events if isinstance(e, Delta | Closed) and e.choice == i) for i in range(n)]


def test_choices_of_a_request_are_told_apart_and_each_is_what_it_would_be_alone():
    sampling = Sampling(temperature=1.5, seed=3)
    together = events_of(asked(n=3), sampling=sampling)
    alone = contents(events_of(asked(), sampling=sampling))
    assert contents(together, 3)[0] == alone[0]
    assert len(set(contents(together, 3))) == 3
    assert sorted(e.choice for e in together if isinstance(e, Closed)) == [0, 1, 2]


def test_a_stop_string_is_the_stop_reason_and_nothing_of_it_is_in_the_text():
    (whole,) = contents(events_of(asked()))
    stop = whole[9:13]
    events = events_of(asked(stop=(stop,)))
    closed = events[-1]
    assert isinstance(closed, Closed) and (closed.finish_reason, closed.stop_reason) == ("stop", stop)
    assert contents(events) == [whole[: whole.index(stop)]]


def test_logprobs_come_with_the_tokens_that_they_belong_to():
    events = events_of(asked(stop=("never",)), sampling=Sampling(logprobs=1))
    facts = [fact for e in events if isinstance(e, Delta) for fact in e.logprobs]
    assert len(facts) == 16
    assert b"".join(fact.data for fact in facts).decode() == contents(events)[0]
    assert all(fact.top == ((fact.data, fact.logprob),) for fact in facts)


def test_queue_seconds_of_a_body_are_how_long_its_turn_waits_for_a_lane():
    body = parse(TurnBody, {"messages": [{"role": "user", "content": "Hello"}], "queue_seconds": 0.01})
    request = turn_request(body, "history", Asking("tenant"))

    async def scenario() -> TurnEvent:
        service = EngineService(models("none"), options("none", lanes=1, images=2, queue_seconds=60.0))
        none: Any = None
        desk = TurnDesk("r", "m", service, none, none, TurnTable(), 30.0, call_later)
        occupant = service.turn(Submit("occupant", PROMPT, max_tokens=3000, ignore_eos=True))
        try:
            await anext(occupant)
            return (await anext(desk.start(request, Prompt(PROMPT, 1), None).read())).event
        finally:
            await occupant.aclose()
            await asyncio.to_thread(service.close)

    refused = asyncio.run(scenario())
    assert isinstance(refused, Refused) and (refused.status, refused.code) == (503, "queue_timeout")


# ------------------------------------------------------------------------------------------------ turns that fail


class Keeper:
    """Notes what it is asked to copy or to forget; `fenced`: the session has another owner by then. `error`: what a
    copy raises in its place."""

    def __init__(self, fenced: bool = False, error: Exception | None = None) -> None:
        self.asked: list[str] = []
        self.fenced = fenced
        self.error = error
        self.copies = self.ending = self

    async def turn_ended(self, session: Session) -> None:
        self.asked.append("copy")
        if self.error is not None:
            raise self.error
        if self.fenced:
            raise RequestError(409, "session_moved", "somebody else has it")

    async def abandon(self, session: Session) -> None:
        self.asked.append("abandon")


def failing_turn(keeper: Keeper, rounds: int) -> tuple[Session, list[TurnEvent], list[Event]]:
    """A session whose turn fails after so many rounds, the turn's events, and those of a turn that goes on from it."""

    async def scenario() -> tuple[Session, list[TurnEvent], list[Event]]:
        service = EngineService(models("dflash2"), options("dflash2", images=4))
        session = Session(SessionKey("t", "s"), Epoch(1, 1))
        submit = Submit("t", PROMPT, max_tokens=40, ignore_eos=True, session=session.engine_id)
        assert isinstance(service._runner, ThreadRunner)
        executor = service._runner._engine._executor
        run, left = executor.run, iter(range(rounds))

        def failing(lanes: Any, meanwhile: Any = None) -> Any:
            if next(left, None) is None:
                raise RuntimeError("device lost")
            return run(lanes, meanwhile)

        executor.run = failing
        try:
            request = TurnRequest(turn="t", mode="history", messages=({"role": "user", "content": "Hello"},))
            stream = stream_of(service, request)
            RunningTurn(
                "r", "m", request, submit, Prompt(PROMPT, 1), session, service, cast(SessionKeeper, keeper), stream,
                lambda last: None,
            )  # fmt: skip
            events = await told(stream)
            executor.run = run
            again = Submit("u", (*session.ledger, 290), max_tokens=2, session=session.engine_id)
            later = [event async for event in service.turn(again)] if session.ledger else []
        finally:
            await asyncio.to_thread(service.close)
        return session, events, later

    return asyncio.run(scenario())


@pytest.mark.parametrize("fenced", [False, True])
def test_what_a_failed_turn_published_stays_in_its_session_and_the_next_turn_goes_on_from_it(fenced):
    keeper = Keeper(fenced)
    session, events, later = failing_turn(keeper, rounds=3)
    refused, (text,) = events[-1], contents(events)
    assert isinstance(refused, Refused) and (refused.status, refused.code) == (500, "internal_error")
    assert text and session.transcript == [
        {"role": "user", "content": "Hello"}, {"role": "assistant", "content": text},
    ]  # fmt: skip
    (turn,) = session.turns
    answer = session.ledger[len(PROMPT) :]
    assert (turn.finish_reason, turn.published) == ("failed", len(answer)) and len(answer) > 3
    assert models("dflash2").tokenizer.decode(answer) == text
    assert session.frontier == turn.frontier == len(session.ledger) - 1
    assert keeper.asked == ["copy"] and session.running is None
    (started,) = [event for event in later if isinstance(event, Started)]
    assert (started.hit, started.reused) == ("device", session.frontier)


def test_a_session_whose_first_turn_fails_before_its_first_token_is_gone_again():
    keeper = Keeper()

    async def scenario() -> TurnEvent:
        service = EngineService(models("none"), options("none", images=2))
        session = Session(SessionKey("t", "s"), Epoch(1, 1))
        request = TurnRequest(turn="t", mode="history", messages=())
        submit = Submit("t", PROMPT, max_tokens=0, session=session.engine_id)
        stream = stream_of(service, request)
        try:
            RunningTurn(
                "r", "m", request, submit, Prompt(PROMPT, 1), session, service, cast(SessionKeeper, keeper), stream,
                lambda last: None,
            )  # fmt: skip
            (last,) = await told(stream)
        finally:
            await asyncio.to_thread(service.close)
        assert not session.ledger and not session.turns
        return last

    refused = asyncio.run(scenario())
    assert isinstance(refused, Refused) and refused.param == "max_tokens" and keeper.asked == ["abandon"]


@pytest.mark.parametrize("error", [RequestError(503, "session_unavailable", "no"), EngineError("overloaded", "no")])
def test_a_turn_that_was_told_whole_is_over_and_well_whatever_becomes_of_its_copy(error, serve_log):
    keeper = Keeper(error=error)

    async def scenario() -> tuple[Session, list[TurnEvent]]:
        service = EngineService(models("none"), options("none", images=2))
        session = Session(SessionKey("t", "s"), Epoch(1, 1))
        request = TurnRequest(turn="t", mode="history", messages=({"role": "user", "content": "Hello"},))
        submit = Submit("t", PROMPT, max_tokens=5, ignore_eos=True, session=session.engine_id)
        stream = stream_of(service, request)
        try:
            RunningTurn(
                "r", "m", request, submit, Prompt(PROMPT, 1), session, service, cast(SessionKeeper, keeper), stream,
                lambda last: None,
            )  # fmt: skip
            return session, await told(stream)
        finally:
            await asyncio.to_thread(service.close)

    session, events = asyncio.run(scenario())
    closed = events[-1]
    assert isinstance(closed, Closed) and (closed.finish_reason, closed.completion_tokens) == ("length", 5)
    assert keeper.asked == ["copy"] and [turn.finish_reason for turn in session.turns] == ["length"]
    assert "no image of turn t, which is over" in serve_log.text


# ------------------------------------------------------------------------------------------------ the interface

OPENED = Opened("r", "m", 7, 10, 4, None, "t", choices=2, created=3)
CLOSED = Closed("stop", 3, (1, 0), 1.0, 0.1, None, choice=0, stop_reason="END")


def test_whole_answers_have_their_choices_in_order_and_usage_is_summed():
    taken = Choices(2)
    for event in (
        Delta("", "b", 1), Delta("", "a", 0), replace(CLOSED, choice=1, stop_reason=None), Delta("t", "c", 0), CLOSED
    ):  # fmt: skip
        assert not taken.complete
        taken.take(event)
    assert taken.complete
    document = ChatFormat(OPENED).whole(taken)
    assert [(c["index"], c["message"]["content"], c["stop_reason"]) for c in document["choices"]] == [
        (0, "ac", "END"), (1, "b", None),
    ]  # fmt: skip
    assert document["choices"][0]["message"]["reasoning_content"] == "t"
    assert "reasoning_content" not in document["choices"][1]["message"]
    assert document["usage"]["completion_tokens"] == 6 and document["usage"]["total_tokens"] == 16
    assert "meta_info" not in document and document["choices"][1]["meta_info"]["rounds"] == [1, 0]


def test_chunks_name_their_choice_and_carry_finite_logprobs():
    shown = ChatFormat(OPENED)
    fact = TokenFact(b"\xe2\x82", float("-inf"), ((b"a", -0.5),))
    chunk = shown.delta(Delta("", "", 1, (fact,)))
    assert chunk is not None
    (choice,) = chunk["choices"]
    assert choice["index"] == 1 and choice["delta"] == {}
    (entry,) = choice["logprobs"]["content"]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("\ufffd", [0xE2, 0x82], -9999.0)
    assert entry["top_logprobs"] == [{"token": "a", "bytes": [97], "logprob": -0.5}]
    last = shown.last(replace(CLOSED, choice=1))["choices"][0]
    assert (last["index"], last["finish_reason"], last["stop_reason"]) == (1, "stop", "END")
    plain = shown.delta(Delta("", "x"))
    assert plain is not None and plain["choices"][0]["logprobs"] is None and shown.delta(Delta("", "")) is None
