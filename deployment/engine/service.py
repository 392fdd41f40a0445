"""An engine on a thread of its own, for asyncio callers: turns are event iterators, everything else is a call.

The thread owns the engine and all of its tensors. Commands go in through a queue, events come out through the caller's
event loop; neither side waits for the other. The same two streams cross a pipe when the engine is a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator

from deployment.engine import errors
from deployment.engine.engine import Engine
from deployment.engine.errors import EngineError
from deployment.engine.loading import Models, load_models
from deployment.engine.messages import (
    Call,
    Cancel,
    Captured,
    Command,
    Dropped,
    Event,
    Evicted,
    Failed,
    Finished,
    Imported,
    Preempt,
    Submit,
    Suspended,
)
from deployment.engine.options import EngineOptions

logger = logging.getLogger(__name__)

_LAST = Finished | Failed | Suspended
"""After one of these nothing more comes of a turn."""


class EngineService:
    """Runs an engine. Its asyncio methods may be used from one event loop at a time; `close` from anywhere."""

    def __init__(self, models: Models, options: EngineOptions) -> None:
        self.options = options
        self.tokenizer = models.tokenizer
        self.chat_template = models.chat_template
        self.generation_defaults = models.defaults
        self.context_limit = models.context
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._listeners: dict[str, Callable[[Event], None]] = {}
        self._lock = threading.Lock()
        self._left: set[str] = set()
        self._evicted: set[str] = set()
        self._fault: BaseException | None = None
        self._ended = False
        self._engine = Engine(models, options, self._deliver)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, options: EngineOptions) -> EngineService:
        """Loads the models and starts the thread. Raises ModelError."""
        return cls(load_models(options), options)

    def was_evicted(self, session: str) -> bool:
        """Whether the device has let go of what it held of a session, and was given nothing since."""
        return session in self._evicted

    async def turn(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """Runs a turn: its events, the last of them `Finished`, `Failed` or `Suspended`. Leaving early cancels it."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        ended = False
        with self._listening(submit.turn, events):
            self._commands.put(submit)
            try:
                while not ended:
                    event = await events.get()
                    ended = isinstance(event, _LAST)
                    yield event
            finally:
                if not ended:
                    with self._lock:
                        self._left.add(submit.turn)
                    self._commands.put(Cancel(submit.turn))

    async def call(self, command: Call) -> Event:
        """Runs a command that has one answer, and returns it. Raises EngineError where the engine answers Failed."""
        if not isinstance(command, Call):
            raise TypeError(f"{type(command).__name__} has no single answer: use `turn` or `send`")
        events: asyncio.Queue[Event] = asyncio.Queue()
        with self._listening(command.call, events):
            self._commands.put(command)
            event = await events.get()
        if isinstance(event, Failed):
            raise EngineError(event.code, event.message, event.param)
        return event

    def send(self, command: Cancel | Preempt) -> None:
        """Sends a command that has no answer."""
        self._commands.put(command)

    def close(self) -> None:
        """Ends the thread after its current step. Running turns fail with `internal_error`."""
        self._commands.put(None)
        self._thread.join()

    @contextlib.contextmanager
    def _listening(self, ref: str, events: asyncio.Queue[Event]) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()

        def listener(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to hear it
                loop.call_soon_threadsafe(events.put_nowait, event)

        with self._lock:
            if self._ended:
                raise EngineError(errors.INTERNAL_ERROR, f"the engine has ended: {self._fault or 'it was closed'}")
            if ref in self._listeners or ref in self._left:
                raise EngineError(errors.INVALID_REQUEST, f"{ref!r} is in use by another turn or call", "turn")
            self._listeners[ref] = listener
        try:
            yield
        finally:
            with self._lock:
                self._listeners.pop(ref, None)

    def _deliver(self, event: Event) -> None:
        if isinstance(event, Evicted):
            self._evicted.add(event.session)
            return
        if isinstance(event, Captured | Imported | Dropped):
            self._evicted.discard(event.session)
        for name in ("ref", "turn", "call"):  # a turn that is suspended hears of it, and so does who asked for it
            if (ref := getattr(event, name, None)) is not None:
                self._deliver_to(ref, event)

    def _deliver_to(self, ref: str, event: Event) -> None:
        with self._lock:
            if ref in self._left:
                # nobody listens any more, and until its last event nobody else may take this id
                if isinstance(event, _LAST):
                    self._left.discard(ref)
                return
            listener = self._listeners.get(ref)
        if listener is not None:
            listener(event)

    def _run(self) -> None:
        try:
            self._engine.warm()
            while self._take_commands():
                self._engine.step()
        except BaseException as error:
            self._fault = error
            logger.exception("the engine's thread ended")
        reason = f"the engine has ended: {self._fault or 'it was closed'}"
        try:
            self._engine.abandon(reason)
        except Exception:
            logger.exception("what running turns had committed could not be told")
        with self._lock:
            self._ended = True
            waiting = dict(self._listeners)
        for ref, listener in waiting.items():
            listener(Failed(ref, errors.INTERNAL_ERROR, reason))

    def _take_commands(self) -> bool:
        """Hands all waiting commands to the engine; waits for one when there is nothing to do. False: time to end."""
        wait = self._engine.idle
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._engine.execute(command)
            wait = self._engine.idle
