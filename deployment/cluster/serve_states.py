"""Which replicas does Ray Serve mean to end? It tells nobody: who wants to know asks its controller.

The question is the one that `serve status` and the dashboard ask; a few milliseconds for a small cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

ANSWER_SECONDS = 2.0

STOPPING = "STOPPING"
"""The replica gets no new requests, and its process ends after those that run."""

PENDING_MIGRATION = "PENDING_MIGRATION"
"""Its node is being drained: it serves until another replica can, or until the node's time is up."""


@dataclass(frozen=True)
class ServeReplica:
    replica: str
    deployment: str
    state: str

    @property
    def leaving(self) -> bool:
        """Whether what it holds should be elsewhere."""
        return self.state in (STOPPING, PENDING_MIGRATION)


async def serve_replicas(app: str) -> tuple[ServeReplica, ...] | None:
    """All replicas of an application; None while the controller cannot be asked, as in a cluster without Serve."""
    try:
        controller: Any = await asyncio.to_thread(ray.get_actor, SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
        async with asyncio.timeout(ANSWER_SECONDS):
            details = await controller.get_serve_instance_details.remote()
        return read_replicas(details, app)
    except (ValueError, RayError, TimeoutError, KeyError, TypeError, AttributeError):
        return None


def read_replicas(details: Mapping[str, Any], app: str) -> tuple[ServeReplica, ...]:
    """From the controller's description of all applications. Raises KeyError for another form of it."""
    application = details["applications"].get(app)
    return tuple(
        ServeReplica(replica["replica_id"], name, str(getattr(replica["state"], "value", replica["state"])))
        for name, deployment in (application["deployments"] if application else {}).items()
        for replica in deployment["replicas"]
    )
