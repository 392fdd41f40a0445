"""Which turns wait for their grammar to be compiled? Large ones take seconds, in which the engine goes on.

A turn is held back until then, and so is whatever is said of it meanwhile. Compiling is done on other threads, which
leave Python's lock to the engine's; of each tenant's grammars one at a time, in the order of their turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deployment.engine.commands import Command, Grammar, Submit
from deployment.engine.grammar import Grammars

THREADS = 2


@dataclass(frozen=True)
class Compiled:
    """The grammar of the first turn of a tenant that waits is known now."""

    tenant: str


class CompilingTurns:
    """`compiled` is called on another thread, and its argument is for `released`. All else is for one thread."""

    def __init__(self, grammars: Grammars, compiled: Callable[[Compiled], None]) -> None:
        self._grammars = grammars
        self._compiled = compiled
        self._held: dict[str, list[Command]] = {}
        self._waiting: dict[str, deque[Submit]] = {}
        self._threads = ThreadPoolExecutor(THREADS, "grammars")

    def holds(self, command: Command) -> bool:
        """Whether a command must wait: it submits a turn whose grammar is not known, or names one that waits."""
        turn = getattr(command, "turn", None)
        if turn in self._held:
            self._held[turn].append(command)
            return True
        if not isinstance(command, Submit) or self._grammars.knows(command.grammar):
            return False
        self._held[command.turn] = [command]
        waiting = self._waiting.setdefault(command.tenant, deque())
        waiting.append(command)
        if len(waiting) == 1:
            self._begin(command)
        return True

    def released(self, compiled: Compiled) -> list[Command]:
        """What waited for this, in order."""
        waiting = self._waiting[compiled.tenant]
        turn = waiting.popleft().turn
        if waiting:
            self._begin(waiting[0])
        else:
            del self._waiting[compiled.tenant]
        return self._held.pop(turn)

    def close(self) -> None:
        """Waits for nothing; what was held is not released any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, submit: Submit) -> None:
        assert submit.grammar is not None
        self._threads.submit(self._compile, submit.grammar, submit.tenant)

    def _compile(self, grammar: Grammar, tenant: str) -> None:
        try:
            self._grammars.compile(grammar)
        finally:  # a fault is met again, and answered for, by whoever takes the turn
            self._compiled(Compiled(tenant))
