"""Publication beside the turns: in order, the newest only, bounded, and never silent about what failed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from state.background import BackgroundWriter, Job, WriterCounts
from state.durable import Published
from state.errors import CapacityError, StateError
from state.names import Epoch, Order, SessionKey

WAIT = 10.0


def key(name: str) -> SessionKey:
    return SessionKey("a" * 64, name)


class Sessions:
    """Jobs that note what they did, and can be held up."""

    def __init__(self) -> None:
        self.writer = BackgroundWriter(places=3, most_bytes=100)
        self.published: list[tuple[str, int]] = []
        self.outcomes: dict[tuple[str, int], object] = {}
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def submit(self, name: str, sequence: int, error: Exception | None = None, size: int = 0) -> None:
        order = Order(Epoch(1, 1), sequence)

        def publish() -> Published:
            self.begun.set()
            assert self.gate.wait(WAIT)
            if error:
                raise error
            self.published.append((name, sequence))
            return Published(order, True, 0)

        def done(outcome: object) -> None:
            assert (name, sequence) not in self.outcomes, "an outcome comes once"
            self.outcomes[name, sequence] = outcome

        self.writer.submit(Job(key(name), order, publish, done, size))

    def hold(self) -> None:
        """Returns while a job of its own is running and does not end."""
        self.gate.clear()
        self.begun.clear()
        self.submit("held", 0)
        assert self.begun.wait(WAIT)


@pytest.fixture
def sessions() -> Iterator[Sessions]:
    sessions = Sessions()
    yield sessions
    sessions.gate.set()
    assert sessions.writer.close(WAIT)
    assert not [thread for thread in threading.enumerate() if thread.name == "durable-writer"]


def test_jobs_are_published_in_their_order(sessions: Sessions) -> None:
    sessions.hold()
    for name in "abc":
        sessions.submit(name, 1)
    sessions.gate.set()
    assert sessions.writer.flush(WAIT)
    assert sessions.published == [("held", 0), ("a", 1), ("b", 1), ("c", 1)]
    assert sessions.outcomes["a", 1] == Published(Order(Epoch(1, 1), 1), True, 0)
    assert sessions.writer.counts == WriterCounts(published=4)


def test_a_newer_publication_replaces_the_one_that_waits_and_keeps_its_place(sessions: Sessions) -> None:
    sessions.hold()
    for name, sequence in (("a", 1), ("b", 1), ("a", 2), ("a", 3)):
        sessions.submit(name, sequence)
    assert sessions.outcomes == {("a", 1): "superseded", ("a", 2): "superseded"}
    sessions.gate.set()
    assert sessions.writer.flush(WAIT)
    assert sessions.published == [("held", 0), ("a", 3), ("b", 1)]
    assert sessions.writer.counts == WriterCounts(published=3, superseded=2)


def test_an_older_publication_does_not_replace_the_one_that_waits(sessions: Sessions) -> None:
    sessions.hold()
    sessions.submit("a", 2)
    sessions.submit("a", 1)
    assert sessions.outcomes == {("a", 1): "superseded"}
    sessions.gate.set()
    assert sessions.writer.flush(WAIT)
    assert sessions.published == [("held", 0), ("a", 2)]


def test_a_session_that_is_being_published_may_wait_again(sessions: Sessions) -> None:
    sessions.hold()
    sessions.submit("held", 1)
    sessions.gate.set()
    assert sessions.writer.flush(WAIT)
    assert sessions.published == [("held", 0), ("held", 1)]


def test_a_full_queue_refuses_at_once_but_takes_newer_publications_of_its_sessions(sessions: Sessions) -> None:
    sessions.hold()
    for name in "abc":
        sessions.submit(name, 1)
    with pytest.raises(CapacityError, match="background writer: 1 wanted, 0 free"):
        sessions.submit("d", 1)
    sessions.submit("b", 2)
    sessions.gate.set()
    assert sessions.writer.flush(WAIT)
    assert sessions.published == [("held", 0), ("a", 1), ("b", 2), ("c", 1)]
    assert ("d", 1) not in sessions.outcomes


def test_there_is_room_until_so_many_bytes_wait_and_a_session_counts_without_what_its_next_job_replaces(
    sessions: Sessions,
) -> None:
    sessions.hold()
    sessions.submit("a", 1, size=99)
    assert sessions.writer.has_room(key("b"))
    sessions.submit("b", 1, size=5)
    assert not sessions.writer.has_room(key("c"))
    assert sessions.writer.has_room(key("a")) and sessions.writer.has_room(key("b"))
    sessions.submit("a", 2, size=1)
    assert sessions.writer.has_room(key("c"))
    sessions.gate.set()
    assert sessions.writer.flush(WAIT)
    assert sessions.writer.has_room(key("c")) and sessions.published[1:] == [("a", 2), ("b", 1)]


def test_what_is_being_written_takes_room_too(sessions: Sessions) -> None:
    sessions.gate.clear()
    sessions.submit("a", 1, size=100)
    assert sessions.begun.wait(WAIT)
    assert not sessions.writer.has_room(key("a")) and not sessions.writer.has_room(key("b"))


@pytest.mark.parametrize("error", [StateError("full"), KeyError("a mistake of the caller")])
def test_a_failure_reaches_its_caller_and_the_others_go_on(sessions: Sessions, error: Exception) -> None:
    sessions.submit("a", 1, error)
    sessions.submit("b", 1)
    assert sessions.writer.flush(WAIT)
    assert sessions.outcomes["a", 1] is error
    assert sessions.published == [("b", 1)]
    assert sessions.writer.counts == WriterCounts(published=1, failed=1)


def test_a_listener_that_fails_stops_nobody(sessions: Sessions, caplog: pytest.LogCaptureFixture) -> None:
    order = Order(Epoch(1, 1), 1)

    def done(outcome: object) -> None:
        raise KeyError("a mistake of the listener")

    sessions.writer.submit(Job(key("a"), order, lambda: Published(order, True, 0), done))
    sessions.submit("b", 1)
    assert sessions.writer.flush(WAIT)
    assert sessions.published == [("b", 1)]
    assert "a mistake of the listener" in caplog.text


def test_flush_and_close_give_up_in_time(sessions: Sessions) -> None:
    sessions.hold()
    assert not sessions.writer.flush(0.01)
    assert not sessions.writer.close(0.01)


def test_close_ends_what_waits_and_takes_no_more(sessions: Sessions) -> None:
    sessions.hold()
    sessions.submit("a", 1)
    assert not sessions.writer.close(0)
    with pytest.raises(StateError, match=r"closed, session .*/b at 1\.1\.1"):
        sessions.submit("b", 1)
    sessions.gate.set()
    assert sessions.writer.close(WAIT)
    assert sessions.published == [("held", 0), ("a", 1)]


def test_a_writer_without_places_is_refused() -> None:
    with pytest.raises(StateError, match="0 places"):
        BackgroundWriter(0, 100)
