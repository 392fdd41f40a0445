"""What a replica tells the reader of a turn. Refusals are values, so that no traceback is a user's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from deployment.cluster.not_owned import OwnedElsewhere
from deployment.engine import errors as engine_errors
from deployment.engine.errors import EngineError
from deployment.errors import Refused, RequestError, of_engine
from deployment.event_ids import EventId
from deployment.held_turn import HeldTurn
from deployment.wire import Elsewhere, NotHere, Told, TurnAnswer, TurnEvent


# Each generator closes the one that it reads: a reader who leaves must be known to have left at once.
async def told(
    get: Callable[[], Awaitable[HeldTurn | Elsewhere | NotHere]], after: EventId | None
) -> AsyncGenerator[TurnAnswer, None]:
    """Of the turn that `get` finds, all events, or those after an event id."""
    try:
        found = await get()
    except OwnedElsewhere as error:
        yield NotHere("", error.owner)
        return
    except RequestError as error:
        yield Told("", error.refused)
        return
    except EngineError as error:
        yield Told("", of_engine(error.code, error.message, error.param))
        return
    if isinstance(found, Elsewhere | NotHere):
        yield found
        return
    async with aclosing(events(found, after)) as answers:
        async for answer in answers:
            yield answer


async def events(turn: HeldTurn, after: EventId | None) -> AsyncGenerator[TurnAnswer, None]:
    try:
        async with aclosing(turn.read(after)) as answers:
            async for answer in answers:
                yield answer
    except RequestError as error:
        yield Told("", error.refused)


def is_full(event: TurnEvent) -> bool:
    """Whether a turn was refused for want of room. Where a limit of its own was in the way, the refusal names it."""
    full = (engine_errors.OVERLOADED, engine_errors.QUEUE_TIMEOUT)
    return isinstance(event, Refused) and event.code in full and event.param is None
