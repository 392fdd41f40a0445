"""What does nothing need any more? Marks what publications need and leases name; the rest goes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from state.byte_store import ByteStore, leftover_time
from state.durable_index import DurableIndex
from state.eviction import Plan, plan_sweep
from state.leases import Lease, Leases
from state.names import parse_numbered, segment_name

LEFTOVER_SECONDS = 3600.0
"""Age at which an unfinished file is that of a writer that died."""

TOMBSTONE_TTLS = 2
"""A tombstone is kept for as many times the sessions' time to live, so that no copy outlives it."""

_BATCH = 64


@dataclass(frozen=True)
class Swept:
    """How many files went: records (replaced, deleted, idle too long or damaged), segments, and leftovers."""

    records: int
    segments: int
    leftovers: int


def sweep(store: ByteStore, index: DurableIndex, leases: Leases, lease: Lease, now: float, session_ttl: float) -> Swept:
    """One mark and sweep, under a sweep's lease. If a record cannot be read, nothing is removed (`StoreError`)."""
    # In this order: who is done with his lease before the first look has published before the second.
    in_use = leases.in_use()
    inventory = index.inventory()
    kept = [
        held
        for held in index.newest(inventory).values()
        if held.session in in_use.sessions or now - held.publication.published <= session_ttl
    ]
    plan = plan_sweep(kept, inventory.segments, in_use)
    names = {held.name for held in kept}
    plan.publications += [
        name for name in inventory.records if name not in names and _session(name) not in in_use.sessions
    ]
    delete_planned(store, lease, plan)
    leftovers = [entry.name for entry in store.list("v1/") if _began(entry.name) < now - LEFTOVER_SECONDS]
    leftovers += leases.ended()
    # After the records that they stand against.
    leftovers += [
        name
        for name, (session, order) in index.tombstones().items()
        if order.sequence < now - TOMBSTONE_TTLS * session_ttl and session not in in_use.sessions
    ]
    _delete(store, lease, leftovers)
    return Swept(len(plan.publications), len(plan.segments), len(leftovers))


def delete_planned(store: ByteStore, lease: Lease, plan: Plan) -> None:
    """Records first: a crash in between leaves segments that nobody needs, not records that lack theirs."""
    _delete(store, lease, plan.publications)
    _delete(store, lease, [segment_name(digest) for digest in plan.segments])


def _delete(store: ByteStore, lease: Lease, names: Collection[str]) -> None:
    ordered = sorted(names)
    for start in range(0, len(ordered), _BATCH):
        lease.keep()
        store.delete(ordered[start : start + _BATCH])


def _session(name: str) -> str | None:
    parsed = parse_numbered(name)
    return parsed[0] if parsed else None


def _began(name: str) -> float:
    began = leftover_time(name)
    return float("inf") if began is None else began
