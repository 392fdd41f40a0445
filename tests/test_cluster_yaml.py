"""cluster.yaml, and its like for rented machines, are what `ray up` takes, and do not leave the cluster open."""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import cli

from tests.pages.programs import clicked

ROOT = Path(__file__).resolve().parents[1]
OWN = ROOT / "cluster.yaml"
RENTED = ROOT / "deployment" / "configs" / "clusters" / "aws.yaml"


@pytest.fixture(params=[OWN, RENTED], ids=["own machines", "rented"])
def cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    return yaml.safe_load(request.param.read_text())


def validated(cluster: dict[str, Any]) -> dict[str, Any]:
    prepared = prepare_config(copy.deepcopy(cluster))
    validate_config(prepared)
    return prepared


def test_ray_accepts_it(cluster: dict[str, Any]) -> None:
    prepared = validated(cluster)
    own = cluster["provider"].get("worker_ips")
    assert prepared["max_workers"] == (len(own) if own else cluster["max_workers"])


@pytest.mark.parametrize("broken", [{"dockre": {}}, {"provider": {"type": "local", "head_ip": "192.0.2.10"}}])
def test_ray_would_refuse_a_mistake(cluster: dict[str, Any], broken: dict[str, Any]) -> None:
    with pytest.raises((jsonschema.ValidationError, click.ClickException)):
        validated(cluster | broken)


def calls(commands: list[str]) -> list[dict[str, Any]]:
    """What Ray's own parser makes of each `ray ...` in lines of a shell."""
    words = [shlex.split(command, comments=True) for command in commands]
    places = [[number for number, word in enumerate(line) if word.endswith("bin/ray")] for line in words]
    assert all(len(found) == 1 for found in places)
    return [clicked(cli, line[found[0] + 1 :]) for line, found in zip(words, places, strict=True)]


def test_ray_reads_how_the_head_is_started_as_it_is_meant(cluster: dict[str, Any]) -> None:
    stop, head = calls(cluster["head_start_ray_commands"])
    assert "force" in stop and head["head"] and head["port"] == 6379 and head["address"] is None
    assert head["dashboard_host"] == "127.0.0.1", "it listens on the head alone"
    assert head["autoscaling_config"] == "~/ray_bootstrap_config.yaml" and head["disable_usage_stats"]


def test_ray_reads_how_workers_are_started_as_it_is_meant(cluster: dict[str, Any]) -> None:
    stop, worker = calls(cluster["worker_start_ray_commands"])
    assert "force" in stop and not worker["head"] and worker["address"] == "$RAY_HEAD_IP:6379"
    assert worker["disable_usage_stats"]


@pytest.mark.parametrize("wrong", ["--dashbord-host=127.0.0.1", "--port=many"])
def test_ray_would_refuse_a_mistake_in_a_command(cluster: dict[str, Any], wrong: str) -> None:
    with pytest.raises(click.UsageError):
        calls([f"{cluster['head_start_ray_commands'][1]} {wrong}"])


def test_every_ray_starts_with_token_authentication(cluster: dict[str, Any]) -> None:
    starts = [c for kind in ("head", "worker") for c in cluster[f"{kind}_start_ray_commands"] if "ray start" in c]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command and "umask 077" in command for command in starts)
    assert "~/.ray/auth_token" in cluster["file_mounts"]
