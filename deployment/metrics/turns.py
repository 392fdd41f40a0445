"""What clients wait for, as the ingress sees it: the first token, the next chunk, or a refusal."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from deployment.engine.tally import Recorder
from deployment.errors import Refused
from deployment.last_call import Departing
from deployment.metrics import catalog
from deployment.metrics.page import Page
from deployment.wire import Closed, Delta, Opened, Told

FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GAP_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)

Events = AsyncGenerator[Told | Departing, None]


class TurnMetrics:
    """One ingress's, used from its event loop alone."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._first = defaultdict[str, Recorder](lambda: Recorder(FIRST_TOKEN_SECONDS))
        self._gaps = Recorder(GAP_SECONDS)
        self._ends: Counter[str] = Counter()
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._open = 0

    def refused(self, refused: Refused) -> None:
        """A request is answered with a refusal."""
        self._refusals[refused.code, "before"] += 1

    async def watched(self, events: Events, streamed: bool) -> Events:
        """A turn's events, as they are. `streamed`: they are told as they come, so that a refusal in the middle is no
        request's answer."""
        last, hit = self._clock(), ""
        self._open += 1
        began = False
        try:
            async with aclosing(events):
                async for told in events:
                    if isinstance(told, Told):
                        match told.event:
                            case Opened() as opened:
                                hit = _hit(opened)
                            case Delta():
                                now = self._clock()
                                (self._gaps if began else self._first[hit]).add(now - last)
                                began, last = True, now
                            case Closed(finish_reason=reason):
                                self._ends[reason] += 1
                            case Refused(code=code) if streamed and hit:
                                self._refusals[code, "within"] += 1
                            case _:
                                pass
                    yield told
        finally:
            self._open -= 1

    def fill(self, page: Page) -> None:
        for hit, recorder in sorted(self._first.items()):
            page.distribution(catalog.FIRST_TOKEN, recorder.so_far, hit=hit)
        page.distribution(catalog.CHUNK_GAP, self._gaps.so_far)
        page.add(catalog.TURNS_OPEN, self._open)
        page.each(catalog.TURNS_ANSWERED, self._ends, "reason")
        for (code, when), count in sorted(self._refusals.items()):
            page.add(catalog.REFUSALS, count, reason=code, when=when)


def _hit(opened: Opened) -> str:
    """A turn without a session may have found a prompt that began alike."""
    if opened.session is not None:
        return opened.session.hit
    return "device" if opened.reused else "none"
