"""Which checkpoints a session holds on the device, which one a prompt can go on from, and which go first.

At most `KEPT` checkpoints a session, the oldest released first. When memory is short, the session that was used least
recently loses its oldest checkpoint: its copies in other tiers are not touched. A turn that was preempted *parks* one
checkpoint here; it goes after those of all sessions, since its turn will surely need it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from deployment.engine.messages import Hit
from state.checkpoint import Checkpoint
from state.errors import CapacityError
from state.memory import StateMemory

KEPT = 4

_Taken = TypeVar("_Taken")


@dataclass(eq=False)
class HeldSession:
    """`checkpoints`, oldest first. `origin`: where they came from, until a turn has gone on from them."""

    checkpoints: list[Checkpoint] = field(default_factory=list)
    origin: Hit = "device"


class SessionTable:
    """Sessions by key, least recently used first. Owns the checkpoints that it holds."""

    def __init__(self, memory: StateMemory, on_evicted: Callable[[str], None]) -> None:
        """`on_evicted` is told the name of a session whose last checkpoint was evicted."""
        self._memory = memory
        self._on_evicted = on_evicted
        self._sessions: OrderedDict[str, HeldSession] = OrderedDict()
        self._parked: dict[str, Checkpoint] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def checkpoints(self, session: str) -> tuple[Checkpoint, ...]:
        """All checkpoints of a session, oldest first; none if it is unknown."""
        held = self._sessions.get(session)
        return tuple(held.checkpoints) if held else ()

    def deepest_prefix(self, session: str, prompt: Sequence[int]) -> tuple[Checkpoint, Hit] | None:
        """The deepest checkpoint whose processed tokens are an exact prefix of `prompt` and shorter than it, so that
        at least one token is prefilled. Also marks the session as used."""
        held = self._sessions.get(session)
        if held is None:
            return None
        self._sessions.move_to_end(session)
        prompt = tuple(prompt)
        fitting = [
            c for c in held.checkpoints if c.frontier < len(prompt) and c.ledger[: c.frontier] == prompt[: c.frontier]
        ]
        best = max(fitting, key=lambda c: c.frontier, default=None)
        if best is None or best.frontier == 0:
            return None
        return best, held.origin

    def settle(self, session: str) -> None:
        """From now on the session's state counts as this device's own."""
        if session in self._sessions:
            self._sessions[session].origin = "device"

    def add(self, session: str, checkpoint: Checkpoint) -> None:
        """Gives a checkpoint to a session, and releases what it replaces: the same frontier and kind, or the oldest."""
        held = self._sessions.setdefault(session, HeldSession())
        self._sessions.move_to_end(session)
        same = [c for c in held.checkpoints if (c.kind, c.frontier) == (checkpoint.kind, checkpoint.frontier)]
        for old in same:
            self._release(held, old)
        held.checkpoints.append(checkpoint)
        while len(held.checkpoints) > KEPT:
            self._release(held, held.checkpoints[0])

    def replace(self, session: str, checkpoints: Sequence[Checkpoint], origin: Hit) -> None:
        """Gives a session exactly these checkpoints, oldest first."""
        self.drop(session)
        self._sessions[session] = HeldSession(list(checkpoints)[-KEPT:], origin)
        for surplus in list(checkpoints)[:-KEPT]:
            self._memory.release(surplus)

    def discard(self, session: str, checkpoint: Checkpoint) -> None:
        """Releases one checkpoint of a session."""
        self._release(self._sessions[session], checkpoint)

    def drop(self, session: str) -> None:
        """Releases all that a session holds; unknown sessions are ignored."""
        held = self._sessions.pop(session, None)
        for checkpoint in held.checkpoints if held else ():
            self._memory.release(checkpoint)

    # ------------------------------------------------------------------------------------------------ parked turns

    def park(self, turn: str, checkpoint: Checkpoint) -> None:
        """Keeps what a preempted turn will go on from."""
        self._parked[turn] = checkpoint

    def parked(self, turn: str) -> Checkpoint | None:
        return self._parked.get(turn)

    def unpark(self, turn: str) -> None:
        """Releases a turn's parked checkpoint, if it has one."""
        checkpoint = self._parked.pop(turn, None)
        if checkpoint is not None:
            self._memory.release(checkpoint)

    def give_parked(self, turn: str, session: str) -> Checkpoint | None:
        """Makes a turn's parked checkpoint one of a session's. None if there is none."""
        checkpoint = self._parked.pop(turn, None)
        if checkpoint is not None:
            self.add(session, checkpoint)
        return checkpoint

    # ------------------------------------------------------------------------------------------------ eviction

    def evict_one(self, keep: str | None = None, turn: str | None = None) -> bool:
        """Releases the oldest checkpoint of the session used least recently, other than `keep`; without one, what a
        turn other than `turn` has parked. False if there is neither."""
        for session, held in self._sessions.items():
            if session != keep and held.checkpoints:
                self._release(held, held.checkpoints[0])
                if not held.checkpoints:
                    del self._sessions[session]
                    self._on_evicted(session)
                return True
        parked = next((name for name in self._parked if name != turn), None)
        if parked is not None:
            self.unpark(parked)
        return parked is not None

    def with_room(self, take: Callable[[], _Taken], keep: str | None, turn: str | None = None) -> _Taken:
        """Calls `take`; while memory is short, evicts checkpoints of other sessions than `keep` and other turns than
        `turn`, and calls it again.

        Nothing is evicted that would not be enough: then the CapacityError passes on and every session keeps what it
        has. `take` may be called several times, so it must look up what it needs each time.
        """
        while True:
            try:
                return take()
            except CapacityError as short:
                can_evict = self.evictable(short.pool, keep, turn)
                if short.wanted > short.free + can_evict or not self.evict_one(keep, turn):
                    raise

    def evictable(self, pool: str, keep: str | None, turn: str | None = None) -> int:
        """Images or pages that would be free if all checkpoints but those of `keep` and `turn` were evicted."""
        checkpoints = [c for name, held in self._sessions.items() if name != keep for c in held.checkpoints]
        checkpoints += [c for name, c in self._parked.items() if name != turn]
        if pool == self._memory.images.name:
            return len(checkpoints)
        pages = self._memory.target if pool == self._memory.target.name else self._memory.draft
        assert pages is not None
        of_target = pages is self._memory.target
        holders = Counter(page for c in checkpoints for page in (c.pages if of_target else c.draft_pages))
        return sum(count == pages.refcount(page) for page, count in holders.items())

    def _release(self, held: HeldSession, checkpoint: Checkpoint) -> None:
        held.checkpoints.remove(checkpoint)
        self._memory.release(checkpoint)
