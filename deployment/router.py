"""Sends a call to the replica it names, else spreads sessions by rendezvous hash, past replicas that are full.

Runs in every process that holds a handle, so it keeps no map of its own: the choice follows from the call, the set of
replicas, and what they last said of their lanes, which Serve brings along, about a second old. Serve's own count of a
replica's requests is no measure: a turn that decodes and one that waits are both one request.
The class is pickled by value, with its module, into proxies and replicas.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Collection, Iterable
from dataclasses import replace

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

LANES_FREE = "lanes_free"


def rendezvous(affinity: str, replicas: Iterable[str]) -> list[str]:
    """Replicas in the order in which they are tried for `affinity`.

    When a replica comes or goes, only the sessions for which it is first move.
    """

    def weight(replica: str) -> bytes:
        return hashlib.blake2b(f"{affinity}\0{replica}".encode(), digest_size=16).digest()

    return sorted(replicas, key=weight, reverse=True)


def ranking(
    affinity: str, wanted: str | None, replicas: Iterable[str], full: Collection[str] = frozenset()
) -> list[str]:
    """`wanted` first, if it is among the replicas; the rest by rendezvous hash, those that are `full` last."""
    order = sorted(rendezvous(affinity, replicas), key=lambda replica: replica in full)
    if wanted in order:
        order.remove(wanted)
        order.insert(0, wanted)
    return order


class SessionRouter(RequestRouter):
    """The first argument of each call is a `wire.Route`; a call without one is spread by its request id."""

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Calls that one request makes side by side have its id from Serve, which finds by that id whom a choice was
        made for: it finds one of them, and the others wait for ever. So each has one of its own from here on."""
        if not is_retry:
            own = replace(pending_request.metadata, internal_request_id=str(uuid.uuid4()))
            pending_request.metadata = own
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        affinity, wanted, firm = "", None, False
        if pending_request is not None:
            # Without it a full fleet makes the retry loop spin.
            pending_request.routing_context.should_backoff = True
            affinity = pending_request.metadata.internal_request_id
            route = pending_request.args[0] if pending_request.args else None
            # Duck-typed: this module travels by value and should not drag others along.
            affinity = getattr(route, "affinity", None) or affinity
            wanted = getattr(route, "replica", None)
            firm = getattr(route, "firm", False)
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        # One replica a rank: Serve sorts within a rank by queue length, which would undo the order.
        full = {name for name, replica in by_id.items() if replica.routing_stats.get(LANES_FREE) == 0}
        return [[by_id[name]] for name in ranking(affinity, wanted, by_id, frozenset() if firm else full)]
