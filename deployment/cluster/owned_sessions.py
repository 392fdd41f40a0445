"""The sessions that a replica owns: one `Owner` machine each, and the messages between them, directory and stores.

Everything runs on one event loop. A round of all lanes costs one call to each store (`outbox.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deployment.cluster.not_owned import NoCopyLeft, NotNow, NotOwned, OwnedElsewhere
from deployment.cluster.outbox import Outbox
from deployment.cluster.reach import FromOthers, Transport
from deployment.ownership.log import Numbered
from deployment.ownership.messages import (
    Claim,
    Committed,
    CopiesLost,
    Drain,
    Fenced,
    FromStore,
    Grant,
    Join,
    Known,
    Lost,
    Moved,
    NoRoom,
    Offer,
    Opened,
    Taken,
    ToReplica,
    Unavailable,
    Wait,
)
from deployment.ownership.owner import Owner, State
from deployment.ownership.sending import DIRECTORY, HERE, Peer, Send
from deployment.ownership.standing import Standing
from deployment.ownership.words import Epoch, Member, Order, SessionKey
from state.errors import FormatError, StateError

TICK_SECONDS = 0.25
SEE_SECONDS = 1.0
TAKE_SECONDS = 30.0
"""How long a session's takeover may take before whoever asked is told to ask again."""

log = logging.getLogger("ray.serve")


@dataclass
class _Owned:
    owner: Owner
    opened: Opened | None = None
    committed: int = 0
    end: NotOwned | None = None
    waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return self.opened is not None and self.owner.state is not State.TAKING

    async def until(self, true: Callable[[], bool]) -> None:
        """Waits until `true()`, or until this replica is not the owner any more."""
        if true() or self.end is not None:
            return
        entry = true, asyncio.get_running_loop().create_future()
        self.waiting.append(entry)
        try:
            await entry[1]
        finally:
            self.waiting.remove(entry)

    def changed(self) -> None:
        for true, future in self.waiting:
            if not future.done() and (true() or self.end is not None):
                future.set_result(None)


