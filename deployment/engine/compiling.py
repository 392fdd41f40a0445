"""Which turns wait for their grammar to be compiled? Large ones take seconds, in which the engine goes on.

Such a turn waits in the queue as every other does, but no lane would help it; one whose matcher is full rests in its
lane. Compiling is done on other threads, which leave Python's lock to the engine's; of each tenant's grammars one at a
time, in the order of their turns, and for nobody who has left.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deployment.engine import errors
from deployment.engine.errors import EngineError
from deployment.engine.grammar import Grammars, NotCompiled, TurnMatcher
from deployment.engine.scheduler import Ticket

THREADS = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """What came of the grammar of the first turn of a tenant that waits: its matcher, None where it runs without, or
    why it cannot run."""

    tenant: str
    outcome: TurnMatcher | EngineError | None


class CompilingTurns:
    """For one thread. As long as nobody has said that it is to be done `beside`, `begin` compiles."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._waiting: dict[str, deque[Ticket]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._compiled: Callable[[Compiled], None] | None = None

    def beside(self, compiled: Callable[[Compiled], None]) -> None:
        """From now on other threads compile. `compiled` is called on one of them; its argument is for `settle`."""
        self._threads = ThreadPoolExecutor(THREADS, "grammars")
        self._compiled = compiled

    def begin(self, ticket: Ticket) -> None:
        """Gives a turn its matcher, or has its grammar compiled; the ticket is `compiling` until then. Raises
        EngineError where it is known that the turn cannot run."""
        try:
            ticket.matcher = self._grammars.matcher(ticket.submit.grammar, known=self._threads is not None)
        except NotCompiled:
            self._wait(ticket)

    def renew(self, ticket: Ticket) -> None:
        """The same for a turn whose matcher is full. Raises EngineError where it can have no other."""
        assert ticket.matcher is not None
        if self._threads is None:
            ticket.matcher = ticket.matcher.renewed()
        else:
            self._wait(ticket)

    def _wait(self, ticket: Ticket) -> None:
        ticket.compiling = True
        first, *others = (*self._waiting.get(ticket.tenant, ()), ticket)
        self._waiting[ticket.tenant] = deque([first, *(other for other in others if other.compiling)])
        if first is ticket:
            self._start(ticket)

    def settle(self, compiled: Compiled) -> Ticket | None:
        """Whose grammar it was; None: that turn does not wait any more."""
        waiting = self._waiting[compiled.tenant]
        ticket = waiting.popleft()
        while waiting and not waiting[0].compiling:
            waiting.popleft()
        if waiting:
            self._start(waiting[0])
        else:
            del self._waiting[compiled.tenant]
        if not ticket.compiling:
            return None
        ticket.compiling = False
        return ticket

    def close(self) -> None:
        """Waits for nothing."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, ticket: Ticket) -> None:
        assert self._threads is not None
        self._threads.submit(self._compile, ticket)

    def _compile(self, ticket: Ticket) -> None:
        try:
            full = ticket.matcher
            outcome = full.renewed() if full is not None else self._grammars.matcher(ticket.submit.grammar)
        except EngineError as error:
            outcome = error
        except BaseException as error:  # whatever it is, the turn must not wait for ever
            logger.exception("a grammar could not be compiled")
            outcome = EngineError(errors.INTERNAL_ERROR, f"the turn failed: {type(error).__name__}: {error}")
        assert self._compiled is not None
        self._compiled(Compiled(ticket.tenant, outcome))
