"""The Ray Serve application: `serve run deployment.app:build`, or a config file of `deployment/configs/`."""

# No `from __future__ import annotations`: Serve reads the builder's annotation to make its arguments an AppArgs.
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from deployment.cluster.transport import HEAD
from deployment.ingress import Ingress
from deployment.logs import serves_part
from deployment.replica import EngineReplica
from deployment.settings import AppArgs

LEAST_LEAVING_SECONDS = 20.0
"""Serve's own default: what a replica has that holds next to nothing."""

MOVE_BYTES_PER_SECOND = 0.2e9
"""What sessions move at, below the slowest of the moves in `bench/results/moves.cpu.json` whose state was hashed on its
way, as it is between nodes. That is a core's work: a network of 10 Gbit/s, and a GPU, take more."""

CUT_SECONDS = 10.0
"""From the end of an ingress's streams to its own: the directory's and the ingress's looks at Serve, and a slow end."""


def leaving_seconds(state_bytes: int) -> float:
    """How long Serve waits for an engine replica that is to end: all sessions that it can hold move meanwhile."""
    return LEAST_LEAVING_SECONDS + state_bytes / MOVE_BYTES_PER_SECOND


def scaling(args: AppArgs) -> dict[str, Any]:
    """How many replicas Serve keeps, as options of `serve.deployment`: see `deployment/scaling.py`. A replica that goes
    gives its sessions away first."""
    if args.most_replicas is None:
        return {"num_replicas": args.replicas}
    config = AutoscalingConfig(
        min_replicas=args.replicas,
        max_replicas=args.most_replicas,
        upscale_delay_s=5,
        downscale_delay_s=300,
        policy=AutoscalingPolicy(policy_function="deployment.scaling:replicas_wanted"),
    )
    return {"autoscaling_config": config}


def build(args: AppArgs) -> serve.Application:
    """One ingress in front of `args.replicas` engines, or of more while there is more to do."""
    return application(args, EngineReplica)


def application(args: AppArgs, replica: type[EngineReplica]) -> serve.Application:
    """The same with replicas of this class."""
    logs = serves_part(args.logs)
    # `serve build` takes no None there.
    logging: dict[str, Any] = {} if logs is None else {"logging_config": logs}
    engines = serve.deployment(
        replica,
        name="EngineReplica",
        ray_actor_options=args.ray_actor_options,
        # Turns queue in the engine, which knows its lanes; Serve should not hold any back.
        max_ongoing_requests=1024,
        request_router_config=RequestRouterConfig(
            request_router_class="deployment.router:SessionRouter",  # pyright: ignore[reportArgumentType]
            request_routing_stats_period_s=1,  # pyright: ignore[reportArgumentType]
        ),
        health_check_period_s=1 if args.device == "cpu" else 5,
        health_check_timeout_s=30,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=leaving_seconds(args.host_store_bytes),
        max_constructor_retry_count=2,
        **logging,
        **scaling(args),
    )
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        # Where no other node's end ends it and all streams with it; without the head nothing is served anyway.
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},
        max_ongoing_requests=4096,
        health_check_period_s=1,  # its clients wait for another one, which Serve starts when it has looked
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=args.stream_grace_seconds + CUT_SECONDS,
        **logging,
    )
    return ingress.bind(engines.bind(args), args)
