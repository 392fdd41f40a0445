"""One stream of a turn's events, whatever becomes of the replica that runs it.

A turn of a session is in its log: whoever owns the session next goes on with it, and is asked for what comes after the
event that was had last. One with an Idempotency-Key is in a session of its own. Any other has no log: its rounds are
kept here, and given to another replica.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from ray.exceptions import RayActorError

from deployment.cluster.transport import Cluster
from deployment.engine.events import Round
from deployment.errors import Refused, RequestError, turn_not_kept
from deployment.event_ids import EventId, parse_event_id
from deployment.keyed_turns import with_session
from deployment.ownership.messages import Placed
from deployment.ownership.words import SessionKey
from deployment.replica_calls import Replicas
from deployment.replica_watch import ReplicaLost
from deployment.session_api import located
from deployment.wire import Closed, Delta, Elsewhere, Moved, NotHere, Opened, Received, Route, Told, TurnRequest

GIVE_UP_SECONDS = 60.0
"""How long a turn is looked for that no replica tells anything of."""

AGAIN_SECONDS = 0.1

Events = AsyncGenerator[Told, None]


@dataclass
class _Reader:
    """What has been passed on. `after`: the last event's id, of a turn with one choice: events of several follow each
    other in another order at each replica. `positions` and `rounds` of each choice, as far as they were told with an
    event; `closed`: choices that are over; `turn`: whose events they are, which may have begun before who reads them
    asked; `draws`: its seed; `sent_to`: who should be asked next, by the word of the one that was asked before;
    `asked`: who said so since the last pause; `lost`: since when nobody tells anything of it."""

    after: str | None = None
    turn: str | None = None
    draws: int | None = None
    closed: set[int] = field(default_factory=set)
    positions: dict[int, int] = field(default_factory=dict)
    rounds: dict[int, list[Round]] = field(default_factory=dict)
    lost: float | None = None
    sent_to: NotHere | None = None
    asked: set[str] = field(default_factory=set)

    async def pause(self) -> None:
        """Unless somebody is named who was not asked just now: two that name each other are not asked in a circle."""
        if self.sent_to is None or self.sent_to.owner in self.asked:
            self.asked.clear()
            await asyncio.sleep(AGAIN_SECONDS)

    def route(self, affinity: str, owner: str | None, placement: Placed | None) -> Route:
        sent, self.sent_to = self.sent_to, None
        if sent is None or sent.owner is None:
            return Route(affinity, owner, placement)
        return Route(affinity, sent.owner, placement, sent_on=sent.full)

    def take(self, told: Told) -> bool:
        """Whether the event is to be passed on: a turn's first one comes again with every new source, and all that was
        told before of a turn without a log, or with several choices."""
        self.lost = None
        if isinstance(told.event, Opened):
            self.draws = told.event.seed
            if self.turn is not None:
                return False
            self.turn = told.event.turn
        elif isinstance(told.event, Delta):
            choice = told.event.choice
            if told.event.position <= self.positions.get(choice, 0):
                return False  # who goes on tells what was told before
            self.positions[choice] = told.event.position
            self.after = told.id if parse_event_id(told.id, "after").choice is None else None
            self.rounds.setdefault(choice, []).extend(told.event.rounds)
        elif isinstance(told.event, Closed):
            if told.event.choice in self.closed:
                return False  # it ended before the replica that ran the others was lost
            self.closed.add(told.event.choice)
        return True

    def gives_up(self) -> bool:
        """Whether the turn has been looked for long enough. How long it was silent before says nothing: it may have
        waited for a lane."""
        now = time.monotonic()
        self.lost = now if self.lost is None else self.lost
        return now - self.lost > GIVE_UP_SECONDS

    @property
    def seen(self) -> EventId | None:
        return parse_event_id(self.after, "after") if self.after else None


class LastingStream:
    def __init__(self, replicas: Replicas, cluster: Cluster) -> None:
        self._replicas = replicas
        self._cluster = cluster

    async def taken(self, turn: TurnRequest) -> Events:
        """Events of a turn, from its first to its last. A refusal is an event."""
        turn, reader = with_session(turn), _Reader()
        while True:
            try:
                if turn.key is not None and reader.turn is not None:
                    events = self.followed(turn.key, reader.turn, reader.seen, None, reader)
                elif turn.key is not None:
                    events = self._begun(turn, turn.key, reader)
                else:
                    events = self._without_log(turn, reader)
                async with aclosing(events):
                    async for told in events:
                        yield told
                return
            except RequestError as error:
                yield Told("", error.refused)
                return
            except _Lost:
                if reader.gives_up():
                    yield _lost()
                    return
                await reader.pause()

    async def followed(
        self, key: SessionKey, turn: str, after: EventId | None, placement: Placed | None, reader: _Reader | None = None
    ) -> Events:
        """A session's turn, running or over: its first event, and all after `after`."""
        reader = _Reader(after=str(after) if after else None) if reader is None else reader
        while True:
            if reader.sent_to is not None and reader.sent_to.owner is not None:
                route = reader.route(str(key), None, None)
            else:
                placement = placement or await located(self._cluster, key)
                if placement is None:
                    raise RequestError(404, "session_not_found", f"session {key.session!r} does not exist", "session")
                route = reader.route(str(key), placement.owner, placement)
            try:
                async with aclosing(self._told(route, key, reader, "follow_turn", key, turn, reader.seen)) as events:
                    async for told in events:
                        yield told
                return
            except _Lost:
                if reader.gives_up():
                    yield _lost()
                    return
            placement = None
            await reader.pause()

    async def _begun(self, turn: TurnRequest, key: SessionKey, reader: _Reader) -> Events:
        placement = await located(self._cluster, key)
        route = reader.route(str(key), placement.owner if placement else None, placement)
        async with aclosing(self._told(route, key, reader, "take_turn", turn)) as events:
            async for told in events:
                yield told

    async def _without_log(self, turn: TurnRequest, reader: _Reader) -> Events:
        """Begun, or gone on with after the rounds that were told: what was drawn beyond them is drawn again, alike."""
        rounds = tuple(tuple(reader.rounds.get(choice, ())) for choice in range(turn.n)) if reader.turn else ()
        route = replace(reader.route(_affinity(turn), None, None), firm=turn.idempotency_key is not None)
        turn = replace(turn, resumed=rounds, draws=reader.draws)
        async with aclosing(self._told(route, None, reader, "take_turn", turn)) as events:
            async for told in events:
                yield told

    async def _told(self, route: Route, key: SessionKey | None, reader: _Reader, method: str, *args: object) -> Events:
        """What the replica that is asked tells, or the one that it names. `key`: the session of the turn. `_Lost` where
        there is more to come, but not from there."""
        where: Elsewhere | None = None
        teller = route.replica  # not who told it before: that one may be gone, and another at work in silence
        route = replace(route, receipt=teller is None)
        told = self._replicas.watch.over(self._replicas.told(method, route, *args), lambda: teller)
        try:
            async with aclosing(told) as answers:
                async for answer in answers:
                    if isinstance(answer, Received):
                        teller = answer.replica
                    elif isinstance(answer, Elsewhere):
                        where = answer
                    elif isinstance(answer, NotHere):
                        reader.sent_to = answer
                        reader.asked.add(answer.replica or teller or "")
                        raise _Lost
                    elif isinstance(answer.event, Moved):
                        reader.sent_to = NotHere("", answer.event.owner)
                        raise _Lost
                    else:
                        if isinstance(answer.event, Opened):
                            teller = answer.event.replica
                        if reader.take(answer):
                            yield answer
        except RayActorError:
            await self._replicas.lost(teller)
            raise _Lost from None
        except ReplicaLost as lost:
            reader.sent_to = await self._replicas.instead(lost.replica, route.affinity)
            raise _Lost from None
        if where is not None:
            async with aclosing(self._kept(where, route, key, reader)) as events:
                async for told in events:
                    yield told

    async def _kept(self, where: Elsewhere, route: Route, key: SessionKey | None, reader: _Reader) -> Events:
        named = Route(route.affinity, where.replica)
        told = self._replicas.told("follow_kept_turn", named, key, where.turn, reader.seen)
        try:
            async with aclosing(self._replicas.watch.over(told, lambda: where.replica)) as answers:
                async for answer in answers:
                    if not isinstance(answer, Told):
                        raise turn_not_kept(where.turn)
                    if reader.take(answer):
                        yield answer
        except (RayActorError, ReplicaLost):
            raise turn_not_kept(where.turn) from None


class _Lost(Exception):
    """The rest of the turn is to be had elsewhere."""


def _affinity(turn: TurnRequest) -> str:
    """What the replica is chosen by where no session's owner is known. The same key finds the replica that runs its
    turn; the same hint finds state."""
    if turn.idempotency_key is not None:
        return f"key/{turn.tenant}/{turn.idempotency_key}"
    return f"hint/{turn.tenant}/{turn.hint}" if turn.hint is not None else turn.turn


def _lost() -> Told:
    message = "the replica that ran this turn is gone, and none goes on with it; what was committed is kept"
    return Told("", Refused(503, "replica_lost", message))
