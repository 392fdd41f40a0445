"""A Ray cluster on loopback whose nodes may die: a head without replicas, and nodes with one replica each."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster as RayCluster

from deployment.app import application
from deployment.cluster.names import directory_name, named_actor, remove, store_name, versioned
from deployment.settings import AppArgs
from state.arena_file import SHARED_MEMORY, arena_path
from tests.e2e.chaos.salted import SaltedReplica

ROOT = Path(__file__).parents[3]
OBJECT_STORE_BYTES = 100 << 20
HOST_STORE_BYTES = 256 << 20
READY_SECONDS = 90.0

FAST_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 4,
}
"""A dead node is known as such within 4 seconds, not 64."""


class Nodes:
    """`url`: where the application answers."""

    def __init__(self, count: int) -> None:
        self.app = f"chaos-{secrets.token_hex(4)}"
        self._cluster = RayCluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": FAST_CHECKS,
                            "object_store_memory": OBJECT_STORE_BYTES},
        )  # fmt: skip
        self._nodes: dict[str, Any] = {}
        self.count = count
        for _ in range(count):
            self.add()
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        # A node has room for one replica, the head for none.
        args = AppArgs(replicas=count, num_cpus=0.6, host_store_bytes=HOST_STORE_BYTES, durable=None)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(application(args, SaltedReplica), name=self.app, route_prefix="/")

    def add(self) -> None:
        node = self._cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
        self._nodes[node.node_id] = node

    def remove(self, node: str) -> None:
        """Kills a node's processes. Nodes on loopback share /dev/shm: what a real one would take with it goes by
        hand."""
        self._cluster.remove_node(self._nodes.pop(node), allow_graceful=False)
        arena_path(SHARED_MEMORY, versioned(self.app), node).unlink(missing_ok=True)

    @property
    def ids(self) -> list[str]:
        return list(self._nodes)

    def directory(self) -> Any:
        return named_actor(directory_name(self.app))

    def host_store(self, node: str) -> Any:
        return named_actor(store_name(self.app, node))

    def ingress(self) -> Any:
        actors: list[Any] = ray.util.list_named_actors(all_namespaces=True)
        names = [actor["name"] for actor in actors if actor["name"].startswith(f"SERVE_REPLICA::{self.app}#Ingress#")]
        return ray.get_actor(names[-1], namespace="serve")

    def shut_down(self) -> None:
        with contextlib.suppress(Exception):  # what is left goes down with the cluster
            serve.delete(self.app)
            remove(self.app)
        nodes = self.ids
        ray.shutdown()
        self._cluster.shutdown()
        for node in nodes:
            arena_path(SHARED_MEMORY, versioned(self.app), node).unlink(missing_ok=True)


@contextlib.contextmanager
def cluster_of(nodes: int) -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        # Replicas run what they run in production, not Triton's interpreter, and leave no token in the home directory.
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        mask = os.umask(0o077)
        cluster = Nodes(nodes)
        try:
            yield cluster
        finally:
            os.umask(mask)
            cluster.shut_down()


def process_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=20)


def replicas(url: str) -> dict[str, dict[str, Any]]:
    """Those that answer, by id; none while the ingress or a replica is being replaced."""
    with contextlib.suppress(httpx.TransportError):
        response = httpx.get(f"{url}/v1/replicas", timeout=15)
        if response.status_code == 200:
            return {entry["id"]: entry for entry in response.json()["data"]}
    return {}


def until(holds: Any, what: str, seconds: float = READY_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not so within {seconds:.0f} s")
        time.sleep(0.2)
