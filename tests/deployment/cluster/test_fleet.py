"""Who is given sessions, who must give them away, and what Serve's controller says of it."""

from __future__ import annotations

from typing import Any

import pytest

from deployment.cluster.fleet import FRESH_SECONDS, Fleet, Load
from deployment.cluster.serve_states import ServeReplica, read_replicas
from deployment.ownership.messages import Drain


def listed(staying: str, leaving: str = "") -> list[ServeReplica]:
    """Replicas with names of one letter, as Serve lists them."""
    states = [(name, "RUNNING") for name in staying] + [(name, "STOPPING") for name in leaving]
    return [ServeReplica(name, "EngineReplica", state) for name, state in states]


def fleet(**loads: Load) -> Fleet:
    known = Fleet()
    for replica, load in loads.items():
        known.renewed(replica, load, now=0.0)
    return known


def test_a_replica_that_is_about_to_go_is_told_of_all_that_stay():
    known = fleet(a=Load(1, 0), b=Load(1, 0), c=Load(1, 0))
    assert known.drains(now=0.0) == []
    known.look(listed("ac", "bx"))
    assert known.drains(now=0.0) == [("b", Drain(("a", "c")))]
    known.look(listed("", "abc"))
    assert {drain for _, drain in known.drains(now=0.0)} == {Drain(())}, "nobody is a place to go to"
    known.look([])
    assert {drain for _, drain in known.drains(now=0.0)} == {Drain(())}, "the application is ending as a whole"
    known.look(listed("abc"))
    assert known.drains(now=0.0) == [], "its node is not drained after all"


def test_a_replica_that_fell_silent_or_went_is_given_nothing():
    known = fleet(a=Load(1, 0), b=Load(1, 0), c=Load(1, 0))
    known.gone("b")
    known.renewed("c", Load(1, 0), now=FRESH_SECONDS + 1)
    assert known.staying(now=FRESH_SECONDS + 1) == ("c",)


def test_room_is_where_nobody_waits_and_most_lanes_are_free():
    known = fleet(a=Load(0, 3), b=Load(4, 1), c=Load(1, 0), d=Load(2, 0))
    assert known.with_room(beside="a", now=0.0) == "d"
    known.look(listed("abc", "d"))
    assert known.with_room(beside="a", now=0.0) == "c"
    assert known.with_room(beside="c", now=0.0) is None


@pytest.mark.parametrize("state", ["RUNNING", "STARTING", "UPDATING", "RECOVERING", "STOPPING", "PENDING_MIGRATION"])
def test_serve_replicas_are_read_from_the_controllers_description(state: str):
    replica = {"replica_id": "abc", "node_id": "n", "state": state}
    details: dict[str, Any] = {"applications": {"mine": {"deployments": {"EngineReplica": {"replicas": [replica]}}}}}
    assert read_replicas(details, "mine") == (ServeReplica("abc", "EngineReplica", state),)
    assert read_replicas(details, "mine")[0].leaving == (state in ("STOPPING", "PENDING_MIGRATION"))
    assert read_replicas(details, "another") == ()


def test_another_version_is_over_when_every_engine_renews_here():
    def engine(replica: str, state: str = "RUNNING") -> ServeReplica:
        return ServeReplica(replica, "EngineReplica", state)

    ingress = ServeReplica("i", "Ingress", "RUNNING")
    known = fleet(a=Load(1, 0))
    assert not fleet().has_all([engine("a"), ingress]), "nobody has renewed yet"
    assert not known.has_all([engine("a"), engine("old", "STOPPING"), ingress]), "it still gives its sessions away"
    assert known.has_all([engine("a"), ingress])
