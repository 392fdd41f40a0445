"""The loop that drives an engine: all waiting commands, one step, again. And what those hear who come after its end."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any

from deployment.engine import errors
from deployment.engine.commands import Call, Command, Submit
from deployment.engine.compiling import Compiled
from deployment.engine.engine import Engine
from deployment.engine.events import Event, Failed

logger = logging.getLogger(__name__)


def run_engine(engine: Engine, commands: queue.SimpleQueue[Any]) -> None:
    """Runs until a None comes out of the queue of commands. Waits for one where there is nothing to do. However it
    ends, the turns that run are told what they had committed."""
    reason = "it was closed"
    engine.compile_beside(commands.put)
    try:
        engine.warm()
        while _take_commands(engine, commands):
            engine.step()
    except BaseException as error:
        reason = str(error)
        raise
    finally:
        try:
            engine.abandon(f"the engine has ended: {reason}")
        except Exception:
            logger.exception("what running turns had committed could not be told")


@contextlib.contextmanager
def refusing(
    commands: queue.SimpleQueue[Any], emit: Callable[[Event], None], reason: str
) -> Generator[None, None, None]:
    """After an engine's end, as long as what it leaves behind takes: whoever comes hears at once that there is none."""
    over = threading.Event()

    def refuse() -> None:
        while not over.is_set():
            command = commands.get()
            if isinstance(command, Submit | Call):
                ref = command.turn if isinstance(command, Submit) else command.call
                emit(Failed(ref, errors.INTERNAL_ERROR, f"the engine has ended: {reason}"))

    thread = threading.Thread(target=refuse, name="engine that has ended", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        commands.put(None)
        thread.join()


def _take_commands(engine: Engine, commands: queue.SimpleQueue[Command | Compiled | None]) -> bool:
    while True:
        try:
            taken = commands.get(timeout=engine.rest)
        except queue.Empty:
            return True
        if taken is None:
            return False
        if isinstance(taken, Compiled):
            engine.compiled(taken)
        else:
            engine.execute(taken)
