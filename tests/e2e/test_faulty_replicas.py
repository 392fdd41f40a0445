"""A replica that cannot load says why, and one whose engine is stuck is replaced."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve

from deployment.local import LaunchError
from deployment.settings import AppArgs
from model import DEMO
from tests.e2e.cluster import COUNT, FACT, QUESTION, chat, keyed, replicas, text, turn, two_replicas, wait_for_two

# A cluster of its own each.
pytestmark = pytest.mark.soak

LONG = {"max_tokens": 400, "ignore_eos": True}


def engine_of(replica: int) -> int:
    """The process of a replica's engine."""
    (engine,) = (
        int(child)
        for children in Path(f"/proc/{replica}/task").glob("*/children")
        for child in children.read_text().split()
        if b"deployment.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    return engine


def test_a_stuck_engine_is_replaced_and_its_turn_and_sessions_go_on_elsewhere():
    args = AppArgs(own_process=True, stuck_seconds=4, durable=None)
    with two_replicas(args) as url, keyed(url) as client:
        assert text(chat(client, [FACT], "idle"))
        struck = client.get("/v1/sessions/idle").json()["replica"]
        names = iter(f"busy-{number}" for number in range(100))
        busy = next(name for name in names if chat(client, [COUNT], name)["meta_info"]["replica"] == struck)
        answers: list[httpx.Response] = []
        body = {"messages": [FACT], **LONG}
        reader = threading.Thread(
            target=lambda: answers.append(client.post(f"/v1/sessions/{busy}/turns", json=body, timeout=300))
        )
        reader.start()
        while client.get(f"/v1/sessions/{busy}").json()["running"] is None:
            time.sleep(0.05)
        engine = engine_of(replicas(client)[struck])
        os.kill(engine, signal.SIGSTOP)
        wait_for_two(client, without=struck)
        reader.join(120)
        assert answers and answers[0].status_code == 200, "the turn goes on in another replica"
        assert answers[0].json()["usage"]["completion_tokens"] == LONG["max_tokens"]
        answer = turn(client, "idle", QUESTION)
        assert "4172" in text(answer) and answer["meta_info"]["replica"] != struck
        assert not Path(f"/proc/{engine}").exists(), "a stopped engine goes with its replica"


def test_a_checkpoint_that_cannot_be_loaded_is_named_to_who_deploys_and_in_the_status(tmp_path: Path):
    target = tmp_path / "target"
    shutil.copytree(DEMO / "target", target)
    (target / "model.safetensors").write_bytes(secrets.token_bytes(100))
    said: list[str] = []

    def look() -> None:
        deadline = time.monotonic() + 60
        while not said and time.monotonic() < deadline:
            time.sleep(0.2)
            if not ray.is_initialized():  # Serve's client would start one
                continue
            try:
                deployments = serve.status().applications["dflash"].deployments
                said.extend(one.message for one in deployments.values() if "safetensors" in one.message)
            except Exception:  # Serve is not up yet, or no longer
                continue

    watcher = threading.Thread(target=look)
    watcher.start()
    args = AppArgs(model=target, draft=DEMO / "dflash2", replicas=1, durable=None)
    with pytest.raises(LaunchError, match=r"did not start: .*model\.safetensors"), two_replicas(args):
        raise AssertionError("it must not start")
    watcher.join()
    assert said and "ModelError" in said[0]
