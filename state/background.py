"""Who publishes while turns go on? One thread with a bounded queue, in which a session has at most one place.

A job may hold bytes that are to be written: who submits it asks before whether there is room for more.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from state.durable import Published
from state.errors import CapacityError, StateError
from state.names import Order, SessionKey

Superseded = Literal["superseded"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """`publish` makes the session durable as of `order`; `size`: bytes that it holds until then.

    `done` is called once, with what came of it, mostly by the writer's thread: it must not block,
    and what it raises is only logged.
    """

    key: SessionKey
    order: Order
    publish: Callable[[], Published]
    done: Callable[[Published | Superseded | Exception], None]
    size: int = 0


@dataclass(frozen=True)
class WriterCounts:
    """Jobs by what became of them."""

    published: int = 0
    superseded: int = 0
    failed: int = 0


class BackgroundWriter:
    """Publishes one job after the other, each session's in order; of one session only the newest that waits.

    At most `places` sessions wait, and as long as they hold `most_bytes` or more none should bring others. Must be
    closed.
    """

    def __init__(self, places: int, most_bytes: int) -> None:
        if places < 1:
            raise StateError(f"background writer: {places} places, must have at least 1")
        self._places = places
        self._most_bytes = most_bytes
        self._waiting: OrderedDict[SessionKey, Job] = OrderedDict()
        self._running: Job | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._counts = {"published": 0, "superseded": 0, "failed": 0}
        # A store that hangs must not keep the process from ending; close() is what waits for it.
        self._thread = threading.Thread(target=self._run, name="durable-writer", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> WriterCounts:
        with self._changed:
            return WriterCounts(**self._counts)

    def has_room(self, key: SessionKey, beside: int = 0) -> bool:
        """Whether the next job of this session, which takes the place of one that waits, may hold bytes.
        `beside`: those of jobs to come."""
        with self._changed:
            others = [job for name, job in self._waiting.items() if name != key]
            others += [self._running] if self._running is not None else []
            return beside + sum(job.size for job in others) < self._most_bytes

    def submit(self, job: Job) -> None:
        """Never waits. Raises `CapacityError` if all places are taken, and `StateError` after `close`."""
        with self._changed:
            if self._closed:
                raise StateError(f"background writer: closed, session {job.key} at {job.order} comes too late")
            waiting = self._waiting.get(job.key)
            if waiting is None and len(self._waiting) >= self._places:
                raise CapacityError("background writer", 1, 0)
            late = waiting is not None and waiting.order >= job.order
            if not late:
                self._waiting[job.key] = job
            if waiting is not None:
                self._counts["superseded"] += 1
            self._changed.notify_all()
        if waiting is not None:
            (job if late else waiting).done("superseded")

    def flush(self, timeout: float) -> bool:
        """Waits until nothing waits or runs, at most `timeout` seconds. False: time was up."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._running is None, timeout)

    def close(self, timeout: float) -> bool:
        """Takes no more jobs, ends those it has, and its thread. False: time was up, and the thread still goes on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            outcome = self._publish(job)
            with self._changed:
                self._counts["failed" if isinstance(outcome, Exception) else "published"] += 1
            try:
                job.done(outcome)
            except Exception:  # one listener's fault must not end everybody's publications
                logger.exception("publication of session %s at %s: its listener failed", job.key, job.order)
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            _, self._running = self._waiting.popitem(last=False)
            return self._running

    def _publish(self, job: Job) -> Published | Exception:
        try:
            return job.publish()
        except Exception as error:  # whatever one session's publication brings, the others' go on
            return error
