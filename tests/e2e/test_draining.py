"""Replicas and nodes that go because somebody wants it: no stream loses or repeats a token, no session its state."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import FACT, GREEDY, QUESTION, chat, text, turn
from tests.e2e.deployed import (
    Deployed,
    Reader,
    begun,
    check,
    check_idle,
    idle_sessions,
    read_all,
    wait_for,
)

# Minutes of deploys and drains.
pytestmark = pytest.mark.soak


def test_a_session_whose_replica_is_full_goes_where_there_is_room(deployed: Deployed, client: httpx.Client):
    by_replica: dict[str, list[str]] = defaultdict(list)
    while max(map(len, by_replica.values()), default=0) < 4:
        name = f"full-{sum(map(len, by_replica.values()))}"
        by_replica[chat(client, [FACT], name, max_tokens=8)["meta_info"]["replica"]].append(name)
    full, (asked, *others) = max(by_replica.items(), key=lambda entry: len(entry[1]))

    def running() -> int:
        by_id = {entry["id"]: entry["running"] for entry in client.get("/v1/replicas").json()["data"]}
        seen.append((by_id, [(len(reader.ids), reader.replicas, reader.flaw) for reader in readers]))
        return by_id[full]

    seen: list[Any] = []
    readers: list[Reader] = []
    wait_for(lambda: running() == 0, "all that was asked before is over")
    readers, threads = read_all(client, others[:2])
    begun(readers)
    for reader, thread in zip(*read_all(client, others[2:3]), strict=True):
        readers.append(reader)
        threads.append(thread)
    wait_for(lambda: running() == 3, ("two lanes are taken, and one turn waits", full, seen))
    answer = turn_where_there_is_room(client, asked)
    assert not any(reader.done for reader in readers), "it was not for a lane of its own replica that it waited"
    assert answer["meta_info"]["replica"] != full and answer["session"]["hit"] in ("host", "peer")
    check(client, readers, threads)


def turn_where_there_is_room(client: httpx.Client, session: str) -> Any:
    """A replica that has not told for three seconds how many lanes it has free is taken for one without: on a machine
    that is busy with other things a client is asked to come again."""
    refused: list[httpx.Response] = []
    while True:
        body = {"messages": [QUESTION], **GREEDY}
        response = client.post(f"/v1/sessions/{session}/turns", json=body)
        if response.status_code != 429:
            assert response.status_code == 200, response.text
            return response.json()
        refused.append(response)
        assert response.headers["retry-after"] and len(refused) < 30, response.text
        time.sleep(0.5)


@pytest.mark.parametrize("change", [{"lanes": 3}, {"release": "2"}], ids=["another setting", "new code alone"])
def test_a_changed_config_replaces_replicas_and_ingress_under_streams(
    deployed: Deployed, client: httpx.Client, change: dict[str, Any]
):
    idle = idle_sessions(client)
    old = deployed.replicas()
    readers, threads = read_all(client, [f"long-{number}" for number in range(3)])
    begun(readers)
    deployed.deploy(**change)
    check(client, readers, threads)
    assert sum(reader.resumed for reader in readers) >= 1, "the ingress was replaced while they read"
    wait_for(lambda: not set(deployed.replicas()) & set(old), "the old replicas are gone")
    check_idle(client, idle, old)


def test_another_drafter_goes_on_with_turns_and_sessions_from_their_tokens(deployed: Deployed, client: httpx.Client):
    """Greedily, since what is drawn otherwise follows from what was drafted."""
    idle = idle_sessions(client)
    old = deployed.replicas()
    readers, threads = read_all(client, [f"long-{number}" for number in range(3)], temperature=0.0)
    begun(readers)
    deployed.deploy(backend="dflash")
    check(client, readers, threads)
    wait_for(lambda: not set(deployed.replicas()) & set(old), "the old replicas are gone")
    for name in idle:
        answer = turn(client, name, QUESTION)
        assert (answer["session"]["hit"], answer["session"]["reused"]) == ("none", 0), "the other drafter's state"
        assert "4172" in text(answer) and answer["meta_info"]["replica"] not in old
    check_idle(client, idle, old)


def test_fewer_replicas_lose_no_session_and_no_stream(deployed: Deployed, client: httpx.Client):
    idle = idle_sessions(client)
    before = deployed.replicas()
    readers, threads = read_all(client, [f"long-{number}" for number in range(3)])
    begun(readers)
    deployed.deploy(engines={"num_replicas": 1})
    check(client, readers, threads)
    assert not any(reader.resumed for reader in readers), "nothing but the number has changed"
    wait_for(lambda: len(deployed.replicas()) == 1, "one replica is left")
    check_idle(client, idle, set(before) - set(deployed.replicas()))


def test_a_drained_node_gives_its_sessions_away_before_it_goes(deployed: Deployed, client: httpx.Client):
    deployed.deploy(engines={"num_replicas": 1})  # so that another one has room
    wait_for(lambda: len(deployed.replicas()) == 1, "one replica is left")
    idle = idle_sessions(client)
    before = deployed.replicas()
    readers, threads = read_all(client, ["long"])
    begun(readers)
    for node in before.values():
        deployed.drain(node)
    wait_for(lambda: not set(deployed.replicas()) & set(before), "the node's replica was replaced")
    check(client, readers, threads)
    check_idle(client, idle, before)
