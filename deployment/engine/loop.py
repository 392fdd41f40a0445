"""The loop that drives an engine: all waiting commands, one step, again."""

from __future__ import annotations

import logging
import queue

from deployment.engine.commands import Command
from deployment.engine.engine import Engine

logger = logging.getLogger(__name__)


def run_engine(engine: Engine, commands: queue.SimpleQueue[Command | None]) -> None:
    """Runs until a None comes out of the queue. Waits for a command where there is nothing to do. However it ends, the
    turns that run are told what they had committed."""
    reason = "it was closed"
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


def _take_commands(engine: Engine, commands: queue.SimpleQueue[Command | None]) -> bool:
    wait = engine.idle
    while True:
        try:
            command = commands.get(block=wait)
        except queue.Empty:
            return True
        if command is None:
            return False
        engine.execute(command)
        wait = engine.idle
