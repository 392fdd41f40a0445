"""Which replica is tried first."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from deployment.router import SessionRouter, ranking, rendezvous
from deployment.wire import Route

REPLICAS = [f"replica{number}" for number in range(5)]


def test_named_replica_comes_first_and_all_others_follow():
    order = ranking("session", "replica3", REPLICAS)
    assert order[0] == "replica3" and sorted(order) == sorted(REPLICAS)


def test_named_replica_that_is_gone_leaves_the_rendezvous_order():
    assert ranking("session", "gone", REPLICAS) == rendezvous("session", REPLICAS)
    assert ranking("session", None, []) == []


def test_full_replicas_come_last_and_the_named_one_first_all_the_same():
    order = rendezvous("session", REPLICAS)
    full = {order[0], order[2]}
    assert ranking("session", None, REPLICAS, full) == [order[1], *order[3:], order[0], order[2]]
    assert ranking("session", order[2], REPLICAS, full)[0] == order[2]
    assert ranking("session", None, REPLICAS, set(REPLICAS)) == order, "where all are full, the order is as ever"


def test_order_does_not_depend_on_how_replicas_are_listed():
    assert rendezvous("session", REPLICAS) == rendezvous("session", list(reversed(REPLICAS)))


def test_loss_of_a_replica_moves_only_its_sessions():
    before = {str(session): rendezvous(str(session), REPLICAS)[0] for session in range(300)}
    after = {session: rendezvous(session, REPLICAS[:-1])[0] for session in before}
    assert all(after[session] == first for session, first in before.items() if first != REPLICAS[-1])


def test_sessions_spread_over_all_replicas():
    first = Counter(rendezvous(str(session), REPLICAS)[0] for session in range(1000))
    assert set(first) == set(REPLICAS) and min(first.values()) > 120


class Idle:
    """A replica that would take any call."""

    node_id, availability_zone, max_ongoing_requests = "node", None, 1024
    multiplexed_model_ids: frozenset[str] = frozenset()

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, ENGINES)
        self.routing_stats: dict[str, Any] = {}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        await asyncio.sleep(0.01)
        return 0


ENGINES = DeploymentID("EngineReplica", "default")


def test_calls_that_one_request_makes_side_by_side_are_all_sent_each_to_the_replica_it_names():
    wanted = [REPLICAS[number % len(REPLICAS)] for number in range(12)]

    async def scenario() -> list[str]:
        router = SessionRouter(ENGINES, DeploymentHandleSource.REPLICA)
        router.update_replicas([Idle(name) for name in REPLICAS])  # pyright: ignore[reportArgumentType]
        calls = [
            PendingRequest([Route("affinity", name)], {}, RequestMetadata("the request", "the request"))
            for name in wanted
        ]
        chosen = asyncio.gather(*(router._choose_replica_for_request(call) for call in calls))
        return [replica.replica_id.unique_id for replica in await asyncio.wait_for(chosen, 5)]

    assert asyncio.run(scenario()) == wanted
