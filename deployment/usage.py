"""How a command ends: a person's mistake is one sentence on stderr and exit code 2, Ctrl-C is quiet."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn

import typer

from state.errors import StateError

_TOLD_BY_NAME = frozenset({"LaunchError", "ClientError"})
"""Their modules import Ray and httpx, for which `--help` should not wait."""


@contextlib.contextmanager
def one_sentence(exit_code: int = 2) -> Iterator[None]:
    """Errors that a person can mend become one sentence; Ctrl-C ends quietly."""
    # A process started in the background of a script ignores SIGINT, and Python then installs no handler of its own.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("ended.", err=True)
        raise typer.Exit(130) from None
    except (ValueError, StateError) as error:  # ModelError is a ValueError
        fail(str(error), exit_code)
    except RuntimeError as error:
        if _TOLD_BY_NAME.isdisjoint(kind.__name__ for kind in type(error).__mro__):
            raise
        fail(str(error), exit_code)


def fail(message: str, code: int) -> NoReturn:
    typer.echo(f"dflash-serve: {message}", err=True)
    raise typer.Exit(code)
