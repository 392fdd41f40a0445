"""How the ingress speaks to replicas: to the one that a route names, to all, or to one for as long as a turn runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployment.cluster.transport import Cluster
from deployment.errors import RequestError
from deployment.metrics.measured import Measured
from deployment.replica_watch import LOOK_SECONDS, SILENT_SECONDS, ReplicaLost, ReplicaWatch
from deployment.router import rendezvous
from deployment.wire import NotHere, ReplicaInfo, Route, TurnAnswer

ATTEMPTS = 3
ASK_SECONDS = 30.0
AGAIN_SECONDS = 0.1

INFO_SECONDS = 10.0
MEASURED_SECONDS = 2.0
"""A scraper waits 10 seconds at most."""

log = logging.getLogger("ray.serve")


class Replicas:
    def __init__(self, engine: DeploymentHandle, cluster: Cluster) -> None:
        self._engine = engine
        self._cluster = cluster
        self.watch = ReplicaWatch(lambda replica: cluster.is_lost(replica))
        self._staying: tuple[float, tuple[str, ...]] = float("-inf"), ()
        self._asking = asyncio.Lock()

    async def ask(self, method: str, route: Route, *args: Any) -> Any:
        """What a replica answers, or the session's owner, if the one that was asked is not. RequestError (503) if
        nobody answers in time. A route that names nobody gets a name, since only of one that is known can be said that
        it is lost."""
        if route.replica is None:
            route = replace(route, replica=await self._someone(route.affinity))
        return await self._answered(method, route, *args)

    async def _answered(self, method: str, route: Route, *args: Any) -> Any:
        deadline = time.monotonic() + ASK_SECONDS
        lost = False
        while True:
            answer = await self.ask_here(method, route, *args)
            if not isinstance(answer, NotHere):
                return answer
            lost = lost or answer.lost
            if time.monotonic() > deadline:
                raise RequestError(503, "replica_lost", "the replica that was asked is gone; try again")
            route = replace(route, replica=answer.owner, again=lost)
            await asyncio.sleep(AGAIN_SECONDS)

    async def ask_any(self, method: str, affinity: str, *args: Any) -> Any:
        """What any replica answers to a question that changes nothing. Only Serve knows who is asked first, and whether
        that one is still there nobody can say: where it is silent, the next one is asked by name."""
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                return await self._answered(method, Route(affinity), *args)
        except TimeoutError:
            return await self.ask(method, Route(affinity), *args)

    async def ask_here(self, method: str, route: Route, *args: Any) -> Any:
        """What the replica that the route names answers; NotHere if it is gone, or if others may take over from it."""
        try:
            return await self.watch.answer(getattr(self._engine, method).remote(route, *args), route.replica)
        except RayActorError:
            await self.lost(route.replica)
            return NotHere(route.replica or "", lost=True)
        except ReplicaLost as lost:
            return await self.instead(lost.replica, route.affinity)

    async def instead(self, lost: str | None, affinity: str) -> NotHere:
        """Who should be asked instead of a replica that is lost, whichever that is: Serve, which does not know yet,
        might choose it again."""
        return NotHere(lost or "", await self._someone(affinity, lost or ""), lost=True)

    async def _someone(self, affinity: str, beside: str = "") -> str | None:
        """The first one for `affinity` of those that have renewed just now; None: nobody knows of any."""
        staying = await self._cluster.staying(beside) if beside else await self._who_stays()
        return next(iter(rendezvous(affinity, staying)), None)

    async def _who_stays(self) -> tuple[str, ...]:
        """As of a second ago at most: who has gone since is found out when it is asked."""
        async with self._asking:
            asked, staying = self._staying
            if time.monotonic() - asked >= LOOK_SECONDS:
                staying = await self._cluster.staying(beside="")
                self._staying = time.monotonic(), staying
            return staying

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
        return await self._asked_of_all("info", INFO_SECONDS)

    async def measured(self) -> list[Measured]:
        """What those have done that say so at once."""
        answers: list[Measured | None] = await self._asked_of_all("measured", MEASURED_SECONDS)
        return [answer for answer in answers if answer is not None]

    async def answering(self) -> int:
        """How many say anything at once, be it that their engines are in a long step."""
        return len(await self._asked_of_all("measured", MEASURED_SECONDS))

    async def _asked_of_all(self, method: str, seconds: float) -> list[Any]:
        """What those answer that do in time: one that is dead, cut off or stuck keeps no other's answer back.
        RequestError (503) where nobody does."""
        for _ in range(ATTEMPTS):
            if answers := await self._answers(method, seconds):
                return answers
        raise RequestError(503, "unavailable", "the replicas do not answer")

    async def _answers(self, method: str, seconds: float) -> list[Any]:
        broadcast = self._engine.broadcast(method)
        try:
            # What Serve has to collect them gives up all where one of them is late.
            async with asyncio.timeout(seconds):
                asked = await broadcast._fetch_replica_results_async()  # pyright: ignore[reportPrivateUsage]
        except (TimeoutError, DeploymentUnavailableError):
            await asyncio.sleep(AGAIN_SECONDS)
            return []
        waiting = [asyncio.ensure_future(one.get_async()) for one in asked]
        try:
            done, late = await asyncio.wait(waiting, timeout=seconds)
        finally:
            for one in waiting:
                one.cancel()
        if late:
            log.info("%d of %d replicas did not say %s within %g s", len(late), len(waiting), method, seconds)
        answers: list[Any] = []
        for one in done:
            if one.cancelled():
                log.info("what a replica was asked, %s, was cancelled", method)
            elif error := one.exception():
                log.info("a replica does not say %s: %r", method, error)
            else:
                answers.append(one.result())
        return answers
