"""Turns and sessions of a world of two replicas, as far as a keeper sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest

from deployment.engine.events import Finished, Round
from deployment.errors import RequestError
from deployment.ownership.messages import Placed
from deployment.ownership.words import SessionKey
from deployment.session import Session
from deployment.session_log import ended_record
from deployment.turn_log import SessionTurnLog
from deployment.turn_records import turn_record
from deployment.turns import Prompt
from deployment.wire import Moved, TurnRequest
from tests.deployment.in_process import Replica, World

KEY = SessionKey("t" * 64, "one")
PROMPT = Prompt((5, 6, 7), 2)
_ids = iter(range(1 << 30))


def run(steps: Callable[[World], Awaitable[None]], world: Callable[[], World] = World) -> None:
    async def scenario() -> None:
        inside = world()
        inside.start()
        try:
            async with asyncio.timeout(20):
                await steps(inside)
        finally:
            inside.close()

    asyncio.run(scenario())


async def get(world: World, name: str, key: SessionKey = KEY, **how: Any) -> tuple[Session, str]:
    placed = await world.replicas[name].link.locate(key)
    assert placed is None or isinstance(placed, Placed)
    return await world.replicas[name].keeper.acquire(key, placed, must_exist=how.pop("must_exist", False), **how)


async def begin(
    replica: Replica,
    session: Session,
    *rounds: tuple[int, ...],
    ask: str = "Hi",
    mode: Literal["history", "append"] = "append",
) -> TurnRequest:
    """A turn with so many rounds, whose end is still to come."""
    message = {"role": "user", "content": ask}
    request = TurnRequest(f"{next(_ids):032x}", mode, (message,), session.key, tenant=session.key.tenant)
    prompt = Prompt((*session.ledger, *PROMPT.ids), len(session.ledger) + 2)
    log = SessionTurnLog.begin(replica.keeper, session, request, prompt, 7)
    start = len(prompt.ids)
    for ids in rounds:
        log.round(Round(request.turn, start, ids, 0, len(ids) - 1, ()))
        start += len(ids)
    await log.told()
    return request


def of(request: TurnRequest, prompt: Prompt, ids: tuple[int, ...]) -> Finished:
    frontier = len(prompt.ids) + len(ids) - 1
    return Finished(request.turn, "stop", ids, None, len(prompt.ids), frontier, (), 1.0, 0.1)


async def turn(world: World, name: str, *ids: int, image: bool = True) -> Session:
    """A whole turn at a replica, as far as a keeper sees one."""
    replica = world.replicas[name]
    session, _ = await get(world, name)
    prompt = Prompt((*session.ledger, *PROMPT.ids), len(session.ledger) + 2)
    request = await begin(replica, session, ids)
    ended = of(request, prompt, ids)
    await replica.keeper.write(KEY, [ended_record(ended, request.turn, 0, 1.0)])
    answer = {"role": "assistant", "content": replica.service.tokenizer.decode(ids)}
    record = turn_record(request, name, request.turn, 7, None, ended, 1.0)
    session.book(prompt, ended, (*request.messages, answer), record)
    replica.service.held.add(session.engine_id)
    if image:
        await replica.keeper.copies.copy(session)
        await replica.owned.kept(KEY)
    return session


async def refused(work: Awaitable[Any]) -> tuple[int, str, str]:
    with pytest.raises(RequestError) as caught:
        await work
    return caught.value.refused.status, caught.value.refused.code, caught.value.refused.message


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.01)


def round_of(token: int) -> Round:
    return Round("x", 9, (token,), 0, 0, ())


class Running:
    """A turn that runs, until it is suspended."""

    def __init__(self) -> None:
        self.id = "0" * 32
        self.went: list[Moved | None] = []
        self.cancels = 0

    async def suspend(self) -> None:
        pass

    def go_on(self, elsewhere: Moved | None) -> None:
        self.went.append(elsewhere)

    def moved(self) -> None:
        self.went.append(Moved())

    def cancel(self) -> None:
        self.cancels += 1
