"""A host store as a Ray actor: one on each node, which outlives every replica of the node. Its arena outlives it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from deployment.cluster.names import GcsValues, directory_name, host_stores, named_actor, store_name, versioned
from deployment.engine.log_lines import LogOptions, log_to_stderr
from deployment.metrics.measured import Room
from deployment.ownership.messages import Bring, Ends, FromStore, Gap, Image, Look, Put, ToStore
from deployment.ownership.registry import Registry
from deployment.ownership.sending import BRING_SECONDS
from deployment.ownership.store import Store
from deployment.ownership.words import NEVER, Member, Order, SessionKey
from state.arena import open_arena
from state.arena_file import arena_path, sweep
from state.errors import StateError

BEAT_SECONDS = 1.0
PART_BYTES = 16 << 20
"""Images travel between nodes in parts, so that one does not hold up everything else that a store is asked."""

PART_SECONDS = 10.0
FORGET_SECONDS = 60.0

log = logging.getLogger("ray.serve")


@ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=10_000)  # pyright: ignore[reportCallIssue]
class HostStoreActor:
    """See `Store`. Raises `ArenaError` where the node has no room for `size` bytes."""

    def __init__(self, app: str, size: int, directory: Path, logs: LogOptions) -> None:
        log_to_stderr(logs.form, logs.level)
        self._app = app
        self._size = size
        self._shared_memory = directory
        self._node = ray.get_runtime_context().get_node_id()
        self._registry = Registry(GcsValues(), versioned(app))
        self._bringing: dict[tuple[SessionKey, Order], asyncio.Task[tuple[tuple[int, ...], bytes]]] = {}
        self._beating: asyncio.Task[None] | None = None
        sweep(directory, {*host_stores(), (versioned(app), self._node)})
        self._arena = open_arena(versioned(app), self._node, size, directory)
        self._store = self._opened()
        # A constructor has no event loop, and after a restart nobody might call for long.
        ray.get_runtime_context().current_actor.beat.remote()

    async def member(self) -> Member:
        return self._store.member

    async def index(self) -> tuple[Any, ...]:
        return self._store.index()

    async def used_by(self, tenant: str) -> int:
        return self._arena.used_by(tenant)

    async def room(self) -> Room:
        return Room(self._arena.size, self._arena.used)

    async def answer(self, to: Member, messages: Sequence[ToStore]) -> list[FromStore]:
        """Answers in the order of the messages, but for images to be fetched, which are left out: ask again. Nothing
        at all to messages for an earlier arena."""
        if to != self._store.member:
            return []
        return [answer for message in messages if (answer := self._answer(message)) is not None]

    async def images(self, key: SessionKey) -> tuple[Image, ...]:
        """The images that agree with the log, oldest first."""
        ends = self._store.answer(Look(key, NEVER))
        return ends.images if isinstance(ends, Ends) else ()

    async def part(self, key: SessionKey, order: Order, offset: int) -> tuple[tuple[int, ...], int, np.ndarray]:
        """Frontiers and size of an image, and its bytes from `offset` on. Raises `StateError` if it is not held."""
        frontiers, document = self._store.document(key, order)
        # A copy: what Ray still sends must not be a view of what the arena may free.
        return frontiers, len(document), np.frombuffer(document[offset : offset + PART_BYTES], np.uint8).copy()

    async def end(self) -> None:
        """Lets go of the arena, and of all that is in it: the application is taken down."""
        if self._beating is not None:
            self._beating.cancel()
        self._discard_arena()

    # An actor that was started again may not find itself under its new address at once.
    @ray.method(max_task_retries=-1)
    async def beat(self) -> None:
        if self._beating is None:
            self._beating = asyncio.create_task(self._keep_beating())

    # -------------------------------------------------------------------------------------------- messages

    def _answer(self, message: ToStore) -> FromStore | None:
        if not isinstance(message, Bring):
            return self._store.answer(message)
        at = message.key, message.order
        task = self._bringing.get(at)
        if task is None:
            task = self._bringing[at] = asyncio.create_task(fetch_image(self._app, message.source, *at))
            task.add_done_callback(lambda task: self._drop_unasked(at, task))
            return None
        if not task.done():
            return None
        del self._bringing[at]
        try:
            frontiers, document = task.result()
        except (RayError, StateError, TimeoutError, ValueError) as error:
            log.warning("store %s could not fetch an image from %s: %s", self._store.member, message.source, error)
            return Gap(self._store.member, message.key, message.epoch, message.order)
        return self._store.answer(Put(message.key, message.epoch, message.order, frontiers, document))

    def _drop_unasked(self, at: tuple[SessionKey, Order], task: asyncio.Task[tuple[tuple[int, ...], bytes]]) -> None:
        """An image that was fetched for somebody who does not ask for it again is let go of."""

        def drop() -> None:
            if self._bringing.get(at) is task:
                del self._bringing[at]

        task.get_loop().call_later(BRING_SECONDS, drop)

    # -------------------------------------------------------------------------------------------- being known

    async def _keep_beating(self) -> None:
        forgotten = time.monotonic()
        while True:
            try:
                if time.monotonic() - forgotten > FORGET_SECONDS:
                    forgotten = time.monotonic()
                    self._store.forget_tombstones(time.time())
                await self._be_known()
            except (RayError, ValueError, TimeoutError) as error:  # it is being started again
                log.info("store %s does not reach the directory: %r", self._store.member, error)
            except Exception:  # one that is not heard of any more is given up, with all that it has
                log.exception("store %s could not make itself known", self._store.member)
            await asyncio.sleep(BEAT_SECONDS)

    async def _be_known(self) -> None:
        directory = await asyncio.to_thread(named_actor, directory_name(self._app))
        member = self._store.member
        if await _within(directory.store_alive.remote(member)):
            return
        if not await _within(directory.store_here.remote(member, self._store.index())):
            self._begin_again()

    def _begin_again(self) -> None:
        """What this arena holds was given up while nobody heard of it: it must never count again."""
        log.warning("store %s is void and begins again with a fresh arena", self._store.member)
        self._discard_arena()
        self._arena = open_arena(versioned(self._app), self._node, self._size, self._shared_memory)
        self._store = self._opened()

    def _discard_arena(self) -> None:
        self._arena.close()
        arena_path(self._shared_memory, versioned(self._app), self._node).unlink(missing_ok=True)

    def _opened(self) -> Store:
        store = Store(self._node, self._arena)
        if not self._arena.keys():
            self._registry.register(store.member)  # a fresh one; to register again changes nothing
        return store


async def fetch_image(app: str, source: Member, key: SessionKey, order: Order) -> tuple[tuple[int, ...], bytes]:
    """Frontiers and bytes of an image in another store. Raises `StateError`, `RayError`, TimeoutError, ValueError."""
    store = await asyncio.to_thread(named_actor, store_name(app, source.node))
    parts: list[bytes] = []
    got, size, frontiers = 0, 1, ()
    while got < size:
        frontiers, size, part = await asyncio.wait_for(_awaited(store.part.remote(key, order, got)), PART_SECONDS)
        parts.append(part.tobytes())
        got += len(part)
    return frontiers, b"".join(parts)


async def _within(answer: Any) -> Any:
    return await asyncio.wait_for(_awaited(answer), 2 * BEAT_SECONDS)


async def _awaited(answer: Any) -> Any:
    return await answer
