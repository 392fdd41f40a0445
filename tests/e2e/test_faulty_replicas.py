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
from ray import serve

from deployment import local
from deployment.local import LaunchError, _cause
from deployment.settings import AppArgs
from model import DEMO
from tests.e2e.cluster import COUNT, FACT, QUESTION, chat, keyed, replicas, text, turn, two_replicas, wait_for_two

# A cluster of its own each.
pytestmark = pytest.mark.soak

LONG = {"max_tokens": 80, "ignore_eos": True}


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
        reader.join(180)
        assert answers and answers[0].status_code == 200, "the turn goes on in another replica"
        assert answers[0].json()["usage"]["completion_tokens"] == LONG["max_tokens"]
        answer = turn(client, "idle", QUESTION)
        assert "4172" in text(answer) and answer["meta_info"]["replica"] != struck
        wait_for_two(client, without=struck, seconds=180)
        assert not Path(f"/proc/{engine}").exists(), "a stopped engine goes with its replica"


def test_a_checkpoint_that_cannot_be_loaded_is_named_to_who_deploys_and_in_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target = tmp_path / "target"
    shutil.copytree(DEMO / "target", target)
    (target / "model.safetensors").write_bytes(secrets.token_bytes(100))
    said: list[str] = []

    def cause(app: str) -> str:
        """Before the application that failed is taken down again."""
        said.extend(one.message for one in serve.status().applications[app].deployments.values())
        return _cause(app)

    monkeypatch.setattr(local, "_cause", cause)
    args = AppArgs(model=target, draft=DEMO / "dflash2", replicas=1, durable=None)
    with pytest.raises(LaunchError, match=r"did not start: .*model\.safetensors"), two_replicas(args):
        raise AssertionError("it must not start")
    assert any("ModelError" in message and "model.safetensors" in message for message in said)
