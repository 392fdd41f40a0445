"""The application's detached actors, thin shells around `Directory` and `HostStore`, and how a process talks to them.

They outlive replicas and redeployments; their names carry the application and the protocol's version, so that a new
version never talks to an old actor. `remove` ends them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployment.directory import Directory
from deployment.host_store import Held, HostStore, Receipt
from deployment.ownership import Conflict, Copy, Epoch, Grant, Placement, SessionKey
from deployment.wire import HandedOver
from state.document import open_document

PROTOCOL = 2
NAMESPACE = "dflash-serve"
ANSWER_SECONDS = 10.0
ATTEMPTS = 5

log = logging.getLogger("ray.serve")


def _prefix(app: str) -> str:
    return f"{app}/v{PROTOCOL}/"


def _store_prefix(app: str) -> str:
    return _prefix(app) + "host-store/"


def _named(prefix: str) -> list[str]:
    """Names of the live actors of our namespace that begin with `prefix`."""
    # With all namespaces, Ray gives dictionaries instead of names.
    actors: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix)]


def next_incarnation(app: str, now: float) -> int:
    """A number that no directory of this application had before: written to the GCS before the first grant."""
    prefix = f"dflash-serve/{app}/incarnation/"
    seen = [int(key.decode().removeprefix(prefix)) for key in internal_kv._internal_kv_list(prefix)]
    incarnation = max(int(now), max(seen, default=0) + 1)
    # True: the key was there already, so another directory has just taken this number.
    while internal_kv._internal_kv_put(f"{prefix}{incarnation}", b"", overwrite=False):
        incarnation += 1
    return incarnation


def _owned(app: str) -> list[tuple[str, SessionKey, Epoch]]:
    """What the live replicas own: a session in its first turn has no copy in any host store yet, nor has one whose
    host store died with the directory."""
    handle = serve.get_deployment_handle("EngineReplica", app)
    for _ in range(ATTEMPTS):
        try:
            answers: Any = handle.broadcast("owned").results(timeout_s=ANSWER_SECONDS)
        except (RayActorError, TimeoutError) as error:  # one dead replica, not yet noticed by Serve, fails them all
            log.warning("the directory could not ask the replicas what they own: %r", error)
            time.sleep(1)
            continue
        return [entry for answer in answers for entry in answer]
    return []


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=5)
class DirectoryActor:
    """One for each application, on the head node. See `Directory`."""

    def __init__(self, app: str) -> None:
        now = time.time()
        self._directory = Directory(next_incarnation(app, now))
        for name in _named(_store_prefix(app)):
            try:
                index: Any = ray.get(ray.get_actor(name, NAMESPACE).index.remote(), timeout=ANSWER_SECONDS)
            except (RayActorError, GetTimeoutError, ValueError):
                continue
            node = name.removeprefix(_store_prefix(app))
            for held in index:
                self._directory.restore(
                    held.key, held.owner, Copy(node, held.epoch, held.order, max(held.frontiers, default=0)), now
                )  # fmt: skip
        # The key outlives this process, and the id stays when Ray starts the actor again.
        born = f"dflash-serve/{app}/directory/{ray.get_runtime_context().get_actor_id()}"
        if internal_kv._internal_kv_put(born, b"", overwrite=False):
            for replica, key, epoch in _owned(app):
                self._directory.restore_owner(key, replica, epoch, now)

    def locate(self, key: SessionKey) -> Placement | None:
        return self._directory.locate(key)

    def sessions(self, tenant: str) -> tuple[Placement, ...]:
        return self._directory.sessions(tenant)

    def claim(self, key: SessionKey, replica: str, expected: Epoch | None) -> Grant | Conflict:
        return self._directory.claim(key, replica, expected, time.time())

    def abandon(self, key: SessionKey, epoch: Epoch) -> bool:
        return self._directory.abandon(key, epoch)

    def record_copy(self, key: SessionKey, copy: Copy) -> bool:
        return self._directory.record_copy(key, copy, time.time())

    def delete(self, key: SessionKey) -> Placement | None:
        return self._directory.delete(key, time.time())


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=5)
class HostStoreActor:
    """One on each node that has replicas. See `HostStore`. Documents cross as uint8 arrays, which Ray shares."""

    def __init__(self, budget: int) -> None:
        self._store = HostStore(budget, open_document)

    def put(
        self,
        key: SessionKey,
        owner: str,
        epoch: Epoch,
        order: int,
        frontiers: tuple[int, ...],
        document: np.ndarray,
    ) -> Receipt:
        # The array is a view of an object that dies with its owner: it is copied before the receipt.
        return self._store.put(key, owner, epoch, order, frontiers, document.tobytes())

    def seal(self, key: SessionKey, epoch: Epoch) -> HandedOver | None:
        held = self._store.seal(key, epoch)
        if held is None:
            return None
        return HandedOver(held.epoch, held.order, held.frontiers, np.frombuffer(held.document, np.uint8))

    def delete(self, key: SessionKey, epoch: Epoch) -> None:
        self._store.delete(key, epoch)

    def index(self) -> tuple[Held, ...]:
        return self._store.index()


class Cluster:
    """The detached actors of one application, as one replica or ingress sees them. Starts those that are missing."""

    def __init__(self, app: str, host_store_bytes: int) -> None:
        self._app = app
        self._host_store_bytes = host_store_bytes
        self.node = ray.get_runtime_context().get_node_id()
        self._directory: Any = DirectoryActor.options(
            name=f"{_prefix(app)}directory",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            resources={"node:__internal_head__": 0.001},
        ).remote(app)
        self._store: Any = None

    def start_host_store(self) -> None:
        """The store of this process's own node, for replicas."""
        self._store = HostStoreActor.options(
            name=_store_prefix(self._app) + self.node,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.node, soft=False),
        ).remote(self._host_store_bytes)

    async def locate(self, key: SessionKey) -> Placement | None:
        return await self._directory.locate.remote(key)

    async def sessions(self, tenant: str) -> tuple[Placement, ...]:
        return await self._directory.sessions.remote(tenant)

    async def claim(self, key: SessionKey, replica: str, expected: Epoch | None) -> Grant | Conflict:
        return await self._directory.claim.remote(key, replica, expected)

    async def abandon(self, key: SessionKey, epoch: Epoch) -> None:
        await self._directory.abandon.remote(key, epoch)

    async def delete(self, key: SessionKey) -> Placement | None:
        """Deletes a session in the directory and in every host store."""
        placement = await self._directory.delete.remote(key)
        if placement is not None:
            await self._all_stores("delete", key, placement.epoch)
        return placement

    async def seal(self, key: SessionKey, epoch: Epoch) -> HandedOver | None:
        """Shuts out older owners in every host store that answers, and gives the newest state that any of them has."""
        answers = await self._all_stores("seal", key, epoch)
        held = [answer for answer in answers if answer is not None]
        return max(held, key=lambda answer: (answer.epoch, answer.order)) if held else None

    async def put(self, key: SessionKey, owner: str, state: HandedOver) -> Receipt:
        """Writes a Host replica to this node's store and tells the directory where it is. What a turn has committed
        must not be lost with an actor, so that the loss of one is a refusal and no error."""
        try:
            receipt: Receipt = await self._store.put.remote(
                key, owner, state.epoch, state.order, state.frontiers, state.document
            )
            copy = Copy(self.node, state.epoch, state.order, max(state.frontiers, default=0))
            if receipt.accepted and not await self._directory.record_copy.remote(key, copy):
                return Receipt(False, f"session {key} has another owner than {owner}", fenced=True)
        except RayActorError as error:
            return Receipt(False, f"the directory, or the host store of node {self.node}, is gone: {error}")
        return receipt

    async def _all_stores(self, method: str, *args: Any) -> list[Any]:
        """Answers of all host stores; those that are dead or silent are left out."""
        names = await asyncio.to_thread(_named, _store_prefix(self._app))

        async def ask(name: str) -> Any:
            actor = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
            return await _within(getattr(actor, method).remote(*args))

        answers = await asyncio.gather(*(ask(name) for name in names), return_exceptions=True)
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, BaseException):
                log.warning("host store %s did not answer %s: %s", name, method, answer)
        return [answer for answer in answers if not isinstance(answer, BaseException)]


async def _within(answer: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(answer, ANSWER_SECONDS)


def remove(app: str) -> int:
    """Ends all detached actors of an application, of every protocol version. Returns how many there were."""
    names = _named(f"{app}/v")
    for name in names:
        ray.kill(ray.get_actor(name, NAMESPACE))
    return len(names)
