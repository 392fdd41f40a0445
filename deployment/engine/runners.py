"""Where does an engine run: on a thread of the caller's process, or in a process of its own?

A CUDA fault takes its process with it, and Python's lock is held by whoever makes the next launch ready: on a card the
engine has a process of its own, so that neither reaches the replica's event loop. On a CPU it is a thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from deployment.engine.commands import Command
from deployment.engine.durability import CLOSE_SECONDS as WRITING_SECONDS
from deployment.engine.durability import Durability
from deployment.engine.engine import Engine
from deployment.engine.events import Event, Failed
from deployment.engine.frames import receive_messages, send_messages, send_queued, unsent
from deployment.engine.loading import Models
from deployment.engine.loop import refusing, run_engine
from deployment.engine.options import EngineOptions
from model.errors import ModelError

CLOSE_SECONDS = 5.0
"""What a process is given to end its current step before it is killed. Writing what waits comes on top."""

logger = logging.getLogger(__name__)

Deliver = Callable[[Sequence[Event]], None]
Ended = Callable[[str], None]


class Runner(Protocol):
    """An engine that runs. It calls `deliver` with all events, in order, as they come, and `ended` once, with the
    reason."""

    def put(self, command: Command) -> None:
        """Never waits."""
        ...

    def close(self) -> None:
        """Ends the engine after its current step, and waits for that."""
        ...


class ThreadRunner:
    def __init__(self, models: Models, options: EngineOptions, deliver: Deliver, ended: Ended) -> None:
        self._deliver = deliver
        self._ended = ended
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._durability = Durability(options, lambda event: deliver((event,)))
        self._engine = Engine(models, options, lambda event: deliver((event,)), durable=self._durability.sessions)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def put(self, command: Command) -> None:
        self._commands.put(command)

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        reason = "it was closed"
        try:
            run_engine(self._engine, self._commands)
        except BaseException as error:
            logger.exception("the engine's thread ended")
            reason = str(error)
        try:
            with refusing(self._commands, lambda event: self._deliver((event,)), reason):
                self._durability.close()
        finally:
            self._ended(reason)


class ProcessRunner:
    """`__init__` returns when the engine is ready. Raises ModelError where it could not be loaded."""

    def __init__(self, options: EngineOptions, deliver: Deliver, ended: Ended) -> None:
        self._options = options
        self._deliver = deliver
        self._ended = ended
        self._closing = False
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine process", daemon=True)
        self._thread.start()
        refusal = self._started.get()
        if refusal is not None:
            self._thread.join()
            raise ModelError(refusal)

    @property
    def pid(self) -> int:
        return self._process.pid

    def put(self, command: Command) -> None:
        self._commands.put(command)

    def close(self) -> None:
        self._closing = True
        self._commands.put(None)
        self._thread.join(CLOSE_SECONDS + (WRITING_SECONDS if self._options.durable else 0))
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join()

    def _run(self) -> None:
        """The thread that starts the process must live as long as it: the kernel ends a child whose parent *thread*
        has ended."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _start(theirs)
        except OSError as error:
            ours.close()
            self._started.put(f"the engine's process could not be started: {error}")
            return
        fault = None
        with ours:
            refusal = self._first_word(ours)
            self._started.put(refusal)
            if refusal is None:
                threading.Thread(target=self._send, args=(ours,), name="engine commands", daemon=True).start()
                fault = self._forward(ours)
            if fault is None and refusal is None:
                self._wait()  # with the pipe open, whose end would be another reason to end
        status = self._wait()
        self._commands.put(None)
        if refusal is None:
            self._ended("it was closed" if self._closing else fault or f"its process ended {status}")

    def _send(self, ours: socket.socket) -> None:
        """However it ends, the process hears of it, and ends too."""
        try:
            send_queued(ours, self._commands, lambda command, error: self._deliver((_unsent(command, error),)))
        except OSError:
            pass  # the process is gone, and whoever reads from it says how it ended
        except Exception:
            logger.exception("the engine can be told nothing any more")
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_WR)

    def _first_word(self, ours: socket.socket) -> str | None:
        """None once the engine is ready; else why it is not."""
        try:
            with contextlib.suppress(OSError):
                send_messages(ours, [self._options])
            first = receive_messages(ours)
        except Exception as error:
            logger.exception("the engine's process cannot be spoken to")
            return f"the engine's process cannot be spoken to: {error}"
        if first is None:
            return f"the engine's process ended {self._wait()} while it was loading"
        return first[0] or None

    def _forward(self, ours: socket.socket) -> str | None:
        """Until the process has said goodbye, or is gone. Returns why it is to end, where nobody can hear what it
        says."""
        try:
            while events := receive_messages(ours):
                self._deliver(events)
        except Exception as error:
            logger.exception("the engine's events are not heard any more")
            return f"its events are not heard any more: {type(error).__name__}: {error}"
        return None

    def _wait(self) -> str:
        """How the process ended. One that has said goodbye, or has closed its end, and does not end itself, is killed:
        what is left of a lost device may never let it go."""
        try:
            code = self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _unsent(command: Command, error: Exception) -> Failed:
    logger.error("a %s was not sent to the engine", type(command).__name__, exc_info=error)
    return unsent(command, error)


def _start(theirs: socket.socket) -> subprocess.Popen[bytes]:
    # What the parent can import the child must find too: Ray adds places to the path of its workers.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-m", "deployment.engine.process", str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=environment,
    )
