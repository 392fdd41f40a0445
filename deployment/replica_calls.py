"""How the ingress speaks to replicas: to the one that a route names, to all, or to one for as long as a turn runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from deployment.cluster.transport import Cluster
from deployment.errors import RequestError
from deployment.metrics.measured import Measured
from deployment.wire import NotHere, ReplicaInfo, Route, TurnAnswer

ATTEMPTS = 3
ASK_SECONDS = 30.0
AGAIN_SECONDS = 0.1


class Replicas:
    def __init__(self, engine: DeploymentHandle, cluster: Cluster) -> None:
        self._engine = engine
        self._cluster = cluster

    async def ask(self, method: str, route: Route, *args: Any) -> Any:
        """What a replica answers, or the session's owner, if the one that was asked is not. RequestError (503) if
        nobody answers in time."""
        deadline = time.monotonic() + ASK_SECONDS
        while True:
            try:
                answer = await getattr(self._engine, method).remote(route, *args)
            except RayActorError:
                await self.lost(route.replica)
                answer = NotHere(route.replica or "")
            if not isinstance(answer, NotHere):
                return answer
            if time.monotonic() > deadline:
                raise RequestError(503, "replica_lost", "the replica that was asked is gone; try again")
            route = replace(route, replica=answer.owner)
            await asyncio.sleep(AGAIN_SECONDS)

    async def ask_here(self, method: str, route: Route, *args: Any) -> Any:
        """What the replica that the route names answers; NotHere if it is gone."""
        try:
            return await getattr(self._engine, method).remote(route, *args)
        except RayActorError:
            await self.lost(route.replica)
            return NotHere(route.replica or "")

    async def told(self, method: str, route: Route, *args: Any) -> AsyncGenerator[TurnAnswer, None]:
        """What a replica tells of a turn. A reader that leaves is known there at once. RayActorError."""
        answers: Any = getattr(self._engine.options(stream=True), method).remote(route, *args)
        try:
            async for answer in answers:
                yield answer
        finally:
            answers.cancel()

    async def lost(self, replica: str | None) -> None:
        """A call has failed: the directory finds out at once whether the replica is gone."""
        if replica is not None:
            await self._cluster.suspect(replica)

    async def all(self) -> list[ReplicaInfo]:
        """Replicas that answer."""
        return await self._asked_of_all("info", seconds=10)

    async def measured(self) -> list[Measured]:
        """What those have done that say so at once. A scraper waits 10 seconds at most."""
        answers: list[Measured | None] = await self._asked_of_all("measured", seconds=2)
        return [answer for answer in answers if answer is not None]

    async def _asked_of_all(self, method: str, seconds: float) -> list[Any]:
        """A call to a dead one, not yet noticed by Serve, fails as a whole: ask again. RequestError (503)."""
        for _ in range(ATTEMPTS):
            try:
                return await self._engine.broadcast(method).results_async(timeout_s=seconds)
            except (RayActorError, TimeoutError):
                continue
        raise RequestError(503, "unavailable", "the replicas do not answer")
