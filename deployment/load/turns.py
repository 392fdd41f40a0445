"""One turn as its client sees it: when its text came, what was drawn for it, and what it cost to begin."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from deployment.client import AsyncClient, ClientError, Ended, Refusal, Text, Usage

COLD = "none"


@dataclass(frozen=True)
class TurnSeen:
    """Seconds are the client's, from when it sent the request. `first`: to the first text; None: none came. `chunks`:
    those of all its texts. `rounds`: accepted drafts of each. `hit`: where its state came from, `none` for nowhere.
    `refused`: the error's code, or the error's name where the server gave none."""

    seconds: float
    chunks: tuple[float, ...] = ()
    tokens: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    rounds: tuple[int, ...] = ()
    hit: str = COLD
    refused: str | None = None

    @property
    def first(self) -> float | None:
        return self.chunks[0] if self.chunks else None

    @property
    def gaps(self) -> tuple[float, ...]:
        return tuple(after - before for before, after in itertools.pairwise(self.chunks))


async def turn_seen(
    client: AsyncClient,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    session: str | None = None,
    append: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> TurnSeen:
    """Streams a turn. One that is refused, or breaks off, is a result too."""
    began = clock()
    chunks: list[float] = []
    ended: Ended | None = None
    usage = Usage(0, 0, 0)
    refused: str | None = None
    try:
        async with aclosing(client.stream(messages, session=session, append=append, options=options)) as events:
            async for event in events:
                match event:
                    case Text():
                        chunks.append(clock() - began)
                    case Ended():
                        ended = event
                    case Usage():
                        usage = event
                    case _:
                        pass
    except Refusal as error:
        refused = error.code or str(error.status)
    except ClientError as error:
        refused = type(error).__name__
    hit = ended.resume.hit if ended is not None and ended.resume is not None else None
    return TurnSeen(
        seconds=clock() - began,
        chunks=tuple(chunks),
        tokens=usage.completion_tokens,
        prompt_tokens=usage.prompt_tokens,
        reused=usage.cached_tokens,
        rounds=ended.rounds if ended is not None else (),
        hit=hit or ("device" if usage.cached_tokens else COLD),
        refused=refused,
    )
