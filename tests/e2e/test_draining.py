"""Replicas and nodes that go because somebody wants them to: no stream loses or repeats a token, no session its state."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from deployment.cluster.names import remove
from deployment.event_ids import digest_of, parse_event_id
from tests.e2e.cluster import FACT, QUESTION, chat, turn

APP = "draining"
ROOT = Path(__file__).resolve().parents[2]
LONG: dict[str, Any] = {
    "temperature": 0.9, "top_k": 0, "top_p": 1.0, "seed": 5, "max_tokens": 1500, "ignore_eos": True, "stream": True,
}  # fmt: skip


class Deployed:
    """A head and two more nodes, each with room for one replica, and the application on them, by its config."""

    def __init__(self) -> None:
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20},
        )
        for _ in range(2):
            self._cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        ray.init(address=self._cluster.address, log_to_driver=False)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": self._port})
        self.lanes = 4

    def deploy(self, *, lanes: int, replicas: int) -> None:
        """Returns when the application is as wanted, though the replicas that are not may still be there."""
        application = {
            "name": APP,
            "route_prefix": "/",
            "import_path": "deployment.app:build",
            "args": {
                "lanes": lanes,
                "num_cpus": 0.6,
                "stream_grace_seconds": 1,
                "detach_seconds": 60,
                "host_store_bytes": 64 << 20,
            },
            "deployments": [{"name": "EngineReplica", "num_replicas": replicas}],
        }
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self._port},
            "applications": [application],
        }
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=True)

    def replicas(self) -> dict[str, str]:
        """Those that are to stay, and their nodes."""
        controller: Any = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        details = ray.get(controller.get_serve_instance_details.remote())
        listed = details["applications"][APP]["deployments"]["EngineReplica"]["replicas"]
        return {entry["replica_id"]: entry["node_id"] for entry in listed if str(entry["state"].value) == "RUNNING"}

    def all_replicas(self) -> set[str]:
        controller: Any = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        details = ray.get(controller.get_serve_instance_details.remote())
        return {r["replica_id"] for r in details["applications"][APP]["deployments"]["EngineReplica"]["replicas"]}

    def shut_down(self) -> None:
        serve.shutdown()
        remove(APP)
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        deployed = Deployed()
        try:
            deployed.deploy(lanes=4, replicas=2)
            yield deployed
        finally:
            deployed.shut_down()


@pytest.fixture
def client(deployed: Deployed) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {secrets.token_hex(8)}"}
    with httpx.Client(base_url=deployed.url, timeout=60, headers=headers) as client:
        yield client


@dataclass
class Reader:
    """Reads a session's long answer as our client would: where its connection ends with `resume`, it goes on there."""

    client: httpx.Client
    session: str
    ids: list[str] = field(default_factory=list)
    text: str = ""
    replicas: list[str] = field(default_factory=list)
    resumed: int = 0
    done: bool = False
    flaw: str | None = None

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run)
        thread.start()
        return thread

    def _run(self) -> None:
        try:
            body = {"messages": [FACT], **LONG}
            request = self.client.build_request(
                "POST", "/v1/chat/completions", json=body, headers={"x-session-id": self.session}
            )
            while not self._read(request):
                self.resumed += 1
                path = f"/v1/sessions/{self.session}/turns/{parse_event_id(self.ids[-1], 'id').turn}/events"
                request = self.client.build_request("GET", path, params={"after": self.ids[-1]})
        except Exception as error:
            self.flaw = repr(error)

    def _read(self, request: httpx.Request) -> bool:
        """Whether the answer is over. False: it goes on over another connection."""
        response = self.client.send(request, stream=True)
        try:
            if response.status_code != 200:
                raise AssertionError(f"{response.status_code} {response.read()!r}")
            self.replicas.append(response.headers["x-replica"])
            name, place = "message", ""
            for line in response.iter_lines():
                kind, _, data = line.partition(": ")
                if kind == "event":
                    name = data
                elif kind == "id":
                    place = data
                elif kind == "data" and name == "resume":
                    told = json.loads(data)
                    assert told["session"] == self.session and told["after"] == self.ids[-1] == place
                    return False
                elif kind == "data" and data == "[DONE]":
                    self.done = True
                    return True
                elif kind == "data":
                    document = json.loads(data)
                    if "error" in document:
                        raise AssertionError(document)
                    self.ids.append(place)
                    self.text += "".join(choice["delta"].get("content", "") for choice in document["choices"])
            raise AssertionError("the connection ended without a word")
        finally:
            response.close()


def read_all(client: httpx.Client, names: list[str]) -> tuple[list[Reader], list[threading.Thread]]:
    readers = [Reader(client, name) for name in names]
    return readers, [reader.start() for reader in readers]


def check(client: httpx.Client, readers: list[Reader], threads: list[threading.Thread]) -> None:
    """Every answer is whole, and says what its session says; equal seeds said the same."""
    for thread in threads:
        thread.join(60)
    assert [reader.flaw for reader in readers] == [None] * len(readers)
    for reader in readers:
        known = client.get(f"/v1/sessions/{reader.session}").json()
        assert reader.done and known["transcript"][-1]["content"] == reader.text
        positions = [parse_event_id(place, "id").position for place in reader.ids]
        assert positions == sorted(positions) and positions[-1] - positions[0] == LONG["max_tokens"]
    assert len({reader.text for reader in readers}) == 1


def wait_for(true: Any, what: str, seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def begun(readers: list[Reader]) -> None:
    wait_for(lambda: all(len(reader.ids) > 3 or reader.flaw for reader in readers), "all answers have begun")


def test_a_changed_config_replaces_replicas_and_ingress_under_streams(deployed: Deployed, client: httpx.Client):
    for number in range(3):
        chat(client, [FACT], f"idle-{number}")
    old = deployed.replicas()
    readers, threads = read_all(client, [f"long-{number}" for number in range(3)])
    begun(readers)
    began = time.monotonic()
    deployed.deploy(lanes=3, replicas=2)
    print(f"deployed after {time.monotonic() - began:.1f} s")
    check(client, readers, threads)
    print(f"streams over after {time.monotonic() - began:.1f} s", [(r.resumed, r.replicas) for r in readers])
    wait_for(lambda: not deployed.all_replicas() & set(old), "the old replicas are gone")
    print(f"old ones gone after {time.monotonic() - began:.1f} s")
    assert sum(reader.resumed for reader in readers) >= 1, "the ingress was replaced while they read"
    for number in range(3):
        answer = turn(client, f"idle-{number}", QUESTION)
        assert answer["session"]["hit"] != "none" and answer["meta_info"]["replica"] not in old
