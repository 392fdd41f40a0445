"""Replicas without an engine: they own sessions whose turns are lists of ids."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import ray

from deployment.cluster.fleet import Load
from deployment.cluster.not_owned import NotOwned, OwnedElsewhere
from deployment.cluster.owned_sessions import OwnedSessions
from deployment.cluster.transport import Cluster, RayTransport, start_host_store
from deployment.ownership.log import Round, TurnBegan
from deployment.ownership.log_format import decode
from deployment.ownership.words import NOTHING, SessionKey

APP = "owners"
ARENA_BYTES = 16 << 20


class _Replica:
    def __init__(self, name: str, shared_memory: Path) -> None:
        self._name = name
        self._store = start_host_store(APP, ARENA_BYTES, shared_memory)

    async def start(self) -> str:
        """The node that it is on."""
        await self._store.member.remote()
        cluster = Cluster(APP)
        self._sessions = OwnedSessions(
            self._name,
            cluster.node,
            RayTransport(cluster, APP, self._name, lambda: Load(1, 0)),
            opened=lambda opened: None,
            fenced=lambda key: None,
            copies_lost=lambda key, holds: None,
            no_room=lambda message: None,
            offered=lambda offer: None,
            drain=lambda drain: None,
        )
        self._sessions.start()
        return cluster.node

    async def pid(self) -> int:
        return os.getpid()

    async def take(self, key: SessionKey) -> tuple[int, ...] | str:
        """The ids that the log holds, or the replica that owns the session, or why there is none."""
        try:
            opened = await self._sessions.take(key)
            while not self._sessions.loaded(opened):
                opened = await self._sessions.take(key)
        except OwnedElsewhere as error:
            return error.owner
        except NotOwned as error:
            return str(error)
        records = [decode(data) for data in opened.records]
        return tuple(token for record in records if isinstance(record, Round) for token in record.token_ids)

    async def begin(self, key: SessionKey) -> None:
        began = TurnBegan(NOTHING, "t", {}, b"\0" * 32, 1, None, (1, 2, 3), 0, time.time())
        await self._sessions.committed(key, self._sessions.append(key, [began]))

    async def publish(self, key: SessionKey, ids: tuple[int, ...]) -> str | None:
        """None, or why not."""
        record = Round(NOTHING, "t", 0, 3, ids, 0, None)
        try:
            await self._sessions.committed(key, self._sessions.append(key, [record]))
        except NotOwned as error:
            return str(error)
        return None

    async def rounds(self, keys: list[SessionKey], count: int) -> float:
        """Seconds that a round of all these sessions takes, in the middle."""
        took = []
        for _ in range(count):
            began = time.perf_counter()
            await asyncio.gather(*(self.publish(key, (7,)) for key in keys))
            took.append(time.perf_counter() - began)
        return sorted(took)[count // 2]

    async def members(self, key: SessionKey) -> tuple[str, ...]:
        """The nodes that hold the session's copies."""
        return tuple(member.node for member in self._sessions.members(key))

    async def stall(self, seconds: float) -> None:
        time.sleep(seconds)


Replica: Any = ray.remote(num_cpus=0, max_concurrency=100)(_Replica)  # pyright: ignore[reportCallIssue]
