"""An engine beside an event loop, for asyncio callers: turns are event iterators, everything else is a call.

Its runner (`deployment/engine/runners.py`), a thread or a process, owns the engine and all of its tensors. Commands go
in and events come out through the caller's event loop; neither side waits for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Any

from deployment.engine import errors
from deployment.engine.commands import Call, Cancel, Preempt, Submit
from deployment.engine.errors import EngineError
from deployment.engine.events import Captured, Dropped, Event, Evicted, Failed, Finished, Imported, Stored, Suspended
from deployment.engine.loading import Models, load_models
from deployment.engine.options import EngineOptions
from deployment.engine.runners import Deliver, Ended, ProcessRunner, Runner, ThreadRunner

logger = logging.getLogger(__name__)

_LAST = Finished | Failed | Suspended
"""After one of these nothing more comes of a turn."""

_Hear = Callable[[Any], object]
_Listener = tuple[asyncio.AbstractEventLoop, _Hear]
"""Who hears of an event, in which loop."""


class EngineService:
    """Runs an engine. Its asyncio methods may be used from one event loop at a time; `close` from anywhere."""

    def __init__(
        self, models: Models, options: EngineOptions, runner: Callable[[Deliver, Ended], Runner] | None = None
    ) -> None:
        """`runner`: starts the engine; by default on a thread, with these models. Raises ModelError."""
        self.options = options
        self.tokenizer = models.tokenizer
        self.chat_template = models.chat_template
        self.vision = models.vision
        """Rules, tokens and config of the tower, for who decodes and places media; its weights only where the engine
        runs here. None for a model of text alone."""
        self.generation_defaults = models.defaults
        self.context_limit = models.context
        self._listeners: dict[str, _Listener] = {}
        self._lock = threading.Lock()
        self._left: set[str] = set()
        self._evicted: set[str] = set()
        self._on_stored: _Listener | None = None
        self._end: str | None = None
        if runner is None:
            self._runner: Runner = ThreadRunner(models, options, self._deliver, self._ended)
        else:
            self._runner = runner(self._deliver, self._ended)

    @classmethod
    def start(cls, options: EngineOptions) -> EngineService:
        """Loads the models and starts the engine, in a process where `options` say so. Raises ModelError."""
        if not options.in_process:
            return cls(load_models(options), options)
        # The replica reads and writes text: it needs all but the weights.
        text = load_models(options, dry=True)
        return cls(text, options, lambda deliver, ended: ProcessRunner(options, deliver, ended))

    def was_evicted(self, session: str) -> bool:
        """Whether the device has let go of what it held of a session, and was given nothing since."""
        return session in self._evicted

    def when_stored(self, listener: Callable[[Stored], None]) -> None:
        """`listener` hears in the running event loop what became of each `Publish`."""
        self._on_stored = asyncio.get_running_loop(), listener

    async def turn(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """Runs a turn: its events, the last of them `Finished`, `Failed` or `Suspended`. Leaving early cancels it."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        ended = False
        with self._listening(submit.turn, events):
            self._runner.put(submit)
            try:
                while not ended:
                    event = await events.get()
                    ended = isinstance(event, _LAST)
                    yield event
            finally:
                if not ended:
                    with self._lock:
                        self._left.add(submit.turn)
                    self._runner.put(Cancel(submit.turn))

    async def call(self, command: Call) -> Event:
        """Runs a command that has one answer, and returns it. Raises EngineError where the engine answers Failed."""
        if not isinstance(command, Call):
            raise TypeError(f"{type(command).__name__} has no single answer: use `turn` or `send`")
        events: asyncio.Queue[Event] = asyncio.Queue()
        with self._listening(command.call, events):
            self._runner.put(command)
            event = await events.get()
        if isinstance(event, Failed):
            raise EngineError(event.code, event.message, event.param)
        return event

    def send(self, command: Cancel | Preempt) -> None:
        """Sends a command that has no answer."""
        self._runner.put(command)

    def close(self) -> None:
        """Ends the engine after its current step. Running turns fail with `internal_error`."""
        self._runner.close()

    @contextlib.contextmanager
    def _listening(self, ref: str, events: asyncio.Queue[Event]) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._end is not None:
                raise EngineError(errors.INTERNAL_ERROR, f"the engine has ended: {self._end}")
            if ref in self._listeners or ref in self._left:
                raise EngineError(errors.INVALID_REQUEST, f"{ref!r} is in use by another turn or call", "turn")
            self._listeners[ref] = loop, events.put_nowait
        try:
            yield
        finally:
            with self._lock:
                self._listeners.pop(ref, None)

    def _deliver(self, events: Sequence[Event]) -> None:
        """Wakes every loop once for all that comes together."""
        heard: dict[asyncio.AbstractEventLoop, list[tuple[_Hear, Event]]] = {}
        with self._lock:
            for event in events:
                for loop, hear in self._who_hears(event):
                    heard.setdefault(loop, []).append((hear, event))
        for loop, what in heard.items():
            _soon(loop, what)

    def _who_hears(self, event: Event) -> list[_Listener]:
        if isinstance(event, Evicted):
            self._evicted.add(event.session)
            return []
        if isinstance(event, Stored):
            return [] if self._on_stored is None else [self._on_stored]
        if isinstance(event, Captured | Imported | Dropped):
            self._evicted.discard(event.session)
        listeners: list[_Listener] = []
        for name in ("ref", "turn", "call"):  # a turn that is suspended hears of it, and so does who asked for it
            ref = getattr(event, name, None)
            if ref in self._left:
                # nobody listens any more, and until its last event nobody else may take this id
                if isinstance(event, _LAST):
                    self._left.discard(ref)
            elif ref is not None and (listener := self._listeners.get(ref)) is not None:
                listeners.append(listener)
        return listeners

    def _ended(self, reason: str) -> None:
        with self._lock:
            self._end = reason
            waiting = dict(self._listeners)
        for ref, (loop, hear) in waiting.items():
            _soon(loop, [(hear, Failed(ref, errors.INTERNAL_ERROR, f"the engine has ended: {reason}"))])


def _soon(loop: asyncio.AbstractEventLoop, heard: Sequence[tuple[_Hear, Event]]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to hear it
        loop.call_soon_threadsafe(_tell, heard)


def _tell(heard: Sequence[tuple[_Hear, Event]]) -> None:
    for hear, event in heard:
        try:
            hear(event)
        except Exception:  # the others must hear theirs
            logger.exception("%s was not taken", type(event).__name__)
