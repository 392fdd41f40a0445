"""What clients wait for is measured at the ingress, whatever becomes of their turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from prometheus_client.parser import text_string_to_metric_families

from deployment.errors import Refused
from deployment.last_call import Departing
from deployment.metrics.page import Page
from deployment.metrics.turns import TurnMetrics
from deployment.wire import Closed, Delta, Opened, SessionFacts, Told, TurnEvent

CLOSED = Closed("stop", 2, (), 1.0, 0.1, None)
BUSY = Refused(503, "replica_lost", "gone")


def opened(hit: str | None = None, reused: int = 0) -> Opened:
    session = SessionFacts("s", "1.1", hit, reused, 3) if hit else None
    return Opened("a", "demo", 1, 8, reused, session)


class Watched:
    """Turns whose events come at times that the test names."""

    def __init__(self) -> None:
        self.now = 0.0
        self.metrics = TurnMetrics(lambda: self.now)

    def turn(self, *events: tuple[float, TurnEvent | None], streamed: bool = True, most: int | None = None) -> None:
        """None: the ingress is about to go. `most`: its reader leaves after so many events."""
        asyncio.run(self._turn(events, streamed, most))

    async def _turn(self, events: Sequence[tuple[float, TurnEvent | None]], streamed: bool, most: int | None) -> None:
        watched = self.metrics.watched(self._told(events), streamed)
        seen = 0
        async for _ in watched:
            seen += 1
            if seen == most:
                await watched.aclose()

    async def _told(self, events: Sequence[tuple[float, TurnEvent | None]]) -> AsyncGenerator[Told | Departing, None]:
        for at, event in events:
            self.now = at
            yield Departing() if event is None else Told("", event)

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """Values of a metric's samples by the values of their labels, in the order of the labels' names."""
        page = Page()
        self.metrics.fill(page)
        found = [sample for family in text_string_to_metric_families(page.text.decode()) for sample in family.samples]
        return {
            tuple(sample.labels[label] for label in sorted(sample.labels)): sample.value
            for sample in found
            if sample.name == name
        }


def test_the_first_token_is_measured_by_where_the_state_came_from_and_later_ones_as_gaps():
    watched = Watched()
    watched.turn((1.0, opened("host", 5)), (2.0, Delta("", "x")), (2.04, Delta("", "y")), (2.2, Delta("", "z")))
    watched.now = 0.0
    watched.turn((0.2, opened()), (0.5, Delta("", "x")), (0.6, CLOSED))
    watched.now = 0.0
    watched.turn((0.2, opened(reused=4)), (0.25, Delta("", "x")), (0.6, CLOSED))
    assert watched.samples("dflash_time_to_first_token_seconds_sum") == {
        ("host",): 2,
        ("none",): 0.5,
        ("device",): 0.25,
    }
    gaps = watched.samples("dflash_inter_chunk_seconds_bucket")
    assert [gaps[bound,] for bound in ("0.03", "0.05", "0.15", "0.25")] == [0, 1, 1, 2]
    assert watched.samples("dflash_turns_answered_total") == {("stop",): 2}


def test_a_refusal_in_a_stream_is_counted_there_and_one_that_is_an_answer_where_it_is_answered():
    watched = Watched()
    watched.turn((0.1, BUSY))
    watched.turn((0.1, opened()), (0.2, BUSY), streamed=False)
    assert watched.samples("dflash_refusals_total") == {}
    watched.turn((0.1, opened()), (0.2, Delta("", "x")), (0.3, BUSY))
    watched.metrics.refused(BUSY)
    watched.metrics.refused(Refused(400, "invalid_request", "secret text", "messages"))
    assert watched.samples("dflash_refusals_total") == {
        ("replica_lost", "before"): 1, ("replica_lost", "within"): 1, ("invalid_request", "before"): 1,
    }  # fmt: skip


def test_a_turn_is_open_until_it_ends_or_its_reader_leaves():
    watched = Watched()

    async def scenario() -> tuple[float, float]:
        events = watched.metrics.watched(watched._told([(0.1, opened()), (0.2, Delta("", "x"))]), True)
        await anext(events)
        during = watched.samples("dflash_turns_open")[()]
        await events.aclose()
        return during, watched.samples("dflash_turns_open")[()]

    assert asyncio.run(scenario()) == (1, 0)
    watched.turn((0.1, opened()), (0.2, None))
    assert watched.samples("dflash_turns_open") == {(): 0}
