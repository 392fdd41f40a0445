"""The directory as a Ray actor: one for each application, on the head node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from deployment.cluster.fleet import Fleet, Load
from deployment.cluster.names import GcsValues, has_other_directories, remove_other_versions, versioned
from deployment.cluster.serve_states import STOPPING, serve_replicas
from deployment.cluster.strangers import let_in
from deployment.durable_place import default_place
from deployment.durable_store import open_place
from deployment.engine.log_lines import LogOptions, log_to_stderr
from deployment.ownership.directory import Directory
from deployment.ownership.messages import (
    Claim,
    CopiesLost,
    Drain,
    Ends,
    FromOwner,
    Grant,
    Held,
    Join,
    Known,
    Lost,
    Moved,
    Offer,
    Placed,
    Taken,
    Wait,
)
from deployment.ownership.registry import Registry
from deployment.ownership.words import Member, Order, SessionKey
from deployment.publication_orders import logged_at
from deployment.settings import DEFAULT_PLACE
from state.durable import DurableTier
from state.errors import StateError
from state.sweep import Swept

WATCH_SECONDS = 0.5
"""How often nodes and silent replicas are looked after."""

MISSED_SECONDS = 1.5
"""A replica that has not renewed for so long is asked whether it is still there."""

MAIL_SECONDS = 1.0
"""How long a renewal waits for something to say: a replica renews every second."""

PROBE_SECONDS = 2.0
SCAN_SECONDS = 5.0
SWEEP_SECONDS = 3600.0

Mail = Grant | Join | CopiesLost | Offer | Moved | Drain

log = logging.getLogger("ray.serve")


class Replica:
    """A replica as the directory knows it: how to ask whether its process is there, and what it must be told."""

    def __init__(self, handle: Any, now: float) -> None:
        self.handle = handle
        self.renewed = now
        self.mail: dict[tuple[type, SessionKey | None], Mail] = {}
        self.has_mail = asyncio.Event()
        self.probe: asyncio.Task[None] | None = None

    def tell(self, message: Mail) -> None:
        """With the next answer to a renewal. What was said of the same thing before says nothing any more."""
        self.mail[type(message), None if isinstance(message, Drain) else message.key] = message
        self.has_mail.set()


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=10_000)  # pyright: ignore[reportCallIssue]
class DirectoryActor:
    """See `Directory`. Replicas get what it has to say as answers to their renewals."""

    def __init__(self, app: str, durable: str | None, key_env: str | None, logs: LogOptions) -> None:
        """`durable`: the place of the durable tier, whose ids are known from its first scan on; the default one is this
        node's. `key_env`: see `open_place`."""
        log_to_stderr(logs.form, logs.level)
        self._app = app
        self._durable = default_place(app) if durable == DEFAULT_PLACE else durable
        self._key_env = key_env
        self._resumed: tuple[int, str] | None = None
        self._scanned = asyncio.Event()
        self._directory = Directory(Registry(GcsValues(), versioned(app)), time.time(), time.monotonic())
        self._replicas: dict[str, Replica] = {}
        self._fleet = Fleet()
        self._stopping: set[str] = set()
        self._alone = self._warned = False
        self._watching: asyncio.Task[None] | None = None
        self._look: asyncio.Task[None] | None = None
        self._looked = 0.0
        # A constructor has no event loop, and after a restart nobody might call for long.
        ray.get_runtime_context().current_actor.watch.remote()

    # -------------------------------------------------------------------------------------------- host stores

    async def store_here(self, member: Member, index: Sequence[Ends]) -> bool:
        counts = self._directory.store_here(member, index, time.monotonic())
        self._reconcile()
        return counts

    async def store_alive(self, member: Member) -> bool:
        return self._directory.store_alive(member, time.monotonic())

    # -------------------------------------------------------------------------------------------- replicas

    async def renew(
        self, replica: str, node: str, handle: Any, reports: Sequence[Held | Grant], load: Load
    ) -> list[Mail]:
        """A replica's lease. Answers when there is something to say, or after `MAIL_SECONDS`."""
        now = time.monotonic()
        known = self._replicas.setdefault(replica, Replica(handle, now))
        known.renewed = now
        self._fleet.renewed(replica, load, now)
        self._directory.renew(replica, node, reports, now)
        self._reconcile()
        if not known.mail:
            known.has_mail.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(known.has_mail.wait(), MAIL_SECONDS)
        mail = list(known.mail.values())
        known.mail.clear()
        return mail

    async def claim(self, claim: Claim) -> Grant | Taken | Wait | Lost:
        answer = self._directory.claim(claim, time.monotonic())
        self._reconcile()
        return answer

    async def tell(self, messages: Sequence[FromOwner]) -> list[Known | Moved]:
        """What an owner says is heard, and what it must hear of that is the answer."""
        now = time.monotonic()
        answers = [self._directory.told(message, now) for message in messages]
        self._reconcile()
        return [answer for answer in answers if answer is not None]

    async def relay(self, replica: str, message: Offer | Moved) -> None:
        """One replica's word to another one, which may be beyond Serve's reach because it is about to go."""
        known = self._replicas.get(replica)
        if known is not None:
            known.tell(message)

    async def suspect(self, replica: str) -> bool:
        """Somebody's call to a replica has failed. Whether it is gone, as its own node says."""
        known = self._replicas.get(replica)
        if known is None:
            return False
        await self._probe(replica, known)
        return replica not in self._replicas

    # -------------------------------------------------------------------------------------------- questions

    async def locate(self, key: SessionKey) -> Placed | Wait | None:
        return self._directory.locate(key, time.monotonic())

    async def sessions(self, tenant: str) -> tuple[Placed, ...]:
        return self._directory.sessions(tenant, time.monotonic())

    async def unowned(self, beginning: str) -> tuple[Placed, ...]:
        return self._directory.unowned(beginning, time.monotonic())

    async def staying(self, beside: str) -> tuple[str, ...]:
        """Replicas that may be given sessions, but for `beside`. Where an application ends as a whole, none may."""
        # Who names one may be that one, about to go and give its sessions away: what was seen before says too little.
        await self._look_at_serve(0.0 if beside else WATCH_SECONDS)
        return self._fleet.staying(time.monotonic(), beside)

    async def with_room(self, beside: str) -> str | None:
        """A replica, other than `beside`, where a turn would begin at once."""
        return self._fleet.with_room(beside, time.monotonic())

    async def resumed(self) -> tuple[int, str] | None:
        """How many sessions a new cluster has found in its durable tier, and where that is; None of a cluster that is
        not new, or has no such tier. Waits for the first scan."""
        await self._scanned.wait()
        return self._resumed

    async def is_lost(self, replica: str) -> bool:
        """Whether others may take over from a replica: it exited, died with its node, or its lease has run out. One
        that was never heard of may renew with the directory of another version, if there is any."""
        if not self._directory.knows(replica) and await asyncio.to_thread(has_other_directories, self._app):
            return False
        return not self._directory.may_act(replica, time.monotonic())

    async def is_stopping(self, replica: str) -> bool:
        """Whether Serve is ending a replica of the application, an ingress included."""
        return replica in self._stopping

    # -------------------------------------------------------------------------------------------- watching

    def _reconcile(self) -> None:
        for replica, message in self._directory.reconcile(time.monotonic()):
            known = self._replicas.get(replica)
            if known is not None:
                known.tell(message)

    async def watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.create_task(self._keep_watching())
            self._scanning = asyncio.create_task(self._scan_durable())
            self._looking = asyncio.create_task(self._keep_looking_at_serve())

    async def _scan_durable(self) -> None:
        """Which sessions the durable tier has; and now and then what nothing needs there any more goes."""
        ids = await self._durable_ids()
        self._directory.durable_ids(ids)
        if self._durable is not None and self._directory.is_first:
            self._resumed = len(ids), self._durable
            if ids:
                log.warning("resumed %d sessions from %s", *self._resumed)
        self._scanned.set()
        while self._durable is not None:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                swept = await asyncio.to_thread(_sweep, self._durable, self._key_env)
                log.info("the durable tier was swept: %s", swept)
            except StateError as error:
                log.warning("the durable tier could not be swept: %s", error)

    async def _scan_again(self) -> None:
        """What another version has made durable since the first scan, up to its end."""
        self._directory.durable_ids(await self._durable_ids())

    async def _durable_ids(self) -> list[tuple[SessionKey, Order]]:
        """Waits for a tier that cannot be read."""
        while self._durable is not None:
            try:
                return await asyncio.to_thread(_durable_sessions, self._durable, self._key_env)
            except StateError as error:
                log.warning("the durable tier cannot be read, and is tried again: %s", error)
                await asyncio.sleep(SCAN_SECONDS)
        return []

    async def _keep_watching(self) -> None:
        while True:
            try:
                await self._look_around()
            except Exception:  # a question to the GCS that failed is asked again
                log.exception("the directory could not look after its nodes")
            await asyncio.sleep(WATCH_SECONDS)

    async def _look_around(self) -> None:
        nodes: Any = await asyncio.to_thread(ray.nodes)
        if not self._warned and (why := let_in(nodes)) is not None:
            self._warned = True
            log.warning("%s", why)
        for node in nodes:
            if not node["Alive"]:
                self._directory.node_died(node["NodeID"], time.monotonic())
        now = time.monotonic()
        for replica, known in list(self._replicas.items()):
            if now - known.renewed > MISSED_SECONDS and (known.probe is None or known.probe.done()):
                known.probe = asyncio.create_task(self._probe(replica, known))
        self._reconcile()

    async def _keep_looking_at_serve(self) -> None:
        while True:
            try:
                await self._look_at_serve()
            except Exception:  # the next look may see more
                log.exception("the directory could not look after the application's replicas")
            await asyncio.sleep(WATCH_SECONDS)

    async def _look_at_serve(self, age: float = 0.0) -> None:
        """Shares a look that others wait for, or that began less than `age` seconds ago: each asks Serve's controller,
        and requests may ask for one by the thousand."""
        now = time.monotonic()
        if self._look is None or (self._look.done() and now - self._looked >= age):
            self._looked, self._look = now, asyncio.create_task(self._look_now())
        await asyncio.shield(self._look)

    async def _look_now(self) -> None:
        replicas = await serve_replicas(self._app)
        if replicas is None:
            return
        self._stopping = {one.replica for one in replicas if one.state == STOPPING}
        self._fleet.look(replicas)
        for replica, drain in self._fleet.drains(time.monotonic()):
            self._replicas[replica].tell(drain)
        if not self._alone and self._fleet.has_all(replicas):
            self._alone = True
            ended = await asyncio.to_thread(remove_other_versions, self._app)
            if ended:
                log.warning("%d actors of other protocol versions ended: no replica uses them any more", ended)
                self._scanning_again = asyncio.create_task(self._scan_again())

    async def _probe(self, replica: str, known: Replica) -> None:
        """An actor whose process has ended fails at once; one on a node that cannot be reached says nothing, or that it
        is unavailable, and may be there again."""
        try:
            await asyncio.wait_for(known.handle.__ray_ready__.remote(), PROBE_SECONDS)
        except (ActorUnavailableError, TimeoutError):
            pass
        except RayActorError:
            self._replicas.pop(replica, None)
            self._fleet.gone(replica)
            self._directory.replica_exited(replica)
            self._reconcile()


def _durable_sessions(place: str, key_env: str | None) -> list[tuple[SessionKey, Order]]:
    return [(publication.key, logged_at(publication.order)) for publication in _tier(place, key_env).sessions()]


def _sweep(place: str, key_env: str | None) -> Swept:
    return _tier(place, key_env).sweep()


def _tier(place: str, key_env: str | None) -> DurableTier:
    """For reading names and sweeping: nothing is published with it."""
    return DurableTier(open_place(place, key_env), 0, lambda document: None)
