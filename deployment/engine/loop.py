"""The loop that drives an engine: all waiting commands, one step, again."""

from __future__ import annotations

import logging
import queue
from typing import Any

from deployment.engine.commands import Command
from deployment.engine.compiling import Compiled, CompilingTurns
from deployment.engine.engine import Engine

logger = logging.getLogger(__name__)


def run_engine(engine: Engine, commands: queue.SimpleQueue[Any]) -> None:
    """Runs until a None comes out of the queue of commands. Waits for one where there is nothing to do. However it
    ends, the turns that run are told what they had committed."""
    reason = "it was closed"
    compiling = CompilingTurns(engine.grammars, commands.put)
    try:
        engine.warm()
        while _take_commands(engine, commands, compiling):
            engine.step()
    except BaseException as error:
        reason = str(error)
        raise
    finally:
        compiling.close()
        try:
            engine.abandon(f"the engine has ended: {reason}")
        except Exception:
            logger.exception("what running turns had committed could not be told")


def _take_commands(
    engine: Engine, commands: queue.SimpleQueue[Command | Compiled | None], compiling: CompilingTurns
) -> bool:
    wait = engine.idle
    while True:
        try:
            taken = commands.get(block=wait)
        except queue.Empty:
            return True
        if taken is None:
            return False
        if isinstance(taken, Compiled):
            for command in compiling.released(taken):
                engine.execute(command)
        elif not compiling.holds(taken):
            engine.execute(taken)
        wait = engine.idle
