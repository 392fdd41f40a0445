"""For how long does a client wait when the replica, or the node, that runs its turn is killed?

    python -m bench.failover [--replicas 20] [--nodes 6] [--directories 10] [--output FILE]

A head and two nodes on loopback with a replica of the demo model each. One answer at a time is streamed; in its middle
its owner's process is killed with SIGKILL, or its whole node is. Every answer must be the undisturbed one. The next
kill waits until all parts are there again.

Seconds are from the kill to the next token at the client, prefill included. Of a node's death the cluster knows after
its health checks (here 2 to 4 s, as `tests/e2e/chaos/nodes.py` sets them); `after_verdict`: from the moment when Ray
said so, or from the end of the owner's lease if that was earlier.

Of a killed directory: to the first new session, which no replica gets before the directory has heard every store, and
to the first time that it says where a session is. It must say so rightly, or "wait".
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import secrets
import signal
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from bench.facts import commit
from bench.gpu import write_results
from deployment.api_keys import any_key
from deployment.ownership.liveness import LEASE_SECONDS, LEASE_SLACK
from deployment.ownership.messages import Placed, Wait
from deployment.ownership.words import SessionKey
from tests.e2e.chaos.nodes import Nodes, cluster_of, process_of, replicas, until
from tests.e2e.chaos.reading import Answer, asked, take

SETTLE_SECONDS = 3.0
"""After the last part has come back: what was started with it comes to rest."""

BEFORE_KILL = 12
"""Chunks that are read first."""

DYING_SECONDS = 0.05
"""Nobody answers any more so long after SIGKILL."""

ASK_SECONDS = 1.0
"""For how long the directory is waited for, before it is asked again."""

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Count from 3 in steps of 2, 12 numbers."}],
    "temperature": 0.9, "top_k": 0, "top_p": 1.0, "seed": 5, "max_tokens": 400, "ignore_eos": True,
}  # fmt: skip


@dataclass(frozen=True)
class Gap:
    """Seconds from the kill to the next token, to the word that the node is dead (None: there was none before the next
    token), and how many tokens the answer's owners prefilled in all."""

    to_token: float
    to_verdict: float | None
    prefilled: int

    @property
    def after_verdict(self) -> float:
        known = LEASE_SECONDS + LEASE_SLACK
        return self.to_token - min(known, self.to_verdict if self.to_verdict is not None else known)


@dataclass(frozen=True)
class Rebuilt:
    """Seconds from the directory's kill to a new session, and to the word where an older one is."""

    to_grant: float
    to_locate: float


