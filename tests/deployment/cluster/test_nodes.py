"""Three nodes on loopback: copies lie on two of them, and one of them may die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployment.cluster.names import GcsValues, directory_name, named_actor, remove, versioned
from deployment.cluster.transport import start_directory
from deployment.ownership.liveness import SILENT_SECONDS
from deployment.ownership.registry import Registry
from deployment.ownership.words import SessionKey
from state.arena_file import arena_path
from tests.deployment.cluster.replicas import APP, Replica

FAST_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 4,
}


class Nodes:
    """A head and two more nodes, with a replica on each of the two."""

    def __init__(self, shared_memory: Path) -> None:
        self.shared_memory = shared_memory
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": FAST_CHECKS,
                            "object_store_memory": 80 << 20},
        )  # fmt: skip
        self._nodes: dict[str, Any] = {}
        ray.init(address=self._cluster.address, log_to_driver=False)
        start_directory(APP)

    def add(self) -> tuple[str, Any]:
        """A node and a replica on it."""
        node = self._cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        self._nodes[node.node_id] = node
        pinned = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        replica = Replica.options(scheduling_strategy=pinned).remote(f"on-{node.node_id[:8]}", self.shared_memory)
        assert ray.get(replica.start.remote()) == node.node_id
        return node.node_id, replica

    def kill(self, node: str) -> None:
        """Nodes on loopback share /dev/shm: what a real one would take with it goes by hand."""
        self._cluster.remove_node(self._nodes.pop(node), allow_graceful=False)
        arena_path(self.shared_memory, versioned(APP), node).unlink()

    def shut_down(self) -> None:
        remove(APP)
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        cluster = Nodes(tmp_path_factory.mktemp("shm"))
        yield cluster
        cluster.shut_down()


def test_a_session_has_copies_on_two_nodes_and_outlives_that_of_its_owner(nodes: Nodes):
    (first, one), (second, two) = nodes.add(), nodes.add()
    session = SessionKey("a" * 64, "s")
    assert ray.get(one.take.remote(session)) == ()
    ray.get(one.begin.remote(session))
    assert ray.get(one.publish.remote(session, (5, 6))) is None
    assert set(until(lambda: ray.get(one.members.remote(session)), lambda members: len(members) == 2)) == {
        first,
        second,
    }

    nodes.kill(first)
    began = time.monotonic()
    assert until(lambda: ray.get(two.take.remote(session)), lambda answer: not isinstance(answer, str)) == (5, 6)
    print(f"taken over {time.monotonic() - began:.1f} s after the node's death")
    assert ray.get(two.publish.remote(session, (7,))) is None
    assert ray.get(two.members.remote(session)) == (second,)

    third, three = nodes.add()
    members = until(lambda: ray.get(two.members.remote(session)), lambda members: len(members) == 2)
    assert set(members) == {second, third}
    nodes.kill(second)
    assert until(lambda: ray.get(three.take.remote(session)), lambda answer: not isinstance(answer, str)) == (5, 6, 7)


@pytest.mark.soak
def test_a_directory_that_stands_still_takes_no_store_for_silent(nodes: Nodes):
    """As without actors in `tests/ownership`."""
    nodes.add()
    nodes.add()
    registry = Registry(GcsValues(), versioned(APP))
    void = registry.void()
    process: Any = ray.get(named_actor(directory_name(APP)).__ray_call__.remote(lambda _: os.getpid()))
    os.kill(process, signal.SIGSTOP)
    heard_first = named_actor(directory_name(APP)).tell.remote([])
    time.sleep(SILENT_SECONDS + 2)
    os.kill(process, signal.SIGCONT)
    ray.get(heard_first)
    time.sleep(1.0)
    assert registry.void() == void


def until(ask: Any, enough: Any, seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not enough(answer := ask()):
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)
    return answer