class OwnedSessions:
    """`fenced` is called when a session is lost to another owner while this replica believed to have it; `copies_lost`
    when no copy of it is left, with the epoch under which it was this replica's, if it was; `opened` when one is open
    again under a new epoch; `no_room` when a store cannot take what it was given; `offered` when another
    replica would give a session; `drain` when all are to go elsewhere."""

    def __init__(
        self,
        replica: str,
        node: str,
        transport: Transport,
        *,
        opened: Callable[[Opened], None],
        fenced: Callable[[SessionKey], None],
        copies_lost: Callable[[SessionKey, Epoch | None], None],
        no_room: Callable[[NoRoom], None],
        offered: Callable[[Offer], None],
        drain: Callable[[Drain], None],
    ) -> None:
        self._replica = replica
        self._node = node
        self._transport = transport
        self._on_opened = opened
        self._on_fenced = fenced
        self._on_copies_lost = copies_lost
        self._on_no_room = no_room
        self._on_offered = offered
        self._on_drain = drain
        self._owned: dict[SessionKey, _Owned] = {}
        self._standing = Standing()
        self._doubt = asyncio.Event()
        self._outbox = Outbox(transport, self._answered, self._directed, self._spawn)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """From the replica's event loop."""
        self._spawn(self._see())
        self._spawn(self._renew())
        self._spawn(self._tick())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    # -------------------------------------------------------------------------------------------- what is owned

    def __contains__(self, key: SessionKey) -> bool:
        owned = self._owned.get(key)
        ended = owned is None or owned.end is not None or owned.owner.state is State.DELETED
        return owned is not None and owned.opened is not None and not ended

    def members(self, key: SessionKey) -> tuple[Member, ...]:
        """The stores that hold its copies."""
        owned = self._owned.get(key)
        return owned.owner.grant.members if owned is not None and owned.owner.grant is not None else ()

    def alone(self, key: SessionKey) -> bool:
        """Whether it is to be in one store, and nowhere else."""
        owned = self._owned.get(key)
        return owned is not None and owned.owner.grant is not None and owned.owner.grant.alone

    def logged(self, key: SessionKey) -> int:
        """Bytes of all that its log was told, in one copy; 0 for one that is not this replica's."""
        owned = self._owned.get(key)
        return owned.owner.logged if owned is not None else 0

    async def take(
        self,
        key: SessionKey,
        *,
        given: Epoch | None = None,
        offered_by: str | None = None,
        anew: bool = False,
        holds: Epoch | None = None,
        alone: bool = False,
        first: Numbered | None = None,
    ) -> Opened:
        """Makes this replica the owner; `first` as in `Owner`, the rest as in `Claim`. Raises `OwnedElsewhere`,
        `NoCopyLeft`, `NotNow`."""
        owned = self._owned.get(key)
        if owned is None or owned.end is not None or owned.owner.state is State.DELETED:
            tenure = f"{self._replica}/{secrets.token_hex(8)}"
            owned = self._owned[key] = _Owned(Owner(key, self._replica, tenure, self._standing, offered_by, first))
        deadline = time.monotonic() + TAKE_SECONDS
        try:
            if owned.opened is None:
                claim = Claim(key, self._replica, owned.owner.tenure, self._node, given, anew, holds, alone)
                await self._claim(owned, claim, deadline)
            async with asyncio.timeout(deadline - time.monotonic()):
                await owned.until(lambda: owned.is_open and owned.owner.stands(time.monotonic()))
        except TimeoutError:
            self._forget_unopened(owned)
            raise NotNow(f"session {key}: its copies did not answer within {TAKE_SECONDS:.0f} s") from None
        except NotOwned:
            self._forget_unopened(owned)
            raise
        except asyncio.CancelledError:
            if owned.owner.grant is None:
                self._forget_unopened(owned)
            raise
        if owned.end is not None:
            self._forget_unopened(owned)
            raise owned.end
        assert owned.opened is not None
        return owned.opened

    def loaded(self, opened: Opened) -> bool:
        """The replica has made its own state what `opened` said, and may append. False: the session was opened again
        meanwhile, and is to be made anew of what `take` says now. Raises `NotOwned`."""
        owned = self._mine(opened.key)
        if owned.opened is not opened or owned.owner.state is not State.OPEN:
            return False
        if not owned.owner.stands(time.monotonic()):
            return False  # others may have begun it anew while its state was made
        owned.owner.loaded()
        owned.opened = replace(opened, records=(), images=())  # the replica has them now
        return True

    def append(self, key: SessionKey, records: Sequence[Numbered]) -> int:
        """Sends records to all copies, in this order, and returns the sequence of the last one: see `committed`.

        Raises `NotOwned`, `FormatError` for a record that cannot be encoded.
        """
        owned = self._mine(key)
        try:
            sends = owned.owner.append(records, time.monotonic())
        except FormatError:
            raise
        except StateError as error:
            raise NotOwned(str(error)) from None
        self._dispatch(owned, sends)
        return owned.owner.last.sequence

    async def committed(self, key: SessionKey, sequence: int) -> None:
        """Waits until all copies hold the records up to `sequence`. Raises `NotOwned` if that cannot be any more."""
        owned = self._mine(key)
        await owned.until(lambda: owned.committed >= sequence)
        if owned.committed < sequence and owned.end is not None:
            raise owned.end

    def end(self, key: SessionKey) -> Order:
        """Of the last record that all copies hold. Raises `NotOwned`."""
        return self._mine(key).owner.committed

    async def kept(self, key: SessionKey) -> None:
        """Waits until all copies hold the image that was published last. Raises `NotOwned` if that is not this
        replica's to say any more."""
        owned = self._mine(key)
        await owned.until(lambda: owned.owner.published)
        if owned.end is not None:
            raise owned.end

    async def heard(self, key: SessionKey) -> None:
        """Waits until the directory has heard all that there is to say of a session."""
        await self._outbox.heard(key)

    async def offered(self, key: SessionKey) -> bool:
        """Waits until it is known what became of an offer. Whether the session is another replica's now."""
        owned = self._mine(key)
        await owned.until(lambda: owned.owner.state is not State.OFFERED)
        return owned.end is not None

    def publish(self, key: SessionKey, sequence: int, frontiers: tuple[int, ...], document: object, keep: int) -> None:
        """Gives an image as of the record `sequence` to all copies, in the background. Raises `NotOwned`, `StateError`
        for one of what is not committed."""
        owned = self._mine(key)
        now = time.monotonic()
        self._dispatch(owned, owned.owner.publish(sequence, frontiers, document, keep, now))

    def offer(self, key: SessionKey, destination: str) -> None:
        """Raises `NotOwned`, `StateError` while receipts are missing."""
        owned = self._mine(key)
        self._dispatch(owned, owned.owner.offer(destination, time.monotonic()))

    def forget(self, key: SessionKey) -> None:
        """The replica has no use for the session any more. It stays the owner for others until somebody claims it. One
        that is just being taken, as under a name that was free again, is another one."""
        owned = self._owned.get(key)
        if owned is not None and (owned.opened is not None or owned.end is not None):
            del self._owned[key]

    # -------------------------------------------------------------------------------------------- inside

    def _mine(self, key: SessionKey) -> _Owned:
        owned = self._owned.get(key)
        if owned is None or owned.opened is None:
            raise NotOwned(f"session {key} is not owned by replica {self._replica}")
        if owned.end is not None:
            raise owned.end
        return owned

    async def _claim(self, owned: _Owned, claim: Claim, deadline: float) -> None:
        while owned.owner.grant is None and owned.end is None:
            match await self._transport.claim(claim):
                case Grant() as grant:
                    self._granted(owned, grant)
                    return
                case Taken(owner=owner):
                    raise OwnedElsewhere(claim.key, owner)
                case Lost():
                    raise NoCopyLeft(f"session {claim.key}: no copy of it that counts is left")
                case Wait(seconds=seconds):
                    await asyncio.sleep(min(seconds, 0.25))
                case _:
                    await asyncio.sleep(0.1)
            if time.monotonic() > deadline:
                raise NotNow(f"session {claim.key}: the directory does not know enough yet")

    def _granted(self, owned: _Owned, grant: Grant) -> None:
        now = time.monotonic()
        self._dispatch(owned, owned.owner.granted(grant, now))
        if not owned.owner.stands(now):
            self._doubt.set()

    def _forget_unopened(self, owned: _Owned) -> None:
        if owned.opened is None and self._owned.get(owned.owner.key) is owned:
            del self._owned[owned.owner.key]

    def _dispatch(self, owned: _Owned, sends: Sequence[Send]) -> None:
        for send in sends:
            match send.to:
                case Member() as member:
                    self._outbox.ask(member, send.message)  # pyright: ignore[reportArgumentType]
                case Peer(replica=replica):
                    self._spawn(self._transport.tell_peer(replica, send.message))  # pyright: ignore[reportArgumentType]
                case _ if send.to == DIRECTORY:
                    self._outbox.tell(send.message)  # pyright: ignore[reportArgumentType]
                case _:
                    assert send.to == HERE
                    self._here(owned, send.message)  # pyright: ignore[reportArgumentType]

    def _here(self, owned: _Owned, message: ToReplica) -> None:
        key = owned.owner.key
        match message:
            case Opened():
                owned.opened = message
                self._on_opened(message)
            case Committed(sequence=sequence):
                owned.committed = max(owned.committed, sequence)
            case Fenced(seal=seal):
                owned.end = NotOwned(f"session {key} has an owner under epoch {seal}")
                self._on_fenced(key)
            case Unavailable(reason=reason, holds=holds):
                owned.end = NoCopyLeft(f"session {key}: {reason}")
                self._on_copies_lost(key, holds)
            case NoRoom():
                self._on_no_room(message)
        owned.changed()

    # -------------------------------------------------------------------------------------------- what comes

    def _answered(self, answer: FromStore) -> None:
        owned = self._owned.get(answer.key)
        if owned is not None:
            self._dispatch(owned, owned.owner.received(answer, time.monotonic()))
            owned.changed()

    async def _renew(self) -> None:
        while True:
            reports = [report for owned in self._owned.values() if (report := owned.owner.report) is not None]
            sent = time.monotonic()
            messages = await self._transport.renew(reports)
            for message in messages or ():
                self._directed(message)
            # An answer that came at once had something to say; otherwise the directory has waited for us.
            if messages is None:
                await asyncio.sleep(max(0.0, 0.5 - (time.monotonic() - sent)))

    def _directed(self, message: FromOthers) -> None:
        now = time.monotonic()
        match message:
            case Drain():
                self._on_drain(message)
            case Offer():
                self._on_offered(message)
            case _ if (owned := self._owned.get(message.key)) is None:
                pass
            case Grant():
                self._granted(owned, message)
            case Join():
                self._dispatch(owned, owned.owner.join(message, now))
            case CopiesLost():
                self._dispatch(owned, owned.owner.copies_lost(message))
            case Moved():
                self._dispatch(owned, owned.owner.moved(message))
            case Known():
                self._dispatch(owned, owned.owner.known(message, now))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            for owned in list(self._owned.values()):
                self._dispatch(owned, owned.owner.tick(now))
                owned.changed()

    async def _see(self) -> None:
        """Every second, and when a session is granted whose stores were not seen yet. An answer that comes late says
        nothing any more."""
        while True:
            self._doubt.clear()
            asked = time.monotonic()
            counting = await self._transport.stores()
            if counting is not None:
                self._standing.seen(counting, asked)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._doubt.wait(), SEE_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a part of the session owner failed", exc_info=task.exception())
