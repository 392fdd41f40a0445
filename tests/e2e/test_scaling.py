"""More to do than there is room for: who comes again is served, and replicas come with what waits."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.deployed import (
    Deployed,
    begun,
    check,
    check_idle,
    idle_sessions,
    read_all,
    wait_for,
)

# Minutes of deploys.
pytestmark = pytest.mark.soak

STREAMS = 64

LONGER = 2000
"""Tokens, which take longer than another replica takes to come."""

SOON = {
    "min_replicas": 1,
    "max_replicas": 2,
    "upscale_delay_s": 1,
    "downscale_delay_s": 30,
    "policy": {"policy_function": "deployment.scaling:replicas_wanted"},
}
"""How Serve looks after their number, sooner than it usually does."""


def busy(client: httpx.Client) -> int:
    """Turns that run or wait."""
    return sum(entry["running"] for entry in client.get("/v1/replicas").json()["data"])


def only_one(deployed: Deployed) -> set[str]:
    deployed.deploy(engines={"num_replicas": 1})
    wait_for(lambda: len(deployed.replicas()) == 1, "one replica is left")
    return set(deployed.replicas())


def test_of_sixty_four_streams_at_once_each_is_answered_or_told_before_its_first_byte_to_come_again(
    deployed: Deployed, client: httpx.Client
):
    """Two replicas of two lanes, where one more turn may wait."""
    idle = idle_sessions(client)
    readers, threads = read_all(
        client, [f"one-of-many-{number}" for number in range(STREAMS)], max_tokens=24, patient=True
    )
    check(client, readers, threads)
    refused = [told for reader in readers for told in reader.refused]
    assert {told["code"] for told in refused} == {"overloaded"} and len(refused) > STREAMS / 2
    assert len({reader.replicas[0] for reader in readers}) == 2
    wait_for(lambda: busy(client) == 0, "nothing is left of them")
    check_idle(client, idle, ())


def test_another_replica_takes_what_waits_and_disturbs_nobody(deployed: Deployed, client: httpx.Client):
    (before,) = only_one(deployed)
    idle = idle_sessions(client)
    readers, threads = read_all(client, ["long-0", "long-1"], max_tokens=LONGER)
    begun(readers)
    waiting, one = read_all(client, ["waiting"], max_tokens=100)
    wait_for(lambda: busy(client) == 3, "two lanes are taken, and one turn waits")
    late, more = read_all(client, [f"late-{number}" for number in range(3)], max_tokens=100, patient=True)
    wait_for(lambda: all(reader.refused for reader in late), "there is no room")
    deployed.deploy(engines={"num_replicas": 2})
    check(client, late, more)
    assert not any(reader.done for reader in readers), "it was not for a lane of the first replica that they waited"
    assert all(before not in reader.replicas for reader in late)
    check(client, waiting, one)
    check(client, readers, threads)
    assert not any(reader.resumed for reader in readers), "nothing but the number has changed"
    check_idle(client, idle, ())


def test_a_replica_comes_with_turns_that_wait(deployed: Deployed, client: httpx.Client):
    only_one(deployed)  # Serve begins with as many as there are
    deployed.deploy(engines={}, replicas=1, most_replicas=2)
    wait_for(lambda: len(deployed.replicas()) == 1, "one replica is left")
    idle = idle_sessions(client)
    readers, threads = read_all(client, [f"long-{number}" for number in range(3)], patient=True)
    wait_for(lambda: len(client.get("/v1/replicas").json()["data"]) == 2, "another replica serves")
    assert not all(reader.done for reader in readers), "it came while there was something to do"
    check(client, readers, threads)
    check_idle(client, idle, ())


def test_a_stream_outlives_all_replicas_that_there_were(deployed: Deployed, client: httpx.Client):
    """Other bounds replace all of them at once: where there is room for one, none is there for a while."""
    readers, threads = read_all(client, ["last"], max_tokens=800)
    begun(readers)
    deployed.deploy(engines={"autoscaling_config": SOON})
    wait_for(lambda: len(deployed.replicas()) == 1, "one replica is left")
    check(client, readers, threads)


def test_a_replica_goes_by_itself_when_there_is_less_to_do_and_leaves_its_sessions_and_streams(
    deployed: Deployed, client: httpx.Client
):
    deployed.deploy(engines={"autoscaling_config": SOON})
    wait_for(lambda: len(deployed.replicas()) == 1, "it begins with one")
    readers, threads = read_all(client, [f"many-{number}" for number in range(4)], patient=True)
    wait_for(lambda: len(client.get("/v1/replicas").json()["data"]) == 2, "another replica serves")
    idle = idle_sessions(client)
    check(client, readers, threads)
    both = set(deployed.replicas())
    assert len(both) == 2, "it goes while nothing is asked of it, not before"
    readers, threads = read_all(client, ["long"], max_tokens=LONGER)
    begun(readers)
    wait_for(lambda: len(deployed.replicas()) == 1, "one replica is left")
    assert set(deployed.replicas()) < both, "it is one of those that there were"
    assert not readers[0].done, "it went under a stream"
    check(client, readers, threads)
    check_idle(client, idle, both - set(deployed.replicas()))
