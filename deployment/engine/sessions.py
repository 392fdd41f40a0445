"""Which checkpoints are kept on the device, which one a prompt can go on from, and which go first.

Sessions hold checkpoints, at most `KEPT` each beside explicit ones; a *tap* at the end of a tools-and-system block is
held for the whole tenant, and counts to no session. What one turn of a tenant left, every other one finds: the deepest
checkpoint that is an exact prefix, whoever holds it. Only state that came from outside is *private*: it is found by its
own session alone, and so is what was computed from it, also when all that the session held was evicted meanwhile.

When memory is short, the checkpoint goes that spares the least prefill for what it gives back, the longest unused first
among equals, explicit ones after the others; its copies in other tiers are not touched. It is one of a tenant's that
holds more than its share (`state/fair_share.py`) if any of those may go; else another's, since what runs must go on. A
turn that was preempted *parks* one checkpoint here; it goes after all others, since its turn will surely need it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from deployment.engine.messages import Hit
from deployment.engine.tenant_use import TenantUse
from state.checkpoint import Checkpoint
from state.errors import CapacityError, StateError
from state.fair_share import first_to_go
from state.media import Placed, begun, page_keys
from state.memory import StateMemory
from state.prefix_tree import PrefixTree

KEPT = 4

_Taken = TypeVar("_Taken")
_Root = tuple[str, str]
_TENANT = "tenant"


@dataclass(eq=False)
class _Holder:
    """`name`: the session, or None for a tap. `root`: where its checkpoints are found. `tenant`: whose they are, found
    by its other sessions or not. `checkpoints`, oldest first.
    `origin`: where they came from, until a turn has gone on from them. `ledger`: what the session has committed, of
    which the last tokens may have no checkpoint; `media`: what stands in it. `used`: when, as a count of uses."""

    name: str | None
    root: _Root
    tenant: str
    checkpoints: list[Checkpoint] = field(default_factory=list)
    origin: Hit = "device"
    ledger: tuple[int, ...] = ()
    media: Placed = ()
    used: int = 0


@dataclass(frozen=True)
class _Parked:
    checkpoint: Checkpoint
    private: bool


class SessionTable:
    """Owns the checkpoints that it holds."""

    def __init__(self, memory: StateMemory, on_evicted: Callable[[str], None]) -> None:
        """`on_evicted` is told the name of a session whose last checkpoint was evicted, or the last tap it stood on."""
        self._memory = memory
        self._on_evicted = on_evicted
        self._tree: PrefixTree[Checkpoint] = PrefixTree()
        self._sessions: dict[str, _Holder] = {}
        self._holders: dict[Checkpoint, _Holder] = {}
        self._parked: dict[str, _Parked] = {}
        self._used: defaultdict[str, TenantUse] = defaultdict(TenantUse)
        self._uses = 0
        self._changes = 0
        self._evictable: tuple[int, dict[tuple[object, ...], int]] = 0, {}

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def changes(self) -> int:
        """As long as it stays, a turn that lacked memory still lacks it: nothing came, went, or changed hands."""
        return self._changes + self._memory.changes

    # ------------------------------------------------------------------------------------------------ looking up

    def checkpoints(self, session: str) -> tuple[Checkpoint, ...]:
        """All checkpoints that a session holds, oldest first; none if it is unknown."""
        held = self._sessions.get(session)
        return tuple(held.checkpoints) if held else ()

    def whole(self, session: str) -> tuple[Checkpoint, ...]:
        """What stands for a session elsewhere, oldest first: what it holds, and the checkpoint `on_the_way`. The
        tokens after that one are prefilled by whoever goes on."""
        own, found = self.checkpoints(session), self.on_the_way(session)
        return own if found is None or found in own else (found, *own)

    def on_the_way(self, session: str) -> Checkpoint | None:
        """The deepest checkpoint at a prefix of the session's ledger, whoever holds it."""
        held = self._sessions.get(session)
        return self._deepest(held.root, held.ledger, len(held.ledger), held, held.media) if held else None

    def deepest_prefix(
        self, session: str | None, prompt: Sequence[int], tenant: str = "", media: Placed = ()
    ) -> tuple[Checkpoint, Hit] | None:
        """The deepest checkpoint whose processed tokens are an exact prefix of `prompt`, with the same media in them,
        and shorter than it, so that at least one token is prefilled; at equal depth the session's own. Also marks it
        and the session as used."""
        held = self._sessions.get(session) if session is not None else None
        if held is not None:
            self._use(held)
        roots = [held.root, _tenant(tenant)] if held is not None else [_tenant(tenant)]
        found = [c for root in roots if (c := self._deepest(root, prompt, len(prompt) - 1, held, media)) is not None]
        best = max(found, key=lambda checkpoint: checkpoint.frontier, default=None)
        if best is None:
            return None
        holder = self._holders[best]
        self._use(holder)
        return best, holder.origin if holder is held else "device"

    def _deepest(
        self, root: _Root, tokens: Sequence[int], limit: int, held: _Holder | None, media: Placed
    ) -> Checkpoint | None:
        best: Checkpoint | None = None
        for checkpoint in self._tree.prefixes(root, tokens, limit, page_keys(media)):
            if best is not None and checkpoint.frontier < best.frontier:
                break
            if best is None or self._holders[checkpoint] is held:
                best = checkpoint
        return best

    def nearest(self, session: str | None, tokens: Sequence[int], tenant: str = "", media: Placed = ()) -> int:
        """Tokens of the deepest prefix of `tokens` that a session can count on: its own checkpoints and the taps of
        its tenant, but not those of other sessions, which go with them. 0: there is none."""
        held = self._sessions.get(session) if session is not None else None
        root = held.root if held else _tenant(tenant)
        for checkpoint in self._tree.prefixes(root, tokens, len(tokens), page_keys(media)):
            holder = self._holders[checkpoint]
            if holder is held or holder.name is None:
                return checkpoint.frontier
        return 0

    def tenant(self, session: str) -> str:
        """Whose the session is; of one that is unknown, nobody's."""
        held = self._sessions.get(session)
        return held.tenant if held is not None else ""

    def is_private(self, session: str) -> bool:
        """Whether the session's state came from outside, so that nothing of it may be shared."""
        held = self._sessions.get(session)
        return held is not None and held.root[0] != _TENANT

    # ------------------------------------------------------------------------------------------------ keeping

    def settle(self, session: str) -> None:
        """From now on the session's state counts as this device's own."""
        if session in self._sessions:
            self._sessions[session].origin = "device"

    def add(self, session: str, checkpoint: Checkpoint, tenant: str = "", *, private: bool = False) -> None:
        """Gives a checkpoint to a session, and releases what it replaces: one of the same tokens, media and kind, or
        one more than `KEPT`. `private`: it was computed from private state, so that the session is private now."""
        held = self._session(session, tenant, private)
        same = [c for c in held.checkpoints if c.kind == checkpoint.kind and processed(c) == processed(checkpoint)]
        for old in same:
            self._release(old)
        self._hold(held, checkpoint)
        self._trim(held)

    def add_tap(self, checkpoint: Checkpoint, tenant: str) -> None:
        """Keeps a checkpoint for all turns of a tenant."""
        self._hold(_Holder(None, _tenant(tenant), tenant), checkpoint)

    def commit(
        self, session: str, ledger: Sequence[int], tenant: str = "", media: Placed = (), *, private: bool = False
    ) -> None:
        """Notes what a session has committed, whether there is a checkpoint at its end or not."""
        held = self._session(session, tenant, private)
        held.ledger, held.media = tuple(ledger), media

    def replace(
        self, session: str, checkpoints: Sequence[Checkpoint], origin: Hit, tenant: str, *, shared: bool
    ) -> None:
        """Gives a session of `tenant` exactly these checkpoints, oldest first. Other sessions of the tenant find them
        too if they are `shared`; state that nobody vouches for is not: it is found by this session alone, and so is all
        that it computes later."""
        self.drop(session)
        root = _tenant(tenant) if shared else _own(session)
        held = self._sessions[session] = _Holder(session, root, tenant, origin=origin)
        for checkpoint in checkpoints:
            self._hold(held, checkpoint)
        deepest = max(checkpoints, key=lambda c: c.frontier, default=None)
        if deepest is not None:
            held.ledger, held.media = deepest.ledger, deepest.media
        self._trim(held)

    def pinned(self, session: str, frontier: int) -> tuple[Checkpoint, ...]:
        """The explicit checkpoints that a session holds at `frontier`."""
        return tuple(c for c in self.checkpoints(session) if c.kind == "explicit" and c.frontier == frontier)

    def unpin(self, session: str, frontier: int) -> None:
        """Releases the explicit checkpoints that a session holds at `frontier`."""
        for checkpoint in self.pinned(session, frontier):
            self._evict(checkpoint)

    def discard(self, checkpoint: Checkpoint) -> None:
        """Releases one checkpoint, whoever holds it."""
        held = self._holders[checkpoint]
        self._release(checkpoint)
        if held.name is None:
            self._tap_gone(held)

    def drop(self, session: str) -> None:
        """Releases all that a session holds; unknown sessions are ignored."""
        held = self._sessions.pop(session, None)
        for checkpoint in tuple(held.checkpoints) if held else ():
            self._release(checkpoint)

    # ------------------------------------------------------------------------------------------------ parked turns

    def park(self, turn: str, checkpoint: Checkpoint, *, private: bool = False) -> None:
        """Keeps what a preempted turn will go on from."""
        self._changes += 1
        self._parked[turn] = _Parked(checkpoint, private)

    def parked(self, turn: str) -> Checkpoint | None:
        parked = self._parked.get(turn)
        return parked.checkpoint if parked is not None else None

    def is_parked_private(self, turn: str) -> bool:
        """Whether what the turn will go on from was computed from private state."""
        parked = self._parked.get(turn)
        return parked is not None and parked.private

    def unpark(self, turn: str) -> None:
        """Releases a turn's parked checkpoint, if it has one."""
        parked = self._parked.pop(turn, None)
        if parked is not None:
            self._memory.release(parked.checkpoint)

    def give_parked(self, turn: str, session: str, tenant: str = "") -> Checkpoint | None:
        """Makes a turn's parked checkpoint one of a session's. None if there is none."""
        parked = self._parked.pop(turn, None)
        if parked is None:
            return None
        self.add(session, parked.checkpoint, tenant, private=parked.private)
        return parked.checkpoint

    # ------------------------------------------------------------------------------------------------ eviction

    def with_room(
        self,
        take: Callable[[], _Taken],
        keep: str | None,
        turn: str | None = None,
        source: Checkpoint | None = None,
    ) -> _Taken:
        """Calls `take`; while memory is short, evicts checkpoints other than those of the session `keep`, of the turn
        `turn`, and `source`, and calls it again.

        Nothing is evicted that would not be enough: then the CapacityError passes on and every session keeps what it
        has. `take` may be called several times, so it must look up what it needs each time.
        """
        enough: dict[str, int] = {}
        while True:
            try:
                return take()
            except CapacityError as short:
                # What is evicted becomes free, so that what was enough once stays so.
                if short.wanted > enough.get(short.pool, 0):
                    if short.wanted > short.free + self.evictable(short.pool, keep, turn, source):
                        raise
                    enough[short.pool] = short.wanted
                if not self._evict_one(short.pool, keep, turn, source):
                    raise

    def evictable(self, pool: str, keep: str | None, turn: str | None = None, source: Checkpoint | None = None) -> int:
        """Images or pages that would be free if all checkpoints that `with_room` may evict were."""
        if self._evictable[0] != self.changes:
            self._evictable = self.changes, {}
        counted = self._evictable[1]
        # those of most turns that wait hold nothing yet, so that one count is that of all of them
        kept = keep if keep is not None and self.checkpoints(keep) else None
        which = pool, kept, turn if turn in self._parked else None, source
        if which not in counted:
            counted[which] = self._count_evictable(*which)
        return counted[which]

    def _count_evictable(self, pool: str, keep: str | None, turn: str | None, source: Checkpoint | None) -> int:
        checkpoints = self._candidates(keep, source)
        checkpoints += [parked.checkpoint for name, parked in self._parked.items() if name != turn]
        if pool == self._memory.images.name:
            return len(checkpoints)
        holders = Counter(page for c in checkpoints for page in self._pages(c, pool))
        return sum(count == self._refcount(page, pool) for page, count in holders.items())

    def _evict_one(self, pool: str, keep: str | None, turn: str | None, source: Checkpoint | None) -> bool:
        """Releases what is worth least; without any such, what a turn has parked. False if there is neither."""
        candidates = self._candidates(keep, source)
        if candidates:
            first = first_to_go(self._used[pool].of_each)
            over = [c for c in candidates if self._holders[c].tenant in first] or candidates
            rank = {c: (c.kind == "explicit", self._worth(c, pool), self._holders[c].used) for c in over}
            self._evict(min(over, key=rank.__getitem__))
            return True
        parked = next((name for name in self._parked if name != turn), None)
        if parked is not None:
            self.unpark(parked)
        return parked is not None

    def _candidates(self, keep: str | None, source: Checkpoint | None) -> list[Checkpoint]:
        return [c for c, held in self._holders.items() if c is not source and (keep is None or held.name != keep)]

    def _worth(self, checkpoint: Checkpoint, pool: str) -> float:
        """Tokens that would have to be prefilled without this checkpoint, for each image or page of `pool` that its
        end gives back. Without end where it gives none back: then another one must go anyway."""
        spared = self._spared(checkpoint)
        if spared == 0 or pool == self._memory.images.name:
            return spared
        freed = sum(self._refcount(page, pool) == 1 for page in self._pages(checkpoint, pool))
        return spared / freed if freed else float("inf")

    def _spared(self, checkpoint: Checkpoint) -> int:
        return checkpoint.frontier - self._tree.ancestor(checkpoint)

    def _pages(self, checkpoint: Checkpoint, pool: str) -> tuple[int, ...]:
        """What it has of a pool: pages, or its image."""
        if pool == self._memory.images.name:
            return (checkpoint.slot,)
        return checkpoint.pages if pool == self._memory.target.name else checkpoint.draft_pages

    @property
    def _pools(self) -> tuple[str, ...]:
        pools = self._memory.images, self._memory.target, self._memory.draft
        return tuple(pool.name for pool in pools if pool is not None)

    def _refcount(self, page: int, pool: str) -> int:
        pages = self._memory.target if pool == self._memory.target.name else self._memory.draft
        return pages.refcount(page) if pages is not None else 0

    def _evict(self, checkpoint: Checkpoint) -> None:
        held = self._holders[checkpoint]
        self._release(checkpoint)
        if held.name is None:
            self._tap_gone(held)
        elif not held.checkpoints:
            self._gone(held)

    def _tap_gone(self, tap: _Holder) -> None:
        """Sessions that had no checkpoint of their own, and can count on none any more, have lost all."""
        bare = [held for held in self._sessions.values() if held.root == tap.root and not held.checkpoints]
        for held in bare:
            if held.ledger and not self.nearest(held.name, held.ledger, held.tenant, held.media):
                self._gone(held)

    def _gone(self, held: _Holder) -> None:
        assert held.name is not None
        del self._sessions[held.name]
        self._on_evicted(held.name)

    def _trim(self, held: _Holder) -> None:
        """The two newest stay, which are where the last turn began and where it ended."""
        while len(own := [c for c in held.checkpoints if c.kind != "explicit"]) > KEPT:
            self._release(min(own[:-2], key=self._spared))

    # ------------------------------------------------------------------------------------------------ books

    def check_invariants(self) -> None:
        """Compares all books with each other. Raises `StateError` naming what is wrong."""
        held = [c for holder in self._holders.values() for c in holder.checkpoints]
        if any(checkpoint not in self._tree for checkpoint in held) or len(self._tree) != len(self._holders):
            raise StateError("session table: the prefix tree does not hold what the sessions hold")
        for checkpoint, holder in self._holders.items():
            self._memory.check_kept(checkpoint)
            if checkpoint not in holder.checkpoints:
                raise StateError(f"session table: checkpoint {checkpoint.id} is not known to its holder")
            if holder.name is not None and self._sessions.get(holder.name) is not holder:
                raise StateError(f"session table: session {holder.name!r} was dropped, but holds a checkpoint")
        for pool in self._pools:
            pages: defaultdict[str, set[int]] = defaultdict(set)
            for checkpoint, holder in self._holders.items():
                pages[holder.tenant].update(self._pages(checkpoint, pool))
            counted = {tenant: len(held) for tenant, held in pages.items() if held}
            if counted != self._used[pool].of_each:
                raise StateError(f"session table: {pool}: tenants hold {counted}, not {self._used[pool].of_each}")
        kept = len(self._holders) + len(self._parked)
        if kept != len(self._memory.checkpoints):
            raise StateError(f"session table: {kept} checkpoints are held, {len(self._memory.checkpoints)} exist")

    def _session(self, session: str, tenant: str, private: bool) -> _Holder:
        held = self._sessions.get(session)
        if held is None:
            held = self._sessions[session] = _Holder(session, _tenant(tenant), tenant)
        if private and held.root != _own(session):
            held.root = _own(session)
            for checkpoint in held.checkpoints:
                self._tree.remove(checkpoint)
                self._insert(held, checkpoint)
        self._use(held)
        return held

    def _use(self, held: _Holder) -> None:
        self._uses += 1
        held.used = self._uses

    def _hold(self, held: _Holder, checkpoint: Checkpoint) -> None:
        self._changes += 1
        held.checkpoints.append(checkpoint)
        self._holders[checkpoint] = held
        for pool in self._pools:
            self._used[pool].add(held.tenant, self._pages(checkpoint, pool))
        self._insert(held, checkpoint)
        self._use(held)

    def _insert(self, held: _Holder, checkpoint: Checkpoint) -> None:
        tokens, media = processed(checkpoint)
        self._tree.insert(held.root, tokens, checkpoint, page_keys(media))

    def _release(self, checkpoint: Checkpoint) -> None:
        held = self._holders.pop(checkpoint)
        held.checkpoints.remove(checkpoint)
        for pool in self._pools:
            self._used[pool].remove(held.tenant, self._pages(checkpoint, pool))
        self._tree.remove(checkpoint)
        self._memory.release(checkpoint)


def _tenant(name: str) -> _Root:
    return _TENANT, name


def _own(session: str) -> _Root:
    return "session", session


def processed(checkpoint: Checkpoint) -> tuple[tuple[int, ...], Placed]:
    """The tokens that its state stands for, and the media in them."""
    return checkpoint.ledger[: checkpoint.frontier], begun(checkpoint.media, checkpoint.frontier)
