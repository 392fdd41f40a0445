"""Which turn gets a lane next, and which lane gives its place up? Books only: no tensors, no clock of its own.

    order       interactive before background; within a class turns that block; then the tenant with the fewest lanes,
                then the one served longest ago; then by arrival. So a swarm takes what others leave, and no more
    overtaking  a turn that does not fit now is passed over, at most `OVERTAKES` times and for `OVERTAKE_SECONDS`;
                then it blocks: nothing behind it is admitted before it is
    preemption  an interactive turn that has waited `preempt_seconds` takes the place of background lanes, the youngest
                first; of younger lanes of its own tenant; of the youngest lanes of a tenant that has two lanes more.
                Each of these takes lanes from a later turn or makes tenants more equal: two turns never swap for ever
    limits      `overloaded` and `queue_timeout` are for turns that have not begun; a preempted turn always comes back,
                and so does one that is resumed: its client has read a part of it already. A turn that came after the
                last step does not wait yet, as long as there is a free lane for it: two that come at once to an idle
                engine are no queue. One whose grammar is compiled waits

Background turns wait for as long as interactive ones want the room: that is what the class is for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from deployment.engine import errors
from deployment.engine.commands import Submit
from deployment.engine.errors import EngineError
from deployment.engine.grammar import TurnMatcher
from deployment.engine.options import EngineOptions

LANES = "lanes"
OVERTAKES = 8
OVERTAKE_SECONDS = 10.0
COMPILE_SECONDS = 1.0
"""That a turn waits for its grammar at least, however soon it wants a lane or none."""
LOOK_AHEAD = 8
"""Turns that are passed over in one step at most: looking for room costs time that lanes decode in."""


@dataclass(frozen=True)
class Shortage:
    """What a turn lacks: `missing` units of the pool of this name, beyond what is free or could be evicted. As long as
    `changes` stays what it was, it lacks the same, and is not to be tried again."""

    pool: str
    missing: int
    changes: int = 0


Holding = Mapping[str, int]
"""What a lane would give back: units by the pool's name."""


@dataclass(eq=False)
class Ticket:
    """A turn's place, from its arrival to its end. `arrival`: its number, smaller is older. `waits_since`: when it
    arrived or was preempted. `begun`: it has had a lane, here or elsewhere. `deadline`: when waiting ends; None once it
    has begun. `offered`: it could have had a lane in the last step. `held`: it waits for another turn's prompt, and no
    lane would help it; nor where it is `compiling`: its grammar is not known yet. `matcher`: of a turn with a grammar,
    which is compiled once for it however long it waits."""

    submit: Submit
    arrival: int
    waits_since: float
    deadline: float | None
    begun: bool = False
    short_since: float | None = None
    shortage: Shortage | None = None
    overtaken: int = 0
    blocking: bool = False
    offered: bool = False
    held: bool = False
    compiling: bool = False
    matcher: TurnMatcher | None = None
    holding: Holding = field(default_factory=dict)

    @property
    def turn(self) -> str:
        return self.submit.turn

    @property
    def tenant(self) -> str:
        return self.submit.tenant

    @property
    def ready(self) -> bool:
        """Whether a lane would help it."""
        return not (self.held or self.compiling)

    @property
    def expires(self) -> float | None:
        """When waiting ends: a grammar that was quickly compiled is not the reason."""
        if self.deadline is None or not self.compiling:
            return self.deadline
        return max(self.deadline, self.waits_since + COMPILE_SECONDS)

    @property
    def background(self) -> bool:
        return self.submit.priority == "background"


