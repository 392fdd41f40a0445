"""A replica's way to directory, host stores and other replicas, as Ray calls. One that fails is one that was lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployment.cluster.directory_actor import MAIL_SECONDS, DirectoryActor, Mail
from deployment.cluster.fleet import Load
from deployment.cluster.host_store_actor import HostStoreActor, fetch_image
from deployment.cluster.names import NAMESPACE, GcsValues, directory_name, named_actor, store_name, versioned
from deployment.engine.log_lines import LogOptions
from deployment.metrics.measured import Room
from deployment.ownership.messages import (
    Claim,
    FromDirectory,
    FromOwner,
    FromStore,
    Grant,
    Held,
    Image,
    Known,
    Moved,
    Offer,
    Placed,
    ToStore,
    Wait,
)
from deployment.ownership.registry import Registry
from deployment.ownership.words import Member, SessionKey
from state.arena_file import SHARED_MEMORY

HEAD = "node:__internal_head__"
"""A resource that the head node alone has."""

CALL_SECONDS = 4.0
"""Below the time after which a silent store is given up, so that it is asked more than once."""

LOOKUPS = 4
"""Names of actors that one process looks up at once, each a question to the GCS."""

log = logging.getLogger("ray.serve")

T = TypeVar("T")


def start_directory(
    app: str, durable: str | None = None, key_env: str | None = None, logs: LogOptions | None = None
) -> Any:
    """The application's directory: the one that is there, or a new one on the head node. See `DirectoryActor`."""
    return DirectoryActor.options(  # pyright: ignore[reportAttributeAccessIssue]
        name=directory_name(app),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        resources={HEAD: 0.001},
    ).remote(app, durable, key_env, logs or LogOptions())


