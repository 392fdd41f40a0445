"""The application deployed by its config on a cluster of three nodes, and clients that read long answers meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from deployment.cluster.names import remove
from deployment.event_ids import parse_event_id
from tests.e2e.cluster import FACT, QUESTION, chat, turn

APP = "deployed"
ROOT = Path(__file__).resolve().parents[2]
LONG: dict[str, Any] = {
    "temperature": 0.9, "top_k": 0, "top_p": 1.0, "seed": 5, "max_tokens": 1500, "ignore_eos": True, "stream": True,
}  # fmt: skip


class Deployed:
    """A head and two more nodes, each with room for one replica, and the application on them, by its config."""

    def __init__(self) -> None:
        self._args: dict[str, Any] = {
            "lanes": 2,
            "queue_turns": 1,
            "num_cpus": 0.6,
            "stream_grace_seconds": 1,
            "detach_seconds": 60,
            "durable": "none",
            "host_store_bytes": 64 << 20,
        }
        self._engines: dict[str, Any] = {"num_replicas": 2}
        self._release = "1"
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

    def deploy(self, *, release: str | None = None, engines: dict[str, Any] | None = None, **args: Any) -> None:
        """What is not given stays. `engines`: the options of their deployment, in place of those before. Returns when
        the application is as wanted, though replicas that are not may still be there."""
        self._args |= args
        self._engines = engines if engines is not None else self._engines
        self._release = release or self._release
        application = {
            "name": APP,
            "route_prefix": "/",
            "import_path": "deployment.app:build",
            "runtime_env": {"env_vars": {"RELEASE": self._release}},
            "args": self._args,
            "deployments": [{"name": "EngineReplica", **self._engines}],
        }
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self._port},
            "applications": [application],
        }
        serve_client: Any = _get_global_client()
        # Serve itself would wait for a minute, in which a busy machine does not start a replica.
        serve_client.deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)
        wait_for(lambda: serve.status().applications[APP].status == "RUNNING", "the application runs as it should")

    def replicas(self) -> dict[str, str | None]:
        """All engine replicas that have not ended, and their nodes, if they have one yet."""
        controller: Any = ray.get_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
        details: Any = ray.get(controller.get_serve_instance_details.remote())
        listed = details["applications"][APP]["deployments"]["EngineReplica"]["replicas"]
        return {entry["replica_id"]: entry.get("node_id") for entry in listed}

    def drain(self, node: str | None) -> None:
        assert node is not None
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self._cluster.address),
            *("--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
            *("--reason-message", "for a test", "--deadline-remaining-seconds", "300"),
        ]
        subprocess.run(command, check=True, capture_output=True)

    def shut_down(self) -> None:
        serve.shutdown()
        remove(APP)
        ray.shutdown()
        self._cluster.shutdown()


@contextlib.contextmanager
def deploying() -> Iterator[Deployed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        deployed = Deployed()
        try:
            deployed.deploy()
            yield deployed
        finally:
            deployed.shut_down()


@contextlib.contextmanager
def asking(deployed: Deployed) -> Iterator[httpx.Client]:
    """A client with a key of its own, whose sessions go with it: what a failed test left would fail the next one."""
    headers = {"authorization": f"Bearer {secrets.token_hex(8)}"}
    with httpx.Client(base_url=deployed.url, timeout=300, headers=headers) as client:
        yield client
        for session in client.get("/v1/sessions").json()["data"]:
            client.delete(f"/v1/sessions/{session['id']}")


@dataclass
class Reader:
    """Reads a session's long answer as our client would: where its connection ends with `resume`, it goes on there.
    One that is `patient` comes again when it is told to; `refused`: what it was told each time."""

    client: httpx.Client
    session: str
    max_tokens: int = LONG["max_tokens"]
    temperature: float = LONG["temperature"]
    patient: bool = False
    refused: list[dict[str, Any]] = field(default_factory=list)
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
            how = {**LONG, "max_tokens": self.max_tokens, "temperature": self.temperature}
            body = {"messages": [FACT], **how}
            request = self.client.build_request(
                "POST", "/v1/chat/completions", json=body, headers={"x-session-id": self.session}
            )
            while not self._read(request):
                if not self.ids:
                    continue
                self.resumed += 1
                path = f"/v1/sessions/{self.session}/turns/{parse_event_id(self.ids[-1], 'id').turn}/events"
                request = self.client.build_request("GET", path, params={"after": self.ids[-1]})
        except Exception as error:
            self.flaw = repr(error)

    def _read(self, request: httpx.Request) -> bool:
        """Whether the answer is over. False: it goes on over another connection."""
        response = self.client.send(request, stream=True)
        try:
            if response.status_code == 429 and self.patient:
                self.refused.append(json.loads(response.read())["error"])
                time.sleep(float(response.headers["retry-after"]) * random.uniform(0.5, 1.5))
                return False
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


def read_all(client: httpx.Client, names: list[str], **how: Any) -> tuple[list[Reader], list[threading.Thread]]:
    """`how`: more of each Reader."""
    readers = [Reader(client, name, **how) for name in names]
    return readers, [reader.start() for reader in readers]


def check(client: httpx.Client, readers: list[Reader], threads: list[threading.Thread]) -> None:
    """Every answer is whole, and says what its session says; equal seeds said the same."""
    for thread in threads:
        thread.join(300)
    assert [reader.flaw for reader in readers] == [None] * len(readers)
    for reader in readers:
        known = client.get(f"/v1/sessions/{reader.session}").json()
        assert reader.done and known["transcript"][-1]["content"] == reader.text
        positions = [parse_event_id(place, "id").position for place in reader.ids]
        assert positions == sorted(positions) and positions[-1] - positions[0] == reader.max_tokens
    assert len({reader.text for reader in readers}) == 1


def wait_for(true: Any, what: object, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def begun(readers: list[Reader]) -> None:
    wait_for(lambda: all(len(reader.ids) > 3 or reader.flaw for reader in readers), "all answers have begun")


def idle_sessions(client: httpx.Client) -> list[str]:
    names = [f"idle-{number}" for number in range(3)]
    for name in names:
        chat(client, [FACT], name)
    return names


def check_idle(client: httpx.Client, names: list[str], gone: Collection[str]) -> None:
    for name in names:
        answer = turn(client, name, QUESTION)
        assert answer["session"]["hit"] != "none" and answer["session"]["reused"] > 0
        assert answer["meta_info"]["replica"] not in gone
