"""Which replica is tried first."""

from __future__ import annotations

from collections import Counter

from deployment.router import ranking, rendezvous

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
