"""What is said: conversations of several turns with forks, each of which follows from a seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Literal

from tests.e2e.chaos.salted import SALTED

_SAYINGS = (
    "My locker code is 4172.",
    "What is my locker code?",
    "Count from 3 in steps of 2, 12 numbers.",
    "Count from 10 in steps of 5, 9 numbers.",
    "Tell me something about the sea.",
    "And what else?",
)


@dataclass(frozen=True)
class Step:
    """`chat` carries the branch's whole history and `append` only the new message; `fork` makes `branch` of `parent`.
    `options` are fields of the request's body."""

    kind: Literal["chat", "append", "fork"]
    branch: str
    parent: str | None = None
    message: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    keyed: bool = False
    followed: bool = False


@dataclass(frozen=True)
class Conversation:
    """`name` begins all names of its sessions."""

    name: str
    steps: tuple[Step, ...]

    def session(self, branch: str) -> str:
        return f"{self.name}-{branch}"

    def first(self, steps: int) -> Conversation:
        return replace(self, steps=self.steps[:steps])


def conversation(seed: int, number: int, turns: int, longest: int, *, salted: bool = False) -> Conversation:
    """`longest`: tokens of the longest answer."""
    draw = random.Random(f"{seed}/{number}")
    branches = ["main"]
    steps = [_turn(draw, "chat", "main", longest)]
    while len([step for step in steps if step.kind != "fork"]) < turns:
        if draw.random() < 0.25 and len(branches) < 3:
            child = f"fork{len(branches)}"
            steps.append(Step("fork", child, parent=draw.choice(branches)))
            branches.append(child)
        steps.append(_turn(draw, draw.choice(("chat", "append", "append")), draw.choice(branches), longest))
    return Conversation(f"{SALTED if salted else 'plain-'}{number}", tuple(steps))


def _turn(draw: random.Random, kind: Literal["chat", "append"], branch: str, longest: int) -> Step:
    options = {
        "temperature": draw.choice((0.7, 1.0, 1.2)),
        "top_p": 1.0,
        "top_k": 0,
        "seed": draw.getrandbits(32),
        "max_tokens": draw.randint(longest // 2, longest),
        "ignore_eos": True,
        "logprobs": draw.random() < 0.5,
    }
    keyed, followed = draw.random() < 0.5, draw.random() < 0.5
    return Step(kind, branch, None, draw.choice(_SAYINGS), tuple(options.items()), keyed, followed)
