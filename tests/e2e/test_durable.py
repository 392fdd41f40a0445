"""A cluster that is gone, and a new one that finds its sessions in the durable tier."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import httpx

from deployment.engine.durability import open_tier
from deployment.local import APP, resumed
from deployment.settings import AppArgs
from tests.e2e.cluster import COUNT, FACT, QUESTION, chat, text, turn, two_replicas


def test_a_new_cluster_goes_on_where_the_old_one_ended_and_a_deleted_session_stays_deleted(tmp_path: Path):
    args, place = AppArgs(host_store_bytes=32 << 20), f"{tmp_path}/dflash-serve/{APP}"
    headers = {"authorization": f"Bearer {secrets.token_hex(8)}"}
    with two_replicas(args, tmp_path) as url, httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        assert resumed(APP) == (0, place)
        chat(client, [FACT], "kept")
        chat(client, [FACT], "deleted")
        assert client.delete("/v1/sessions/deleted").status_code == 200
        chat(client, [COUNT], "moved")
        wait_for(lambda: {found.key.session for found in open_tier(place, 0).sessions()} == {"kept", "moved"})
        before = client.get("/v1/sessions/kept").json()
    with two_replicas(args, tmp_path) as url, httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        assert resumed(APP) == (2, place)
        assert client.get("/v1/sessions/deleted").status_code == 404
        with httpx.Client(base_url=url, headers={"authorization": "Bearer another"}, timeout=60) as stranger:
            assert stranger.get("/v1/sessions/kept").status_code == 404
        assert {entry["id"] for entry in client.get("/v1/sessions").json()["data"]} == {"kept", "moved"}
        answer = turn(client, "kept", QUESTION)
        assert "4172" in text(answer), answer
        assert (answer["session"]["hit"], answer["session"]["reused"]) == ("disk", before["frontier"])
        after = client.get("/v1/sessions/kept").json()
        assert after["transcript"][:2] == before["transcript"] and len(after["turns"]) == 2
        assert int(after["epoch"].split(".")[0]) > int(before["epoch"].split(".")[0])


def wait_for(true: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)
