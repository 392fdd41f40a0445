"""How turns begin, and begin again: idempotency, retries, and who makes way for whom in a session."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from deployment.engine.commands import Cancel, Command, Drop, Submit
from deployment.engine.events import Dropped, Event, Finished, Started, Tokens
from deployment.engine.service import EngineService
from deployment.errors import RequestError
from deployment.held_turn import HeldTurn
from deployment.hinted_state import HintedState
from deployment.keeper import SessionKeeper
from deployment.ownership.log import Numbered
from deployment.ownership.words import Epoch, SessionKey
from deployment.prompting import Prompter
from deployment.session import Session
from deployment.turn_desk import TurnDesk
from deployment.turn_table import KEPT_SECONDS, REPEAT_SECONDS, TurnTable
from deployment.turns import Prompt
from deployment.wire import Closed, Delta, Elsewhere, MediaSource, Route, Told, TurnRequest
from model import DEMO
from model.generation_defaults import GenerationDefaults
from model.tokenizer import Tokenizer
from tests.deployment.test_turn_streams import Clock

TENANT = "a" * 64
KEY = SessionKey(TENANT, "s")
ROUTE = Route("x")
PROMPT = Prompt((5, 6, 7), 2)


class Engine:
    """Turns that publish one id a step, until they are cancelled or told to end."""

    tokenizer = Tokenizer.load(DEMO / "target")
    generation_defaults = GenerationDefaults(temperature=0.0)

    def __init__(self) -> None:
        self.submitted: list[Submit] = []
        self.dropped: list[str] = []
        self._steps: defaultdict[str, asyncio.Queue[bool]] = defaultdict(asyncio.Queue)

    async def turn(self, submit: Submit) -> AsyncIterator[Event]:
        self.submitted.append(submit)
        steps = self._steps[submit.turn]
        ids: list[int] = []
        yield Started(submit.turn, "none", 0, 3)
        while await steps.get():
            ids.append(30 + len(ids))
            yield Tokens(submit.turn, 3 + len(ids) - 1, (ids[-1],), 0)
        how: Any = "cancelled" if steps.empty() else "stop"
        yield Finished(submit.turn, how, tuple(ids), None, 3, 3 + len(ids), (), 1.0, 0.1)

    def step(self, turn: str) -> None:
        self._steps[turn].put_nowait(True)

    def end(self, turn: str) -> None:
        self._steps[turn].put_nowait(False)
        self._steps[turn].put_nowait(False)

    def send(self, command: Cancel) -> None:
        self._steps[command.turn].put_nowait(False)

    async def call(self, command: Command) -> Event:
        assert isinstance(command, Drop)
        self.dropped.append(command.session)
        return Dropped(command.call, command.session)


class Keeper:
    """One session that is always here."""

    def __init__(self) -> None:
        self.session = Session(KEY, Epoch(1, 1), created=True)
        self.records: list[Numbered] = []
        self.copies = self

    async def acquire(
        self,
        key: SessionKey,
        believed: Any,
        *,
        must_exist: bool,
        anew: bool = False,
        accept_durable: bool = False,
        alone: bool = False,
    ) -> tuple[Session, str]:
        await asyncio.sleep(0)
        return self.session, "device"

    def held(self, key: SessionKey) -> Session:
        return self.session

    def append(self, key: SessionKey, records: Sequence[Numbered]) -> int:
        self.records.extend(records)
        return len(self.records)

    async def committed(self, key: SessionKey, sequence: int) -> None: ...

    def turn_began(self, session: Session) -> None: ...

    async def turn_ended(self, session: Session) -> None: ...


class Prompts:
    async def alone(self, request: TurnRequest) -> Prompt:
        return PROMPT

    async def in_session(self, prompt: Prompt, session: Session) -> Prompt:
        return prompt

    async def appended(self, request: TurnRequest, session: Session) -> Prompt:
        return PROMPT


class Desk:
    def __init__(self, detach_seconds: float = 30.0, kept_weight: int = 1000) -> None:
        self.engine, self.keeper, self.clock = Engine(), Keeper(), Clock()
        self.table = TurnTable(lambda: self.clock.now, kept_weight)
        self.desk = TurnDesk(
            "here", "m", cast(EngineService, self.engine), cast(SessionKeeper, self.keeper), cast(Prompter, Prompts()),
            self.table, detach_seconds, self.clock.later, lambda: time.time() + self.clock.now,
        )  # fmt: skip
        self._turns = 0

    def asked(self, text: str = "Hello", **fields: Any) -> TurnRequest:
        self._turns += 1
        messages = ({"role": "user", "content": text},)
        return TurnRequest(f"{self._turns:032x}", "history", messages, tenant=TENANT, **fields)

    async def take(self, request: TurnRequest) -> HeldTurn:
        turn = await self.desk.take(ROUTE, request)
        assert isinstance(turn, HeldTurn)
        return turn

    @asynccontextmanager
    async def reading(self, turn: HeldTurn) -> AsyncIterator[Callable[[], Awaitable[Told]]]:
        async with aclosing(turn.read()) as told:
            yield lambda: anext(told)

    async def finished(self, request: TurnRequest, steps: int = 2) -> HeldTurn:
        """A turn that has ended by itself, read to its end."""
        turn = await self.take(request)
        async for told in turn.read():
            if told.event.__class__.__name__ == "Opened":
                for _ in range(steps):
                    self.engine.step(turn.id)
                self.engine.end(turn.id)
        await turn.ended()
        return turn


def run(steps: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(cast(Any, steps()))


def ids(told: list[Told]) -> list[int]:
    return [token for one in told if isinstance(one.event, Delta) for token in one.event.token_ids]


def test_a_turn_that_follows_another_one_begins_only_while_that_is_its_sessions_newest():
    async def steps() -> None:
        d = Desk()
        first = await d.finished(d.asked(key=KEY))
        second = await d.finished(d.asked(key=KEY, follows=first.id))
        with pytest.raises(RequestError) as caught:
            await d.take(d.asked(key=KEY, follows=first.id))
        refused = caught.value.refused
        assert (refused.status, refused.code) == (409, "session_moved_on")
        assert [turn.id for turn in d.keeper.session.turns] == [first.id, second.id]

    run(steps)


def test_a_turn_that_comes_too_late_to_follow_another_one_ends_none_that_runs():
    async def steps() -> None:
        d = Desk()
        first = await d.finished(d.asked(key=KEY))
        await d.finished(d.asked(key=KEY, follows=first.id))
        unread = await d.take(d.asked(key=KEY))
        with pytest.raises(RequestError, match="has gone on"):
            await d.take(d.asked(key=KEY, follows=first.id))
        assert d.keeper.session.running is unread
        unread.cancel()
        await unread.ended()

    run(steps)


# ------------------------------------------------------------------------------------------------ the same key


@pytest.mark.parametrize("key, n", [(KEY, 1), (None, 1), (None, 2)])
def test_a_request_with_the_key_of_a_running_turn_reads_that_turn_from_its_first_event(key: SessionKey | None, n: int):
    async def steps() -> None:
        d = Desk()
        first = await d.take(d.asked(idempotency_key="k", key=key, n=n))
        async with d.reading(first) as told:
            await told()
            d.engine.step(first.id)
            seen = await told()
            again = await d.take(d.asked(idempotency_key="k", key=key, n=n))
            assert again is first and len(d.engine.submitted) == n
            async with d.reading(again) as retold:
                assert [(await retold()).event.__class__.__name__, await retold()] == ["Opened", seen]
            for submit in d.engine.submitted:
                d.engine.end(submit.turn)
            while not isinstance((await told()).event, Closed):
                pass

    run(steps)


def test_duplicates_that_come_at_once_make_one_turn():
    async def steps() -> None:
        d = Desk()
        turns = await asyncio.gather(*(d.take(d.asked(idempotency_key="k", key=KEY)) for _ in range(5)))
        assert len(set(turns)) == 1
        await asyncio.sleep(0)
        assert len(d.engine.submitted) == 1
        turns[0].cancel()
        await turns[0].ended()

    run(steps)


def test_a_turn_that_is_over_is_told_again_under_its_key_for_a_day_and_not_longer():
    async def steps() -> None:
        d = Desk()
        first = await d.finished(d.asked(idempotency_key="k"))
        d.clock.advance(KEPT_SECONDS)
        again = await d.take(d.asked(idempotency_key="k"))
        assert again is first and ids([told async for told in again.read()]) == [30, 31]
        d.clock.advance(1)
        assert await d.finished(d.asked(idempotency_key="k")) is not first

    run(steps)


@pytest.mark.parametrize("change", [{"text": "Other"}, {"key": KEY}, {"seed": 4}])
def test_a_key_that_another_request_has_used_is_refused_with_that_turn(change: dict[str, Any]):
    async def steps() -> None:
        d = Desk()
        first = await d.finished(d.asked(idempotency_key="k"))
        with pytest.raises(RequestError) as caught:
            await d.take(d.asked(idempotency_key="k", **change))
        refused = caught.value.refused
        assert (refused.status, refused.code) == (422, "idempotency_mismatch") and first.id in refused.message
        other = await d.take(replace(d.asked(idempotency_key="k", **change), tenant="b" * 64, key=None))
        assert other is not first
        other.cancel()
        await other.ended()

    run(steps)


def test_a_key_in_the_sessions_records_leads_to_the_replica_that_ran_the_turn_and_never_runs_it_twice():
    async def steps() -> None:
        d = Desk()
        turn = await d.finished(d.asked(idempotency_key="k", key=KEY))
        (record,) = d.keeper.session.turns
        assert record.idempotency_key == "k"
        asked = d.asked(idempotency_key="k", key=KEY)
        d.table.forget(KEY)
        with pytest.raises(RequestError) as caught:
            await d.take(asked)
        assert (caught.value.refused.status, caught.value.refused.code) == (410, "turn_not_kept")
        d.keeper.session.turns = [replace(record, replica="there")]
        assert await d.desk.take(ROUTE, asked) == Elsewhere("there", turn.id)
        assert await d.desk.find(ROUTE, KEY, turn.id) == Elsewhere("there", turn.id)
        with pytest.raises(RequestError) as caught:
            await d.take(d.asked("Other", idempotency_key="k", key=KEY))
        assert caught.value.refused.status == 422
        assert len(d.engine.submitted) == 1

    run(steps)


def test_a_key_in_the_sessions_records_is_free_again_a_day_after_its_turns_end():
    async def steps() -> None:
        d = Desk()
        first = await d.finished(d.asked(idempotency_key="k", key=KEY))
        d.clock.advance(KEPT_SECONDS + 1)
        second = await d.finished(d.asked("Other", idempotency_key="k", key=KEY))
        assert second is not first
        before, after = d.keeper.session.turns
        assert before.idempotency_key == after.idempotency_key == "k"
        d.keeper.session.turns = [before, replace(after, ended_at=before.ended_at + KEPT_SECONDS + 1)]
        d.table.forget(KEY)
        with pytest.raises(RequestError) as caught:
            await d.take(d.asked(idempotency_key="k", key=KEY))
        assert caught.value.refused.status == 422, "it is the second one's now"

    run(steps)


def test_turns_of_a_deleted_session_are_not_those_of_another_one_with_its_name():
    async def steps() -> None:
        d = Desk()
        turn = await d.finished(d.asked(idempotency_key="k", key=KEY))
        d.keeper.session = Session(KEY, Epoch(1, 2), created=True)
        with pytest.raises(RequestError) as caught:
            await d.desk.find(ROUTE, KEY, turn.id)
        assert caught.value.refused.code == "turn_not_found"
        assert await d.finished(d.asked(idempotency_key="k", key=KEY)) is not turn

    run(steps)


def test_a_request_that_was_refused_may_be_tried_again_under_its_key():
    async def steps() -> None:
        d = Desk()
        failing: Any = RequestError(429, "overloaded", "too many")

        async def refuse(submit: Submit) -> AsyncIterator[Event]:
            raise failing
            yield

        turn, d.engine.turn = d.engine.turn, refuse  # pyright: ignore[reportAttributeAccessIssue]
        told = [one async for one in (await d.take(d.asked(idempotency_key="k"))).read()]
        assert told[0].event == failing.refused
        d.engine.turn = turn
        assert ids([one async for one in (await d.finished(d.asked(idempotency_key="k"))).read()]) == [30, 31]

    run(steps)


# ------------------------------------------------------------------------------------------------ marked retries


def test_a_marked_retry_in_a_session_is_its_turn_for_ten_minutes_and_an_unmarked_one_is_a_new_turn():
    async def steps() -> None:
        d = Desk()
        first = await d.finished(d.asked(key=KEY))
        d.clock.advance(REPEAT_SECONDS)
        assert await d.take(d.asked(key=KEY, repeated=True)) is first
        second = await d.finished(d.asked(key=KEY))
        assert second is not first and await d.take(d.asked(key=KEY, repeated=True)) is second
        d.clock.advance(REPEAT_SECONDS + 1)
        third = await d.finished(d.asked(key=KEY, repeated=True))
        assert third not in (first, second)
        fourth = await d.finished(d.asked("Other", key=KEY, repeated=True))
        assert fourth not in (first, second, third)

    run(steps)


def test_a_marked_retry_finds_its_turn_by_the_sessions_records_wherever_it_ran():
    async def steps() -> None:
        d = Desk()
        first = await d.finished(d.asked(key=KEY))
        await d.finished(d.asked("Next", key=KEY))
        d.table.forget(KEY)
        d.keeper.session.turns = [replace(record, replica="there") for record in d.keeper.session.turns]
        retry = {"key": KEY, "repeated": True}
        assert await d.desk.take(ROUTE, d.asked(**retry)) == Elsewhere("there", first.id)
        assert len(d.engine.submitted) == 2
        d.clock.advance(REPEAT_SECONDS + 1)
        assert (await d.finished(d.asked(**retry))).id != first.id
        d.keeper.session.turns = [replace(record, ended_at=0.0) for record in d.keeper.session.turns]
        d.table.forget(KEY)
        assert (await d.finished(d.asked("Next", **retry))).id != first.id, "nobody knows when that one ended"

    run(steps)


def test_a_marked_retry_without_a_session_promises_nothing():
    async def steps() -> None:
        d = Desk()
        first = await d.finished(d.asked())
        assert await d.finished(d.asked(repeated=True)) is not first

    run(steps)


# ------------------------------------------------------------------------------------------------ one turn a session


def test_a_turn_that_somebody_reads_refuses_the_next_one_and_one_that_nobody_reads_makes_way():
    async def steps() -> None:
        d = Desk()
        first = await d.take(d.asked(key=KEY))
        async with d.reading(first) as told:
            await told()
            d.engine.step(first.id)
            await told()
            with pytest.raises(RequestError) as caught:
                await d.take(d.asked("Next", key=KEY))
            refused = caught.value.refused
            assert (refused.status, refused.code) == (409, "session_busy")
            assert f"/v1/sessions/s/turns/{first.id}/events" in refused.message
        assert d.keeper.session.running is first and not first.abandoned
        second = await d.take(d.asked("Next", key=KEY))
        assert first.abandoned and d.keeper.session.running is second
        (record,) = d.keeper.session.turns
        assert (record.finish_reason, record.published) == ("cancelled", 1)
        assert d.keeper.session.transcript[-1] == {"role": "assistant", "content": Engine.tokenizer.decode([30])}
        second.cancel()
        await second.ended()

    run(steps)


def test_a_session_turn_goes_on_without_readers_until_its_time_is_over_and_another_one_ends_at_once():
    async def steps() -> None:
        for key, seconds in ((KEY, 30), (None, 0)):
            d = Desk(detach_seconds=30)
            turn = await d.take(d.asked(key=key))
            async with d.reading(turn) as told:
                await told()
            d.clock.advance(seconds - 1)
            assert turn.abandoned is (key is None)
            d.clock.advance(1)
            assert turn.abandoned
            await turn.ended()

    run(steps)


def test_an_unattended_turn_goes_on_without_readers_and_makes_way_for_nobody():
    async def steps() -> None:
        d = Desk(detach_seconds=30)
        turn = await d.take(d.asked(key=KEY, unattended=True))
        async with d.reading(turn) as told:
            await told()
        d.clock.advance(10_000)
        with pytest.raises(RequestError) as caught:
            await d.take(d.asked("Next", key=KEY))
        assert caught.value.refused.code == "session_busy" and not turn.abandoned
        turn.cancel()
        await turn.ended()

    run(steps)


# ------------------------------------------------------------------------------------------------ bounds, hints


def test_what_is_kept_of_turns_that_are_over_has_a_bound_and_the_oldest_go_first():
    async def steps() -> None:
        d = Desk(kept_weight=10)  # two turns of a prompt of three and two more
        turns = [await d.finished(d.asked(str(i), key=KEY, idempotency_key=f"k{i}")) for i in range(4)]
        assert len(d.table) == 2 and [d.table.find(turn.id, KEY) for turn in turns] == [None, None, *turns[2:]]
        await d.finished(d.asked("nobody can ask for this one"))
        assert len(d.table) == 2
        d.table.forget(KEY)
        assert len(d.table) == 0 and d.table.repeated(d.asked("3", key=KEY, idempotency_key="k3")) is None

    run(steps)


@pytest.mark.parametrize("mode", ["history", "append"])
def test_a_turn_that_runs_keeps_none_of_the_files_that_its_request_brought(mode: Any):
    async def steps() -> None:
        d = Desk()
        source = MediaSource("image", bytes(1 << 10), "0" * 64, "messages[0].content[0].image_url.url")
        asked = replace(d.asked(key=KEY, media=(source,)), mode=mode)
        turn = await d.finished(asked)
        assert turn.request == replace(asked, media=())
        assert await d.take(replace(asked, turn="f" * 32, repeated=True)) is turn  # and is found again without them

    run(steps)


def test_a_foreign_or_unknown_turn_is_not_found():
    async def steps() -> None:
        d = Desk()
        turn = await d.finished(d.asked(key=KEY))
        assert await d.desk.find(ROUTE, KEY, turn.id) is turn
        assert d.table.find(turn.id, SessionKey("b" * 64, "s")) is None
        with pytest.raises(RequestError) as caught:
            await d.desk.find(ROUTE, KEY, "f" * 32)
        assert (caught.value.refused.status, caught.value.refused.code) == (404, "turn_not_found")

    run(steps)


def test_turns_of_one_hint_run_side_by_side_and_leave_their_state_under_it():
    async def steps() -> None:
        d = Desk()
        turns = [await d.take(d.asked(str(i), hint="agent", n=2)) for i in range(3)]
        await asyncio.sleep(0)
        kept = [submit.session for submit in d.engine.submitted]
        assert kept == [f"hint/{TENANT}/agent", None] * 3
        assert d.engine.submitted[0].stable_boundary == PROMPT.stable_boundary
        for turn in turns:
            turn.cancel()
            await turn.ended()

    run(steps)


def test_state_of_the_longest_unused_hint_is_dropped_beyond_a_bound():
    async def steps() -> None:
        engine = Engine()
        hinted = HintedState(cast(EngineService, engine), kept=2)
        for hint in ("a", "b", "a", "c"):
            await hinted.engine_id("t", hint)
        assert engine.dropped == ["hint/t/b"]

    run(steps)


def test_a_tenant_with_many_hints_takes_the_place_of_its_own_and_of_nobody_elses():
    async def steps() -> None:
        engine = Engine()
        hinted = HintedState(cast(EngineService, engine), kept=4)
        for hint in ("1", "2"):
            await hinted.engine_id("few", hint)
        for hint in range(8):
            await hinted.engine_id("many", str(hint))
        assert engine.dropped == [f"hint/many/{hint}" for hint in range(6)]
        await hinted.engine_id("another", "1")
        assert len(engine.dropped) == 7 and "hint/another/1" not in engine.dropped

    run(steps)
