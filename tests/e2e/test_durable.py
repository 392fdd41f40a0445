"""A cluster that is gone, and a new one that finds its sessions in the durable tier: encrypted, by HTTPS, with keys."""

from __future__ import annotations

import contextlib
import secrets
import ssl
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployment.engine.durability import open_tier
from deployment.local import APP, resumed
from deployment.settings import AppArgs
from deployment.tls import Tls
from tests.deployment.certificates import written
from tests.e2e.cluster import COUNT, FACT, QUESTION, chat, text, turn, two_replicas

KEY_ENV = "THE_DURABLE_KEY"
ALICE, BOB = secrets.token_hex(16), secrets.token_hex(16)


class Place:
    """Where a cluster's sessions outlive it, and what it shows and asks for."""

    def __init__(self, state: Path) -> None:
        self.durable = f"{state}/dflash-serve/{APP}"
        keys = state / "keys"
        keys.touch(0o600)
        keys.write_text(f"alice {ALICE}\nbob {BOB}\n")
        files = written(state)
        self._state, self._tls = state, Tls.of(files.certificate, files.key)
        self._trusted = ssl.create_default_context(cafile=files.certificate)
        self._args = AppArgs(
            durable_key_env=KEY_ENV, api_keys=keys, host_store_bytes=32 << 20, tenant_state_bytes=16 << 20
        )

    def cluster(self) -> contextlib.AbstractContextManager[str]:
        return two_replicas(self._args, self._state, self._tls)

    def client(self, url: str, key: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=url, headers=headers, timeout=60, verify=self._trusted)

    @property
    def sessions(self) -> set[str]:
        return {found.key.session for found in open_tier(self.durable, 0, KEY_ENV).sessions()}


def test_a_new_cluster_goes_on_where_the_old_one_ended_and_a_deleted_session_stays_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(KEY_ENV, secrets.token_hex(32))
    place = Place(tmp_path)
    with place.cluster() as url, place.client(url, ALICE) as client:
        assert url.startswith("https://") and resumed(APP) == (0, place.durable)
        with place.client(url, "somebody else's") as stranger:
            assert stranger.get("/v1/sessions").status_code == 401
        chat(client, [FACT], "kept")
        chat(client, [FACT], "nowhere", store=False)
        chat(client, [FACT], "deleted")
        assert client.delete("/v1/sessions/deleted").status_code == 200
        chat(client, [COUNT], "moved")
        wait_for(lambda: place.sessions == {"kept", "moved"})
        before = client.get("/v1/sessions/kept").json()
    assert not [file for file in Path(place.durable).rglob("*") if file.is_file() and b"4172" in file.read_bytes()]
    with place.cluster() as url, place.client(url, ALICE) as client:
        assert resumed(APP) == (2, place.durable)
        assert client.get("/v1/sessions/deleted").status_code == 404
        assert client.get("/v1/sessions/nowhere").status_code == 404
        with place.client(url, BOB) as stranger:
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
