"""Every Serve config that we ship is one that Serve takes, with arguments that the application takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve._private.config import DeploymentConfig
from ray.serve.schema import ServeDeploySchema

from deployment.app import build, scaling
from deployment.scaling import replicas_wanted
from deployment.settings import AppArgs

CONFIGS = sorted((Path(__file__).parents[2] / "deployment" / "configs").glob("*.yaml"))


def of(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def args_of(path: Path) -> dict[str, Any]:
    (application,) = of(path)["applications"]
    return application["args"]


@pytest.fixture(params=CONFIGS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_there_is_one_for_a_cpu_one_gpu_many_gpus_and_many_nodes():
    assert {path.stem for path in CONFIGS} == {"demo", "one_gpu", "eight_gpus", "nodes"}


def test_serve_and_the_application_take_it(path: Path):
    schema = ServeDeploySchema.model_validate(of(path))
    (application,) = schema.applications
    assert application.import_path == "deployment.app:build"
    assert build(AppArgs.model_validate(application.args)) is not None


def test_it_listens_on_loopback_alone_and_says_how_ray_is_kept_closed(path: Path):
    assert of(path)["http_options"]["host"] == "127.0.0.1"
    assert "RAY_AUTH_MODE=token" in path.read_text()


def test_a_misspelt_argument_is_refused_by_name(path: Path):
    with pytest.raises(ValidationError, match="lane\n"):
        AppArgs.model_validate(args_of(path) | {"lane": 3})


def test_a_replica_on_a_card_takes_a_whole_one(path: Path):
    args = AppArgs.model_validate(args_of(path))
    assert args.ray_actor_options.get("num_gpus", 0) == (1 if args.device == "cuda" else 0)


def test_serve_changes_the_number_of_replicas_between_bounds_by_our_policy_and_only_where_it_may():
    fixed = AppArgs(replicas=3)
    assert scaling(fixed) == {"num_replicas": 3}
    config = scaling(AppArgs(replicas=2, most_replicas=8, lanes=16))["autoscaling_config"]
    assert (config.min_replicas, config.max_replicas) == (2, 8)
    assert config.policy.get_policy().__name__ == replicas_wanted.__name__


def test_an_autoscaled_deployment_travels_to_serves_controller_with_our_policy(path: Path):
    args = AppArgs.model_validate(args_of(path) | {"most_replicas": 9})
    engines = build(args)._bound_deployment.init_args[0]._bound_deployment
    there = DeploymentConfig.from_proto_bytes(engines._deployment_config.to_proto_bytes())
    assert there.autoscaling_config is not None
    assert there.autoscaling_config.policy.policy_function == "deployment.scaling:replicas_wanted"
    assert there.autoscaling_config.policy.get_policy().__name__ == replicas_wanted.__name__


def test_fewer_at_most_than_at_least_are_refused_by_name():
    with pytest.raises(ValueError, match="most_replicas: 2 is less than replicas, which is 3"):
        AppArgs.of(replicas=3, most_replicas=2)
