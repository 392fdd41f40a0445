"""A client asks again for a turn that has come to another replica meanwhile, with its session."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from deployment.engine.messages import Round, TokenLogprob
from deployment.event_ids import digest_of, parse_event_id
from deployment.held_turn import HeldTurn
from deployment.ownership.log import TurnEnded
from deployment.ownership.words import NOTHING
from deployment.session import Session
from deployment.session_log import Course, LoggedTurn, began_record
from deployment.wire import Closed, Delta, TurnRequest
from state.names import SessionKey
from tests.deployment.test_turn_desk import KEY, PROMPT, ROUTE, Desk, Keeper


class TakenOver(Keeper):
    """The session comes with a turn that its log tells."""

    def __init__(self, desk: Desk, asked: TurnRequest, course: Course) -> None:
        super().__init__()
        self._desk = desk
        self._logged: LoggedTurn | None = LoggedTurn(began_record(asked, PROMPT, 7, 0.0), {0: course})
        self._records = 0

    async def acquire(self, key: SessionKey, believed: Any, **how: Any) -> tuple[Session, str]:
        if (logged := self._logged) is not None:
            self._logged = None
            self._desk.desk.resume(self.session, logged)
        return self.session, "host"

    def append(self, key: SessionKey, records: Any) -> int:
        self._records += len(records)
        return self._records

    async def committed(self, key: SessionKey, sequence: int) -> None: ...

    def turn_began(self, session: Session) -> None: ...


@pytest.mark.parametrize("how", [{"idempotency_key": "k"}, {"repeated": True}])
def test_a_retry_reads_the_turn_that_its_session_brought_along_and_does_not_cancel_it(how: dict[str, Any]):
    async def steps() -> None:
        d = Desk()
        first = d.asked(key=KEY, **how)
        start = len(PROMPT.ids)
        d.keeper = TakenOver(d, first, Course([Round(first.turn, start, (30,), 0, None)]))
        d.desk._keeper = cast(Any, d.keeper)
        again = d.asked(key=KEY, **how)
        held = await d.take(again)
        assert held.id == first.turn != again.turn and not held.abandoned
        async with d.reading(held) as told:
            await told()
            assert (await told()).id.endswith(digest_of((30,)))
        held.cancel()
        await held.ended()

    asyncio.run(steps())


def test_a_turn_whose_end_was_logged_and_told_nobody_is_told_where_its_session_went():
    async def steps() -> None:
        d = Desk()
        first = d.asked(key=KEY, stop=("!",), logprobs=0)
        ids = tuple(d.engine.tokenizer.encode("one, two!"))
        entries = tuple(TokenLogprob(token, -1.0, ()) for token in ids)
        rounds = [
            Round(first.turn, 3, ids[:1], 0, None, entries[:1]),
            Round(first.turn, 4, ids[1:], len(ids) - 1, 2, entries[1:]),
        ]
        ended = TurnEnded(NOTHING, first.turn, 0, "stop", len(ids), None, "!", 1, 0.0)
        d.keeper = TakenOver(d, first, Course(rounds, ended))
        d.desk._keeper = cast(Any, d.keeper)
        held = await d.desk.find(ROUTE, KEY, first.turn)
        assert isinstance(held, HeldTurn) and d.keeper.session.free and not d.engine.submitted
        told = [one async for one in held.read()]
        deltas = [one.event for one in told if isinstance(one.event, Delta)]
        assert "".join(delta.content for delta in deltas) == "one, two"
        assert [delta.position for delta in deltas] == [4, 3 + len(ids)]
        assert [len(delta.logprobs) for delta in deltas] == [1, len(ids) - 1]
        assert isinstance(closed := told[-1].event, Closed)
        assert (closed.finish_reason, closed.stop_reason, closed.completion_tokens) == ("stop", "!", len(ids))
        after = parse_event_id(told[1].id, "after")
        assert [one.id for one in told[2:]] == [one.id async for one in held.read(after)][1:]

    asyncio.run(steps())
