"""cluster.yaml, and its like for rented machines, are what `ray up` takes, and do not leave the cluster open."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

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


def test_every_ray_starts_with_token_authentication(cluster: dict[str, Any]) -> None:
    starts = [c for kind in ("head", "worker") for c in cluster[f"{kind}_start_ray_commands"] if "ray start" in c]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command and "umask 077" in command for command in starts)
    assert "~/.ray/auth_token" in cluster["file_mounts"]


def test_the_dashboard_listens_on_the_head_alone(cluster: dict[str, Any]) -> None:
    (head,) = [c for c in cluster["head_start_ray_commands"] if "ray start" in c]
    assert "--dashboard-host=127.0.0.1" in head and "--autoscaling-config=~/ray_bootstrap_config.yaml" in head
