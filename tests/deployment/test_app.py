"""The application as Serve sees it, without starting Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from ray.serve.schema import ServeDeploySchema
from ray.serve.scripts import build as serve_build

from deployment.app import LEAST_LEAVING_SECONDS, build, leaving_seconds
from deployment.engine.options import EngineOptions
from deployment.engine_health import ANSWER_SECONDS
from deployment.replica import STUCK_END_SECONDS
from deployment.settings import AppArgs

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "deployment" / "configs"


def test_every_shipped_config_is_valid_for_serve_and_for_the_application():
    configs = sorted(CONFIGS.glob("*.yaml"))
    assert configs
    for path in configs:
        schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
        for application in schema.applications:
            assert application.import_path == "deployment.app:build"
            AppArgs.model_validate(application.args)


def test_serve_build_writes_a_config_that_serve_takes(tmp_path: Path):
    written = tmp_path / "config.yaml"
    done = CliRunner().invoke(serve_build, ["deployment.demo_app:application", "-o", str(written)])
    assert done.exit_code == 0, done.output
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(written.read_text())).applications
    replicas = {deployment.name: deployment.num_replicas for deployment in application.deployments}
    assert set(replicas) == {"Ingress", "EngineReplica"} and replicas["EngineReplica"] == AppArgs().replicas


def test_every_engine_option_can_be_set_from_the_settings():
    names = {field.name for field in fields(EngineOptions)}
    assert names <= set(AppArgs.model_fields)
    options = AppArgs(lanes=3, context=100, pages=9, draft_tokens=5, draft_causal="true").engine_options()
    chosen = (options.lanes, options.context, options.pages, options.draft_tokens, options.draft_causal)
    assert chosen == (3, 100, 9, 5, "true")


def test_a_replica_may_take_as_long_to_leave_as_its_state_takes_to_move():
    assert leaving_seconds(0) == LEAST_LEAVING_SECONDS == 20
    rows = json.loads((ROOT / "bench/results/moves.cpu.json").read_text())["rows"]
    (hashed,) = [row for row in rows if row["what"].endswith(", hashed")]
    at_worst = hashed["bytes_in_pause"] / hashed["seconds"]["stands_p99"]
    size = 100 << 30
    assert size / at_worst <= leaving_seconds(size) - leaving_seconds(0) <= 1.5 * size / at_worst


def test_serve_waits_longer_for_an_ingress_than_its_streams_may_go_on():
    ingress = build(AppArgs(stream_grace_seconds=7))._bound_deployment
    assert ingress._deployment_config.graceful_shutdown_timeout_s > 7
    engines = ingress.init_args[0]._bound_deployment
    assert engines._deployment_config.graceful_shutdown_timeout_s == leaving_seconds(AppArgs().host_store_bytes)


def test_the_end_of_a_node_with_replicas_ends_no_ingress_and_that_of_an_ingress_is_seen_at_once():
    ingress = build(AppArgs())._bound_deployment
    options = ingress.ray_actor_options or {}
    assert options["resources"].keys() == {"node:__internal_head__"} and options["num_cpus"] == 0
    assert ingress._deployment_config.health_check_period_s <= 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_that_is_found_stuck_is_looked_at_once_more_before_its_replica_ends(device: str):
    engines = build(AppArgs.of(device=device))._bound_deployment.init_args[0]._bound_deployment
    assert engines._deployment_config.health_check_period_s + ANSWER_SECONDS < STUCK_END_SECONDS


def test_an_ingress_starts_without_torch():
    """Which would take it seconds, and most of its memory."""
    program = "import sys; sys.modules['torch'] = None; import deployment.ingress"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
