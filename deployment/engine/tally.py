"""What an engine has done since it began: counts for whoever watches it. Plain numbers, changed by its own thread.

A round costs its tally a handful of additions and one look at the clock a part; nothing here asks the device.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from deployment.engine.counts import Counts, Distribution, Flow
from deployment.engine.events import Captured, Event, Evicted, Failed, Finished, Round, Started, Suspended

WAIT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of how long turns wait for a lane."""


class Laps:
    """Where the time of rounds went, as the engine's thread sees it.

    On a CPU a part lasts as long as its work. On a card its work is only launched there, and `accept`, which ends with
    the round's one copy back, waits for all of it; `commit` is launched, and belongs to the next round's `accept`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last = 0.0
        self.seconds = defaultdict[str, float](float)

    def begin(self) -> None:
        self._last = self._clock()

    def lap(self, part: str) -> None:
        """What has passed since `begin` or the last lap went to this part."""
        now = self._clock()
        self.seconds[part] += now - self._last
        self._last = now


@dataclass
class Recorder:
    """A distribution that grows: how many values were at most each bound, each counted once, and how many above all."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def so_far(self) -> Distribution:
        return Distribution(self.bounds, tuple(self.counts), self.total)


class Tally:
    """One engine's. `draft_tokens`: the largest K of its rounds."""

    def __init__(self, draft_tokens: int, laps: Laps) -> None:
        self.laps = laps
        self._rounds = 0
        self._drafted = [0] * (draft_tokens + 1)
        self._accepted = [0] * (draft_tokens + 1)
        self._waits = Recorder(WAIT_SECONDS)
        self._started: Counter[str] = Counter()
        self._reused: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._captured: Counter[str] = Counter()
        self._tokens = self._evicted = self._preempted = 0
        self._slices = self._prefilled = 0
        self._prefill_seconds = 0.0

    def counting(self, emit: Callable[[Event], None]) -> Callable[[Event], None]:
        """The same, and every event is counted."""

        def counted(event: Event) -> None:
            self._count(event)
            emit(event)

        return counted

    def _count(self, event: Event) -> None:
        match event:
            case Round():
                self._tokens += len(event.token_ids)
            case Started():
                self._started[event.hit] += 1
                self._reused[event.hit] += event.reused
            case Finished():
                self._ended[event.finish_reason] += 1
            case Suspended():
                self._ended["suspended"] += 1
            case Failed():
                self._failed[event.code] += 1
            case Captured():
                self._captured[event.kind] += 1
            case Evicted():
                self._evicted += 1
            case _:
                pass

    # ------------------------------------------------------------------------------------------------ what is no event

    def round(self, rows: Iterable[tuple[int, int]]) -> None:
        """A round was committed: of each row that kept something, how many drafts were verified, how many accepted."""
        self._rounds += 1
        for drafted, accepted in rows:
            self._drafted[drafted] += 1
            self._accepted[accepted] += 1

    def slice(self, tokens: int, seconds: float) -> None:
        """A slice of a prompt was prefilled."""
        self._slices += 1
        self._prefilled += tokens
        self._prefill_seconds += seconds

    def admitted(self, waited: float) -> None:
        """A turn got a lane."""
        self._waits.add(waited)

    def preempted(self) -> None:
        self._preempted += 1

    def counts(self, durable_written: Flow, durable_read: Flow) -> Counts:
        """All of it, as it is now."""
        return Counts(
            rounds=self._rounds,
            drafted=tuple(self._drafted),
            accepted=tuple(self._accepted),
            part_seconds=dict(self.laps.seconds),
            tokens=self._tokens,
            waits=self._waits.so_far,
            started=dict(self._started),
            reused=dict(self._reused),
            ended=dict(self._ended),
            failed=dict(self._failed),
            captured=dict(self._captured),
            evicted=self._evicted,
            preempted=self._preempted,
            slices=self._slices,
            prefilled=self._prefilled,
            prefill_seconds=self._prefill_seconds,
            durable_written=durable_written,
            durable_read=durable_read,
        )
