"""Two models in one cluster: a session of one is unknown to the other, and one can go without the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray import serve

from deployment.app import build
from deployment.cluster.names import directory_name, named_actor
from deployment.local import APP
from deployment.settings import AppArgs
from tests.e2e.cluster import FACT, QUESTION, chat, keyed, text, turn, two_replicas

pytestmark = pytest.mark.soak

OTHER = f"{APP}/v2"
"""Its actors' names begin as those of the other application do."""


def dflash_serve(command: str) -> str:
    """What an operator's command says, which connects to the cluster from a process of its own."""
    program = (
        f"from deployment.cli import app; app(['{command}', '--address', '{ray.get_runtime_context().gcs_address}'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_applications_share_a_cluster_and_nothing_else(tmp_path: Path):
    args = AppArgs(replicas=1, host_store_bytes=32 << 20)
    with two_replicas(args, tmp_path) as url, keyed(url) as client:
        serve.run(build(args.model_copy(update={"model_name": "second"})), name=OTHER, route_prefix="/second")
        with keyed(f"{url}/second") as second:
            second.headers["authorization"] = client.headers["authorization"]
            assert [model.get("/v1/models").json()["data"][0]["id"] for model in (client, second)] == ["demo", "second"]
            chat(client, [FACT], "same-name")
            assert second.get("/v1/sessions/same-name").status_code == 404
            assert "4172" not in text(chat(second, [QUESTION], "same-name"))
            assert "4172" in text(turn(client, "same-name", QUESTION))
            assert dflash_serve("down") == f"{APP} is down; 2 detached actors ended.\n"
            assert list(serve.status().applications) == [OTHER]
            assert named_actor(directory_name(OTHER)) is not None
            assert "4172" not in text(turn(second, "same-name", QUESTION))
            assert len(second.get("/v1/sessions/same-name/turns").json()["data"]) == 2
            serve.run(build(args), name=APP, route_prefix="/")
            assert "4172" in text(turn(client, "same-name", QUESTION)), "it goes on from the durable tier"
