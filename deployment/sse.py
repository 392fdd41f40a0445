"""A turn's events as server-sent events: chunks with ids, comments in silence, one end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from deployment.answer import AnswerFormat
from deployment.errors import Refused
from deployment.event_ids import EventId, digest_of
from deployment.last_call import REPLACED, Departing
from deployment.schemas import UsageTold
from deployment.wire import Closed, Delta, Told

SILENT_SECONDS = 5.0
"""After so long without an event a comment is sent, so that nobody on the way takes the connection for dead."""

KEEP_ALIVE = ": keep-alive\n\n"


def event(document: dict[str, Any], place: str) -> str:
    return f"id: {place}\ndata: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"


def resume(session: str, turn: str, after: str) -> str:
    """The last word of a connection that ends before its turn."""
    return "event: resume\n" + event({"session": session, "turn": turn, "after": after}, after)


async def chunks(
    shown: AnswerFormat, events: AsyncGenerator[Told | Departing, None], *, after: EventId | None, usage: UsageTold
) -> AsyncGenerator[str, None]:
    """`events` come after the turn's first one, and after the event that the reader had last; `after` None: after none.
    An error is the last event of the stream, since the status line has been sent; so is `resume`, which says where a
    session's turn is to be followed from now on."""
    opened = shown.answer.opened
    closed: list[Closed] = []
    used: dict[int, int] = {}

    def with_usage(document: dict[str, Any]) -> dict[str, Any]:
        return document if usage != "always" else {**document, "usage": shown.answer.used(sum(used.values()))}

    start = EventId(opened.turn, opened.prompt_tokens, digest_of(()), 0 if opened.choices > 1 else None)
    last = str(start if after is None else after)
    async with aclosing(events):
        if after is None:
            for choice, document in enumerate(shown.first()):
                named = choice if opened.choices > 1 else None
                yield event(with_usage(document), str(EventId(opened.turn, opened.prompt_tokens, digest_of(()), named)))
        async for told in events:
            if isinstance(told, Departing):
                session = opened.session
                yield event(REPLACED.body, last) if session is None else resume(session.id, opened.turn, last)
                return
            match told.event:
                case Delta() as delta:
                    used[delta.choice] = delta.position - opened.prompt_tokens
                    document = shown.delta(delta)
                    if document is not None:  # what has nothing to show yet is not a place that a reader has been at
                        last = told.id
                        yield event(with_usage(document), last)
                case Closed() as one:
                    closed.append(one)
                    used[one.choice] = one.completion_tokens
                    last = told.id
                    yield event(with_usage(shown.last(one)), last)
                case Refused() as refused:
                    yield event(refused.body, told.id or last)  # one by the ingress itself leads to no place
                    return
        if usage != "never":
            yield event(shown.usage_chunk(closed), last)
        yield f"id: {last}\ndata: [DONE]\n\n"


async def kept_alive(
    parts: AsyncGenerator[str, None], seconds: float = SILENT_SECONDS, word: str = KEEP_ALIVE
) -> AsyncGenerator[str, None]:
    """The same parts, and a comment, or another word that says nothing, after each silence."""
    coming: asyncio.Future[str] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(parts))
            done, _ = await asyncio.wait({coming}, timeout=seconds)
            if not done:
                yield word
                continue
            try:
                part = coming.result()
            except StopAsyncIteration:
                return
            coming = None
            yield part
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.wait({coming})
        await parts.aclose()
