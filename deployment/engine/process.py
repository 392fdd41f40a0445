"""An engine's own process: options first, then commands, come in through a socket; a word, then events, go out.

    python -m deployment.engine.process SOCKET_FD PARENT_PID      (started by `deployment/engine/runners.py`)

It ends within a second of its parent or of the socket, also while it loads: the kernel kills it with the parent's
thread that started it, and a thread that needs neither CUDA nor the engine reads the socket to its end. The first word
is empty once the engine is ready, or one sentence that says why it is not.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

# Nothing heavy is imported before the parent is watched: torch takes seconds.
if TYPE_CHECKING:
    from deployment.engine.durability import Durability
    from deployment.engine.engine import Engine
    from deployment.engine.options import EngineOptions

ORPHANED = 3
"""Exit code where nobody is left to work for."""
FAILED = 1
"""Exit code where there is no engine, or none any more; the log says why."""
DEAF = 4
"""Exit code where the parent cannot be heard, or told, any more."""

_PR_SET_PDEATHSIG = 1

logger = logging.getLogger("deployment.engine.process")


def main(connection: socket.socket, parent: int) -> None:
    _die_with(parent)
    from deployment.engine.frames import receive_messages
    from deployment.engine.log_lines import log_to_stderr

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes us
    first = receive_messages(connection)
    if first is None:
        sys.exit(ORPHANED)
    log_to_stderr(first[0].log_format, first[0].log_level)
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, commands), daemon=True).start()
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine, durability = _loaded(first[0], connection, events)
    writer = threading.Thread(target=_write, args=(connection, events, commands), daemon=True)
    writer.start()
    from deployment.engine.loop import refusing, run_engine

    reason = "it was closed"
    try:
        run_engine(engine, commands)
    except Exception as error:
        logger.exception("the engine ended")
        reason = str(error)
        sys.exit(FAILED)
    finally:
        with refusing(commands, events.put, reason):
            durability.close()
        events.put(None)
        writer.join()


def _loaded(
    options: EngineOptions, connection: socket.socket, events: queue.SimpleQueue[Any]
) -> tuple[Engine, Durability]:
    """An engine that is ready, and has said so. Ends the process with a sentence where there can be none."""
    from deployment.engine.card import wait_for_card
    from deployment.engine.durability import Durability
    from deployment.engine.engine import Engine
    from deployment.engine.frames import send_messages
    from deployment.engine.loading import load_models
    from model.errors import ModelError

    try:
        wait_for_card(options)
        models = load_models(options)
        durability = Durability(options, events.put)
        engine = Engine(models, options, events.put, durable=durability.sessions)
    except ModelError as error:
        send_messages(connection, [str(error)])
        sys.exit(FAILED)
    except Exception as error:
        logger.exception("the engine could not be started")
        send_messages(connection, [f"the engine could not be started: {type(error).__name__}: {error}"])
        sys.exit(FAILED)
    send_messages(connection, [""])
    return engine, durability


def _read(connection: socket.socket, commands: queue.SimpleQueue[Any]) -> None:
    """An empty list is the parent's goodbye; the stream's end without one means that it is gone."""
    from deployment.engine.frames import receive_messages

    try:
        while (messages := receive_messages(connection)) is not None:
            for message in messages:
                commands.put(message)
            if not messages:
                commands.put(None)
                return
    except Exception:
        logger.exception("commands cannot be read any more")
        os._exit(DEAF)
    os._exit(ORPHANED)


def _write(connection: socket.socket, events: queue.SimpleQueue[Any], commands: queue.SimpleQueue[Any]) -> None:
    """Ends with its goodbye, or the process does."""
    from deployment.engine.commands import Cancel
    from deployment.engine.frames import send_queued, unsent

    def unsendable(event: Any, error: Exception) -> None:
        logger.error("a %s was not sent", type(event).__name__, exc_info=error)
        events.put(unsent(event, error))
        if getattr(event, "call", None) is None:
            commands.put(Cancel(event.turn))  # nobody hears the rest of it

    try:
        send_queued(connection, events, unsendable)
    except OSError:
        os._exit(ORPHANED)
    except Exception:
        logger.exception("events cannot be sent any more")
        os._exit(DEAF)


def _die_with(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        logger.warning("the kernel will not end this process with its parent: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:  # it ended before we asked
        sys.exit(ORPHANED)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