class Failovers:
    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        key = secrets.token_hex(8)
        self._tenant = any_key(key)
        self._client = httpx.Client(base_url=nodes.url, timeout=40, headers={"authorization": f"Bearer {key}"})
        self._usual = self._stream(lambda owner: None, BEFORE_KILL)[0].text

    def of_replicas(self, kills: int) -> list[Gap]:
        return [self._gap(lambda owner: os.kill(owner["pid"], signal.SIGKILL)) for _ in range(kills)]

    def of_nodes(self, kills: int) -> list[Gap]:
        gaps: list[Gap] = []
        for _ in range(kills):
            gaps.append(self._gap(lambda owner: self._nodes.remove(owner["node"])))
            self._nodes.add()
        return gaps

    def of_directories(self, kills: int) -> list[Rebuilt]:
        return [self._rebuilt() for _ in range(kills)]

    def _rebuilt(self) -> Rebuilt:
        until(self._whole, "all parts are there")
        time.sleep(SETTLE_SECONDS)
        known = SessionKey(self._tenant, self._created())
        directory = self._nodes.directory()
        before = _located(directory, known)
        if not isinstance(before, Placed) or before.owner is None:
            raise AssertionError(f"{known} is not where it was created: {before}")
        process = process_of(directory)
        with ThreadPoolExecutor(1) as pool:
            os.kill(process, signal.SIGKILL)
            killed = time.monotonic()
            granted = pool.submit(lambda: (self._created(), time.monotonic())[1])
            time.sleep(DYING_SECONDS)
            while not isinstance(placed := _located(directory, known), Placed):
                time.sleep(0.02)
            to_locate = time.monotonic() - killed
            if (placed.owner, placed.members) != (before.owner, before.members):
                raise AssertionError(f"{known}: {placed}, which before the kill was {before}")
            return Rebuilt(granted.result() - killed, to_locate)

    def _created(self) -> str:
        return asked(self._client, "POST", "/v1/sessions", json={}).json()["id"]

    def _gap(self, kill: Callable[[dict[str, Any]], None]) -> Gap:
        until(self._whole, "all parts are there")
        time.sleep(SETTLE_SECONDS)
        answer, killed, verdict = self._stream(kill, BEFORE_KILL)
        if answer.text != self._usual:
            raise AssertionError(f"{answer.text!r} is not {self._usual!r}")
        times = [event.at for event in answer.events]
        # What was under way when its sender died still comes: the token that was waited for ends the longest gap.
        _, after = max((end - begin, end) for begin, end in itertools.pairwise(times) if end > killed)
        return Gap(after - killed, verdict - killed if verdict is not None else None, answer.prefilled)

    def _stream(self, kill: Callable[[dict[str, Any]], None], chunks: int) -> tuple[Answer, float, float | None]:
        """The answer, and when its owner was killed and known to be dead, on the monotonic clock."""
        answer, session = Answer(), f"s-{secrets.token_hex(4)}"
        reading = threading.Thread(
            target=take, args=(self._client, "/v1/chat/completions", session, BODY, secrets.token_hex(8), answer)
        )
        listed = replicas(self._nodes.url)
        dead_before = _dead()
        reading.start()
        until(lambda: len(answer.events) >= chunks, "the answer has begun", 30)
        killed = time.monotonic()
        if answer.replica in listed:
            kill(listed[answer.replica])
        verdict: float | None = None
        while reading.is_alive():
            if verdict is None and _dead() - dead_before:
                verdict = time.monotonic()
            reading.join(0.02)
        with contextlib.suppress(httpx.TransportError):
            asked(self._client, "DELETE", f"/v1/sessions/{session}", known=("session_not_found",))
        return answer, killed, verdict

    def _whole(self) -> bool:
        if len(replicas(self._nodes.url)) < self._nodes.count:
            return False
        with contextlib.suppress(RayError, ValueError, TimeoutError):
            return all(process_of(self._nodes.host_store(node)) for node in self._nodes.ids)
        return False


def _located(directory: Any, key: SessionKey) -> Placed | Wait | None:
    """Wait, too, while the directory is being started. AssertionError if it takes the session for an unknown one."""
    try:
        placed: Any = ray.get(directory.locate.remote(key), timeout=ASK_SECONDS)
    except (RayActorError, GetTimeoutError):
        return Wait(key, 0.0)
    if placed is None:
        raise AssertionError(f"{key} is not found")
    return placed


def _dead() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}


def summary(seconds: list[float]) -> dict[str, Any]:
    p50, p99 = np.percentile(seconds, [50, 99])
    return {
        "kills": len(seconds),
        "p50_s": round(float(p50), 3),
        "p99_s": round(float(p99), 3),
        "most_s": round(max(seconds), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--directories", type=int, default=10)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with cluster_of(2) as nodes:
        failovers = Failovers(nodes)
        of_replicas = failovers.of_replicas(args.replicas)
        # One fault at a time: within a minute of a store's end a new directory waits before it begins new sessions.
        of_directories = failovers.of_directories(args.directories)
        of_nodes = failovers.of_nodes(args.nodes)
    counts = f"--replicas {args.replicas} --nodes {args.nodes} --directories {args.directories}"
    facts = {
        "command": f"python -m bench.failover {counts}",
        "commit": commit(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "prefilled_tokens": round(statistics.median(gap.prefilled for gap in of_replicas + of_nodes)),
    }
    measured = {
        ("replica", "kill", "token"): [gap.to_token for gap in of_replicas],
        ("node", "kill", "token"): [gap.to_token for gap in of_nodes],
        ("node", "verdict", "token"): [gap.after_verdict for gap in of_nodes],
        ("directory", "kill", "grant"): [rebuilt.to_grant for rebuilt in of_directories],
        ("directory", "kill", "locate"): [rebuilt.to_locate for rebuilt in of_directories],
    }
    rows = [
        {"killed": who, "from": since, "to": what, **summary(took)}
        for (who, since, what), took in measured.items()
        if took
    ]
    for found in rows:
        print(found)
    if args.output:
        write_results(args.output, facts, rows)


if __name__ == "__main__":
    main()
