"""The loop that drives an engine: all waiting commands, one step, again."""

from __future__ import annotations

import logging
import queue
from typing import Any

from deployment.engine.commands import Command
from deployment.engine.compiling import Compiled
from deployment.engine.engine import Engine

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