class Scheduler:
    """All turns of an engine: `waiting` and `running`. Whoever owns it says what time it is."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._waiting: list[Ticket] = []
        self._running: list[Ticket] = []
        self._arrivals = 0
        self._admissions = 0
        self._served: dict[str, int] = {}

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Ticket, ...]:
        return tuple(self._running)

    def knows(self, turn: str) -> bool:
        return any(ticket.turn == turn for ticket in (*self._waiting, *self._running))

    def of(self, turn: str) -> Ticket:
        """A running turn's."""
        return next(ticket for ticket in self._running if ticket.turn == turn)

    # ------------------------------------------------------------------------------------------------ the queue

    def enqueue(self, submit: Submit, now: float) -> Ticket:
        """Takes a turn in, or raises EngineError because too much waits already."""
        begun = submit.resumed is not None
        if not begun:
            self._check_limits(submit)
        seconds = self._options.queue_seconds if submit.queue_seconds is None else submit.queue_seconds
        deadline = None if seconds is None or begun else now + seconds
        self._arrivals += 1
        # a tenant that is new, or comes back, stands behind those who have waited since before it came
        self._served.setdefault(submit.tenant, self._admissions)
        ticket = Ticket(submit, self._arrivals, now, deadline, begun)
        self._waiting.append(ticket)
        return ticket

    def _check_limits(self, submit: Submit) -> None:
        waiting = self._queue()
        limit = self._options.queue_turns
        if len(waiting) >= limit:
            raise EngineError(errors.OVERLOADED, f"{len(waiting)} turns wait already, which is the limit (queue_turns)")
        self._check_tenant(submit, [ticket for ticket in waiting if ticket.tenant == submit.tenant])

    def _queue(self) -> list[Ticket]:
        """The turns that have not begun, but for those that get a lane as soon as lanes are given away again."""
        waiting = [ticket for ticket in self._waiting if not ticket.begun]
        free = self._options.lanes - len(self._running) - (len(self._waiting) - len(waiting))
        coming = [ticket for ticket in waiting if not (ticket.offered or ticket.compiling)][: max(free, 0)]
        return [ticket for ticket in waiting if ticket not in coming]

    def _check_tenant(self, submit: Submit, waiting: list[Ticket]) -> None:
        limit = self._options.tenant_queued_tokens
        if limit is None or not waiting:  # one turn may always wait, or a long prompt could never run
            return
        queued = sum(len(ticket.submit.prompt_ids) for ticket in waiting)
        if queued + len(submit.prompt_ids) > limit:
            raise EngineError(
                errors.OVERLOADED,
                f"the prompts of this tenant that wait have {queued} tokens; this one's {len(submit.prompt_ids)} more "
                f"would exceed its limit of {limit} (tenant_queued_tokens)",
                "prompt",
            )

    def expired(self, now: float) -> list[Ticket]:
        """Takes out the turns whose time to wait is over."""
        late = [ticket for ticket in self._waiting if ticket.expires is not None and ticket.expires <= now]
        for ticket in late:
            self._leave(ticket)
        return late

    def withdraw(self, turn: str) -> Ticket | None:
        """Takes a waiting turn out; None if it does not wait."""
        ticket = next((ticket for ticket in self._waiting if ticket.turn == turn), None)
        if ticket is not None:
            self._leave(ticket)
        return ticket

    def _leave(self, ticket: Ticket) -> None:
        self._waiting.remove(ticket)
        ticket.compiling = False
        self._forget(ticket.tenant)

    # ------------------------------------------------------------------------------------------------ admission

    def admit(self, now: float, take: Callable[[Ticket], Holding | Shortage | None]) -> None:
        """Offers waiting turns to `take`, best first, while there are lanes.

        `take` is all or nothing: it says what the new lane holds, or what is missing, or None where the turn ended.
        """
        for ticket in self._waiting:
            ticket.offered = not ticket.compiling
        passed: list[Ticket] = []
        while self._waiting and len(self._running) < self._options.lanes and len(passed) < LOOK_AHEAD:
            ticket = self._first(ticket for ticket in self._waiting if ticket not in passed)
            if ticket is None:
                return
            outcome = take(ticket)
            if isinstance(outcome, Shortage):
                self._pass_over(ticket, outcome, now)
                passed.append(ticket)
            else:
                self._waiting.remove(ticket)
                if outcome is None:
                    self._forget(ticket.tenant)
                    continue
                self._start(ticket, outcome)
                for other in passed:
                    other.overtaken += 1
                    other.blocking = other.blocking or other.overtaken >= OVERTAKES
            if any(ticket.blocking for ticket in passed):
                return

    def _first(self, tickets: Iterable[Ticket]) -> Ticket | None:
        lanes = Counter(ticket.tenant for ticket in self._running)
        limit = self._options.tenant_lanes
        return min(
            (t for t in tickets if t.ready and (limit is None or lanes[t.tenant] < limit)),
            key=lambda t: (t.background, not t.blocking, lanes[t.tenant], self._served[t.tenant], t.arrival),
            default=None,
        )

    def _pass_over(self, ticket: Ticket, shortage: Shortage, now: float) -> None:
        ticket.shortage = shortage
        if ticket.short_since is None:
            ticket.short_since = now
        ticket.blocking = ticket.blocking or now - ticket.short_since >= OVERTAKE_SECONDS

    def _start(self, ticket: Ticket, holding: Holding) -> None:
        ticket.holding = holding
        ticket.begun = True
        ticket.deadline = ticket.short_since = ticket.shortage = None
        ticket.overtaken, ticket.blocking = 0, False
        self._admissions += 1
        self._served[ticket.tenant] = self._admissions
        self._running.append(ticket)

    # ------------------------------------------------------------------------------------------------ lanes

    def victims(self, now: float) -> list[Ticket]:
        """Lanes to preempt so that the first interactive turn, if it has waited too long, fits; none if none would do.

        To be asked after `admit`, while it is known what that turn lacks.
        """
        bound = self._options.preempt_seconds
        if bound is None or not self._waiting:
            return []
        head = self._first(ticket for ticket in self._waiting if not ticket.background)
        if head is None or now - head.waits_since < bound:
            return []
        shortage = Shortage(LANES, 1) if len(self._running) >= self._options.lanes else head.shortage
        if shortage is None:
            return []
        chosen: list[Ticket] = []
        missing = shortage.missing
        lanes = Counter(ticket.tenant for ticket in self._running)
        for victim in sorted(self._running, key=lambda t: (not t.background, -t.arrival)):
            if missing <= 0:
                break
            younger = victim.tenant == head.tenant and victim.arrival > head.arrival
            if victim.background or younger or lanes[victim.tenant] >= lanes[head.tenant] + 2:
                chosen.append(victim)
                lanes[victim.tenant] -= 1
                missing -= victim.holding.get(shortage.pool, 0)
        if missing > 0:
            return []
        head.blocking = True  # what the victims give up is for nobody else
        return chosen

    def preempted(self, turn: str, now: float) -> None:
        """A running turn gave up its lane and waits again, at the place that its arrival gives it."""
        ticket = self._ended(turn)
        ticket.waits_since = now
        self._waiting.append(ticket)

    def ended(self, turn: str) -> None:
        """A running turn is over."""
        ticket = self._ended(turn)
        ticket.compiling = False
        self._forget(ticket.tenant)

    def _ended(self, turn: str) -> Ticket:
        ticket = self.of(turn)
        self._running.remove(ticket)
        ticket.holding = {}
        return ticket

    def _forget(self, tenant: str) -> None:
        if not any(ticket.tenant == tenant for ticket in (*self._waiting, *self._running)):
            self._served.pop(tenant, None)
