"""Conversations that go on side by side: single questions, or sessions of many turns, as agents have them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deployment.client import AsyncClient, ClientError
from deployment.load.turns import TurnSeen, turn_seen

WORDS = ("heron", "otter", "river", "stone", "reed", "bank", "ferry", "mill", "bridge", "field", "willow", "pond")


@dataclass(frozen=True)
class Load:
    """`conversations` in all, `at_once` of them, each of `turns` turns; those with more than one are sessions, whose
    later turns send what is new alone. A turn asks for exactly `tokens` tokens, after a message of about `words` words,
    which no other has. `temperature` 0: greedily.

    ValueError naming the field for what would be no load.
    """

    conversations: int
    at_once: int
    turns: int = 1
    tokens: int = 128
    words: int = 16
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("conversations", "at_once", "turns", "tokens", "words"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")

    @property
    def all_turns(self) -> int:
        return self.conversations * self.turns

    def message(self, conversation: int, turn: int) -> dict[str, str]:
        """The same for the same seed."""
        drawn = random.Random(f"{self.seed}/{conversation}/{turn}")
        first, step = drawn.randint(2, 99), drawn.randint(2, 9)
        filler = " ".join(drawn.choice(WORDS) for _ in range(max(0, self.words - 10)))
        return {"role": "user", "content": f"Count from {first} in steps of {step}, 12 numbers. {filler}".strip()}

    @property
    def options(self) -> dict[str, Any]:
        return {"max_tokens": self.tokens, "ignore_eos": True, "temperature": self.temperature}


async def put(
    client: AsyncClient, load: Load, done: Callable[[TurnSeen], None] = lambda seen: None
) -> tuple[list[TurnSeen], float]:
    """All turns, in the order of their ends, and how many seconds they took together. `done` hears of each.

    A conversation ends with its first turn that is refused. Its session is deleted when all are over.
    """
    name, waiting = f"bench-{secrets.token_hex(4)}", iter(range(load.conversations))
    sessions = [f"{name}-{number}" if load.turns > 1 else None for number in range(load.conversations)]
    seen: list[TurnSeen] = []

    def told(one: TurnSeen) -> None:
        seen.append(one)
        done(one)

    async def work() -> None:
        for number in waiting:
            await _conversation(client, load, number, sessions[number], told)

    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.at_once, load.conversations)):
                group.create_task(work())
        return seen, time.perf_counter() - began
    finally:
        for session in sessions:
            with contextlib.suppress(ClientError):  # it was never made, or goes with its server
                if session is not None:
                    await client.delete(session)


async def _conversation(
    client: AsyncClient, load: Load, number: int, session: str | None, told: Callable[[TurnSeen], None]
) -> None:
    for turn in range(load.turns):
        one = await turn_seen(client, [load.message(number, turn)], load.options, session, append=turn > 0)
        told(one)
        if one.refused is not None:
            return
