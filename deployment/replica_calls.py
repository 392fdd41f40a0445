"""How the ingress speaks to replicas: to the one that a route names, to all, or to one for as long as a turn runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from deployment.errors import RequestError
from deployment.wire import ReplicaInfo, Route, TurnAnswer

ATTEMPTS = 3


class Replicas:
    def __init__(self, engine: DeploymentHandle) -> None:
        self._engine = engine

    async def ask(self, method: str, route: Route, *args: Any) -> Any:
        """RequestError (503) if the replica that was asked is gone."""
        try:
            return await getattr(self._engine, method).remote(route, *args)
        except RayActorError:
            raise RequestError(503, "replica_lost", "the replica that was asked is gone; try again") from None

    async def told(self, method: str, route: Route, *args: Any) -> AsyncGenerator[TurnAnswer, None]:
        """What a replica tells of a turn. A reader that leaves is known there at once. RayActorError."""
        answers: Any = getattr(self._engine.options(stream=True), method).remote(route, *args)
        try:
            async for answer in answers:
                yield answer
        finally:
            answers.cancel()

    async def all(self) -> list[ReplicaInfo]:
        """Replicas that answer. A call to a dead one, not yet noticed by Serve, fails as a whole: ask again."""
        for _ in range(ATTEMPTS):
            try:
                return await self._engine.broadcast("info").results_async(timeout_s=10)
            except (RayActorError, TimeoutError):
                continue
        raise RequestError(503, "unavailable", "the replicas do not answer")