def start_host_store(app: str, size: int, directory: Path = SHARED_MEMORY, logs: LogOptions | None = None) -> Any:
    """The store of this process's own node: the one that is there, or a new one."""
    node = ray.get_runtime_context().get_node_id()
    return HostStoreActor.options(  # pyright: ignore[reportAttributeAccessIssue]
        name=store_name(app, node),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(app, size, directory, logs or LogOptions())


def on_head() -> bool:
    """Whether this process runs on the cluster's head node."""
    node = ray.get_runtime_context().get_node_id()
    nodes: Any = ray.nodes()
    return any(entry["NodeID"] == node and HEAD in entry["Resources"] for entry in nodes)


class Cluster:
    """What every process may ask: where sessions are, and what stores hold of them."""

    def __init__(
        self, app: str, durable: str | None = None, key_env: str | None = None, logs: LogOptions | None = None
    ) -> None:
        """`durable`, `key_env`, `logs`: of the directory, if it is to be started."""
        self._app = app
        self.node: str = ray.get_runtime_context().get_node_id()
        self.directory = start_directory(app, durable, key_env, logs)
        # Not the event loop's own threads: requests keep those busy with their tokens, media and files, and an owner
        # that does not reach its stores in time publishes nothing.
        self._lookups = ThreadPoolExecutor(LOOKUPS, "lookups")

    async def store(self, node: str) -> Any:
        """The host store of a node. Raises ValueError if there is none."""
        name = store_name(self._app, node)
        return await asyncio.get_running_loop().run_in_executor(self._lookups, named_actor, name)

    async def locate(self, key: SessionKey) -> Placed | Wait | None:
        """Raises `RayError` and TimeoutError while the directory is being started again."""
        return await asyncio.wait_for(_awaited(self.directory.locate.remote(key)), CALL_SECONDS)

    async def sessions(self, tenant: str) -> tuple[Placed, ...]:
        return await asyncio.wait_for(_awaited(self.directory.sessions.remote(tenant)), CALL_SECONDS)

    async def unowned(self, beginning: str) -> tuple[Placed, ...]:
        """Sessions whose names begin so and that no replica owns."""
        return await asyncio.wait_for(_awaited(self.directory.unowned.remote(beginning)), CALL_SECONDS)

    async def suspect(self, replica: str) -> None:
        """A call to a replica has failed: the directory finds out whether it is gone."""
        await self.answered(self.directory.suspect.remote(replica), "suspect")

    async def is_lost(self, replica: str) -> bool:
        """Whether others may take over from a replica. False while nobody says so."""
        try:
            return bool(await self.answered(self.directory.is_lost.remote(replica), "question for a replica's lease"))
        except AttributeError:  # a directory of an older version
            return False

    async def staying(self, beside: str) -> tuple[str, ...]:
        """Replicas that may be given sessions, but for `beside`; none while nobody knows."""
        return await self.answered(self.directory.staying.remote(beside), "question for replicas that stay") or ()

    async def with_room(self, beside: str) -> str | None:
        """A replica, other than `beside`, where a turn would begin at once, if one is known."""
        return await self.answered(self.directory.with_room.remote(beside), "question for a replica with room")

    async def is_stopping(self, replica: str) -> bool:
        """Whether Serve is known to be ending a replica."""
        return bool(await self.answered(self.directory.is_stopping.remote(replica), "question for a replica's state"))

    async def used_by(self, tenant: str) -> int | None:
        """Bytes that a tenant's sessions keep in this node's store; None if it does not answer."""
        try:
            store = await self.store(self.node)
        except ValueError:
            return None
        return await self.answered(store.used_by.remote(tenant), "question for a tenant's bytes")

    async def images(self, member: Member, key: SessionKey) -> tuple[Image, ...]:
        """What a store holds of a session, oldest first; nothing if it does not answer."""
        try:
            store = await self.store(member.node)
        except ValueError:
            return ()
        return await self.answered(store.images.remote(key), f"question to {member}") or ()

    async def room(self, node: str) -> Room | None:
        """What the host store of a node holds; None if it does not answer."""
        try:
            store = await self.store(node)
            return await self.answered(store.room.remote(), f"question to the store of {node}")
        except (ValueError, AttributeError):  # there is none, or one of an older version
            return None

    async def image(self, member: Member, image: Image, key: SessionKey) -> bytes:
        """Raises `StateError` if it is not held any more; `RayError`, TimeoutError and ValueError if nobody answers."""
        _, document = await fetch_image(self._app, member, key, image.order)
        return document

    async def answered(self, answer: Awaitable[T], what: str) -> T | None:
        try:
            return await asyncio.wait_for(_awaited(answer), CALL_SECONDS)
        except (RayError, TimeoutError) as error:
            log.info("%s was not answered: %r", what, error)
            return None


class RayTransport:
    """See `Transport`. `load`: that of this replica now, for the directory."""

    def __init__(self, cluster: Cluster, app: str, replica: str, load: Callable[[], Load]) -> None:
        self._cluster = cluster
        self._replica = replica
        self._load = load
        self._me = ray.get_runtime_context().current_actor
        self._stores: dict[str, Any] = {}
        self._registry = Registry(GcsValues(), versioned(app))
        # Nobody else's, so that no other question stands before the one that says whether a grant holds.
        self._seeing = ThreadPoolExecutor(1, "stores that count")

    async def renew(self, reports: Sequence[Held | Grant]) -> Sequence[Mail] | None:
        answer = self._directory.renew.remote(self._replica, self._cluster.node, self._me, reports, self._load())
        return await self._cluster.answered(answer, "renewal")

    async def claim(self, claim: Claim) -> FromDirectory | None:
        return await self._cluster.answered(self._directory.claim.remote(claim), f"claim of {claim.key}")

    async def tell(self, messages: Sequence[FromOwner]) -> Sequence[Known | Moved] | None:
        return await self._cluster.answered(self._directory.tell.remote(messages), "word to the directory")

    async def ask_store(self, member: Member, messages: Sequence[ToStore]) -> Sequence[FromStore] | None:
        try:
            store = self._stores.get(member.node)
            if store is None:
                store = await self._cluster.store(member.node)
                self._stores[member.node] = store
        except ValueError:  # it died with its node
            return None
        answers: Sequence[FromStore] | None
        answers = await self._cluster.answered(store.answer.remote(member, messages), f"question to {member}")
        if answers is None:
            self._stores.pop(member.node, None)
        return answers

    async def tell_peer(self, replica: str, message: Offer | Moved) -> None:
        what = f"word to replica {replica} of session {message.key}"
        await self._cluster.answered(self._directory.relay.remote(replica, message), what)

    async def stores(self) -> Sequence[Member] | None:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._seeing, self._registry.stores)
        except Exception as error:  # Ray has no class of its own for a key-value store that does not answer
            log.info("the cluster's key-value store did not answer: %r", error)
            return None

    @property
    def _directory(self) -> Any:
        return self._cluster.directory


assert MAIL_SECONDS < CALL_SECONDS


async def _awaited(answer: Awaitable[T]) -> T:
    return await answer
