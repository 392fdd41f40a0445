"""What is told of an engine's work: counts since it began, which only grow."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Distribution:
    """How often a value came: `counts[i]` were above `bounds[i - 1]` and at most `bounds[i]`, the last ones above all
    bounds. `total`: their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True)
class Flow:
    """So many transfers, what they carried, and how long they took in all."""

    transfers: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def plus(self, size: int, seconds: float) -> Flow:
        """One transfer more."""
        return Flow(self.transfers + 1, self.bytes + size, self.seconds + seconds)


@dataclass(frozen=True)
class Counts:
    """`rounds` were committed. `drafted[p]`: in so many of their rows p drafts were verified; `accepted[a]`: in so many
    a were accepted. `part_seconds`: the rounds' time by part (`deployment/engine/tally.py`).

    `tokens`: committed, published or not. `waits`: seconds that turns waited for a lane. `started` and `reused`, by
    where the state came from: turns whose prompt was in, and tokens that they did not have to prefill. `ended`: turns
    by finish reason, or `suspended`; `failed`: turns and calls by the error's code. `captured`: checkpoints by kind.
    `evicted`: sessions that the device let go of; `preempted`: lanes that were taken away. `slices` of prompts were
    prefilled, with `prefilled` tokens in `prefill_seconds`.

    `durable_written`: publications in the durable tier, and bytes that were new to it; `durable_read`: segments that
    came from there.
    """

    rounds: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    part_seconds: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    waits: Distribution = Distribution((), (0,), 0.0)
    started: dict[str, int] = field(default_factory=dict)
    reused: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    captured: dict[str, int] = field(default_factory=dict)
    evicted: int = 0
    preempted: int = 0
    slices: int = 0
    prefilled: int = 0
    prefill_seconds: float = 0.0
    durable_written: Flow = Flow()
    durable_read: Flow = Flow()
