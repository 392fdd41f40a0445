"""The Kubernetes service and the script that starts Ray by hand: what can be said of them without a cluster."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import __version__ as ray_version
from ray.scripts.scripts import cli
from ray.serve.schema import ServeDeploySchema

from deployment.app import leaving_seconds
from deployment.settings import AppArgs
from tests.pages.programs import clicked

CONFIGS = Path(__file__).parents[2] / "deployment" / "configs"
SCRIPT = CONFIGS / "clusters" / "start_ray.sh"


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / "kubernetes" / "rayservice.yaml").read_text())["spec"]


@pytest.fixture(scope="module")
def pods(service: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = service["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_serve_and_the_application_take_what_the_service_deploys(service: dict[str, Any]):
    schema = ServeDeploySchema.model_validate(yaml.safe_load(service["serveConfigV2"]))
    args = AppArgs.model_validate(schema.applications[0].args)
    workers = service["rayClusterConfig"]["workerGroupSpecs"][0]
    assert args.replicas == workers["replicas"] and args.device == "cuda"


def test_the_service_runs_a_ray_that_we_support(service: dict[str, Any]):
    oldest = (2, 60)
    version = service["rayClusterConfig"]["rayVersion"]
    assert oldest <= tuple(map(int, version.split(".")[:2])) <= tuple(map(int, ray_version.split(".")[:2]))


def test_every_pod_needs_the_token_to_take_part(pods: list[dict[str, Any]]):
    for pod in pods:
        told = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
        assert told["RAY_AUTH_MODE"]["value"] == "token"
        assert "secretKeyRef" in told["RAY_AUTH_TOKEN"]["valueFrom"], "a secret is not written into a file"


def test_host_stores_have_shared_memory_that_the_pods_limit_counts(service: dict[str, Any], pods: list[dict[str, Any]]):
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    worker = pods[1]
    (shm,) = [volume for volume in worker["volumes"] if volume["name"] == "shm"]
    mounts = {mount["name"]: mount["mountPath"] for mount in worker["containers"][0]["volumeMounts"]}
    room = gibibytes(shm["emptyDir"]["sizeLimit"])
    assert mounts["shm"] == "/dev/shm" and shm["emptyDir"]["medium"] == "Memory"
    assert application["args"]["host_store_bytes"] < room
    assert room < gibibytes(worker["containers"][0]["resources"]["limits"]["memory"])


def test_a_pod_has_as_long_to_end_as_its_replica_to_give_its_sessions_away(
    service: dict[str, Any], pods: list[dict[str, Any]]
):
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    assert pods[1]["terminationGracePeriodSeconds"] >= leaving_seconds(application["args"]["host_store_bytes"])


def test_every_volume_that_is_mounted_is_there(pods: list[dict[str, Any]]):
    for pod in pods:
        there = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == there


def test_the_block_of_an_external_redis_is_one_when_it_is_uncommented(service: dict[str, Any]):
    text = (CONFIGS / "kubernetes" / "rayservice.yaml").read_text()
    before, block = text.split("    # gcsFaultToleranceOptions:")
    commented, rest = block.split("    headGroupSpec:")
    lines = [line.replace("    # ", "    ", 1) for line in commented.splitlines()]
    changed = before + "    gcsFaultToleranceOptions:" + "\n".join(lines) + "\n    headGroupSpec:" + rest
    cluster = yaml.safe_load(changed)["spec"]["rayClusterConfig"]
    redis = cluster.pop("gcsFaultToleranceOptions")
    assert cluster == service["rayClusterConfig"], "nothing else changes"
    assert redis.keys() == {"redisAddress", "redisPassword", "externalStorageNamespace"}
    assert redis["redisPassword"]["valueFrom"]["secretKeyRef"].keys() == {"name", "key"}


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        (["head"], {"head": True, "port": 6379, "address": None, "dashboard_host": "127.0.0.1"}),
        (["worker", "192.0.2.10:6379"], {"head": False, "address": "192.0.2.10:6379"}),
    ],
    ids=["head", "worker"],
)
def test_the_script_starts_a_ray_that_is_closed_to_strangers_and_reads_its_options_as_meant(
    asked: list[str], meant: dict[str, Any], tmp_path: Path
):
    fake = tmp_path / "ray"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$RAY_AUTH_MODE" "$(umask)" "$@"\n')
    fake.chmod(0o700)
    done = subprocess.run(
        [SCRIPT, *asked], env=os.environ | {"RAY": str(fake)}, capture_output=True, text=True, check=True
    )
    mode, umask, *arguments = done.stdout.splitlines()
    assert (mode, umask) == ("token", "0077")
    read = clicked(cli, arguments)
    assert arguments[0] == "start" and read["disable_usage_stats"]
    assert {name: read[name] for name in meant} == meant


@pytest.mark.parametrize("asked", [[], ["head", "more"], ["worker"], ["other"]])
def test_the_script_says_how_it_is_used(asked: list[str]):
    done = subprocess.run([SCRIPT, *asked], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "start_ray.sh worker HEAD:6379" in done.stderr


def gibibytes(text: str) -> int:
    return int(text.removesuffix("Gi")) << 30
