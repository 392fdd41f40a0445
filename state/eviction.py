"""What must go when the durable tier is full? Worthless bytes first, then what saves least, and text last of all.

A checkpoint is kept as long as all of its segments are there. Dropping one deletes the segments that no other kept
checkpoint needs; the publication stays, and its session is rebuilt from its ledger. All of it is taken from tenants who
hold more than their share (`state/fair_share.py`), in bytes of documents and of segments that each of them needs.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from state.fair_share import first_to_go
from state.leases import InUse
from state.publication_record import Publication, StoredCheckpoint

_Name = tuple[str, str]
_FEW = 16
"""Of as many holders of a segment one more or less hardly changes what each of them costs."""


@dataclass(frozen=True)
class Held:
    """A publication as it lies in the store, under `name`, `size` bytes; `session` is the digest of its key."""

    name: str
    session: str
    size: int
    publication: Publication

    @property
    def tenant(self) -> str:
        return self.publication.key.tenant


@dataclass
class Plan:
    """What is to be deleted: segments by digest, publications by name; `freed` bytes in all."""

    segments: set[bytes] = field(default_factory=set[bytes])
    publications: list[str] = field(default_factory=list[str])
    freed: int = 0


def plan_sweep(held: Iterable[Held], segments: Mapping[bytes, int], in_use: InUse) -> Plan:
    """Deletes the segments (sizes by digest) that no kept checkpoint needs and nobody uses."""
    plan = Plan()
    _Books(held, segments, in_use).take_worthless(plan)
    return plan


def plan_eviction(
    held: Iterable[Held], segments: Mapping[bytes, int], in_use: InUse, wanted: int, *, documents: bool
) -> Plan | None:
    """Frees at least `wanted` bytes. None: that much cannot be freed without taking what is in use, or of a tenant that
    holds no more than its share.

    `documents`: whether whole publications may go as well, the longest unpublished first, once all payload of those who
    hold more than their share is gone.
    """
    plan = Plan()
    books = _Books(held, segments, in_use)
    books.take_worthless(plan)
    while plan.freed < wanted and (books.drop_least(plan) or (documents and books.drop_oldest(plan))):
        pass
    return plan if plan.freed >= wanted else None


class _Books:
    """Which kept checkpoint needs which segment, who holds how much, and what saves the least per byte.

    A checkpoint is named by (session, id), since an imported session may bring ids along that another one has.
    """

    def __init__(self, held: Iterable[Held], segments: Mapping[bytes, int], in_use: InUse) -> None:
        self._sizes = segments
        self._in_use = in_use
        self._kept: dict[_Name, StoredCheckpoint] = {}
        self._ancestors: dict[str, str | None] = {}
        self._successors: defaultdict[str, set[_Name]] = defaultdict(set)
        self._by_id: defaultdict[str, set[_Name]] = defaultdict(set)
        self._holders: defaultdict[bytes, set[_Name]] = defaultdict(set)
        self._tenants: dict[str, str] = {}
        self._used: Counter[str] = Counter()
        self._needed: Counter[tuple[str, bytes]] = Counter()
        self._documents: defaultdict[str, list[Held]] = defaultdict(list)
        # The oldest last, where `drop_oldest` takes it.
        for item in sorted(held, key=_age, reverse=True):
            self._tenants[item.session] = item.tenant
            self._used[item.tenant] += item.size
            if item.session not in in_use.sessions:
                self._documents[item.tenant].append(item)
            for checkpoint in item.publication.checkpoints:
                self._enter((item.session, checkpoint.id), checkpoint)
        self._scores: dict[_Name, float] = {}
        self._queues: defaultdict[str, list[tuple[float, _Name]]] = defaultdict(list)
        for name in self._kept:
            self._push(name)

    def take_worthless(self, plan: Plan) -> None:
        for digest, size in self._sizes.items():
            if not self._holders.get(digest) and digest not in self._in_use.segments:
                plan.segments.add(digest)
                plan.freed += size

    def drop_least(self, plan: Plan) -> bool:
        """Drops the checkpoint that saves least per byte. False: there is none left that may go."""
        queues = [self._queues[tenant] for tenant in first_to_go(self._used) if self._has_least(tenant)]
        if not queues:
            return False
        _, name = heapq.heappop(min(queues))
        self._drop(name, plan)
        return True

    def drop_oldest(self, plan: Plan) -> bool:
        """Drops the publication that is the longest unpublished. False: there is none left that may go."""
        lists = [self._documents[tenant] for tenant in first_to_go(self._used) if self._documents[tenant]]
        if not lists:
            return False
        item = min(lists, key=lambda documents: _age(documents[-1])).pop()
        self._used[item.tenant] -= item.size
        plan.publications.append(item.name)
        plan.freed += item.size
        return True

    def _has_least(self, tenant: str) -> bool:
        """Takes what is not true any more from the front of a tenant's queue."""
        queue = self._queues[tenant]
        while queue:
            score, name = queue[0]
            if name in self._kept and self._scores[name] == score:
                return True
            heapq.heappop(queue)
        return False

    def _enter(self, name: _Name, checkpoint: StoredCheckpoint) -> None:
        self._ancestors[checkpoint.id] = checkpoint.ancestor
        if checkpoint.ancestor is not None:
            self._successors[checkpoint.ancestor].add(name)
        if all(self._sizes.get(segment.sha256) == segment.size for segment in checkpoint.segments):
            self._kept[name] = checkpoint
            self._by_id[checkpoint.id].add(name)
            for segment in checkpoint.segments:
                self._holders[segment.sha256].add(name)
            self._count(name, checkpoint, 1)

    def _count(self, name: _Name, checkpoint: StoredCheckpoint, change: int) -> None:
        """A tenant holds a segment once, for however many checkpoints it needs it."""
        tenant = self._tenants[name[0]]
        for segment in set(checkpoint.segments):
            needed = tenant, segment.sha256
            self._needed[needed] += change
            if self._needed[needed] == max(change, 0):
                self._used[tenant] += change * segment.size

    def _push(self, name: _Name) -> None:
        segments = set(self._kept[name].segments)
        if all(segment.sha256 in self._in_use.segments for segment in segments):
            return  # in use, or without segments: nothing to gain
        share = sum(segment.size / len(self._holders[segment.sha256]) for segment in segments)
        self._scores[name] = self._saved(self._kept[name]) / max(share, 1.0)
        heapq.heappush(self._queues[self._tenants[name[0]]], (self._scores[name], name))

    def _saved(self, checkpoint: StoredCheckpoint) -> float:
        """Prefill seconds from the nearest kept ancestor to the checkpoint."""
        seen: set[str] = {checkpoint.id}
        ancestor = checkpoint.ancestor
        while ancestor is not None and ancestor not in seen:
            if self._by_id.get(ancestor):
                nearest = max(self._kept[name].seconds for name in self._by_id[ancestor])
                return max(0.0, checkpoint.seconds - nearest)
            seen.add(ancestor)
            ancestor = self._ancestors.get(ancestor)
        return checkpoint.seconds

    def _drop(self, name: _Name, plan: Plan) -> None:
        checkpoint = self._kept.pop(name)
        self._by_id[checkpoint.id].discard(name)
        changed = self._nearest_successors(checkpoint.id)
        self._count(name, checkpoint, -1)
        for segment in set(checkpoint.segments):
            holders = self._holders[segment.sha256]
            holders.discard(name)
            if len(holders) < _FEW:
                changed |= holders
            if not holders and segment.sha256 not in self._in_use.segments:
                plan.segments.add(segment.sha256)
                plan.freed += segment.size
        for other in sorted(changed):
            self._push(other)

    def _nearest_successors(self, checkpoint: str) -> set[_Name]:
        """Kept checkpoints whose nearest kept ancestor may have been this one."""
        found: set[_Name] = set()
        seen = {checkpoint}
        open_ids = [checkpoint]
        while open_ids:
            for name in self._successors.get(open_ids.pop(), ()):
                if name in self._kept:
                    found.add(name)
                elif name[1] not in seen:
                    seen.add(name[1])
                    open_ids.append(name[1])
        return found


def _age(item: Held) -> tuple[float, str]:
    return item.publication.published, item.name
