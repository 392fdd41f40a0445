"""What is a session that this replica has just taken over? Its newest image, and what its log says after that.

Where its last owner gave it, its state may have come ahead (`deployment/arrivals.py`). An image that cannot be read
leaves a session that cannot be continued now: an older one, or none, would be another past than the published one.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ray.exceptions import RayError

from deployment.answer_text import told_in_all, turn_text
from deployment.arrivals import Arrival, Arrivals
from deployment.cluster.transport import Cluster
from deployment.engine.commands import Drop, Hit, Import
from deployment.engine.errors import EngineError
from deployment.engine.events import Imported
from deployment.engine.service import EngineService
from deployment.errors import session_unavailable
from deployment.metrics.transfers import Transfers
from deployment.ownership.log import Deleted, HeadMoved, Record, TurnBegan
from deployment.ownership.log_format import read_head
from deployment.ownership.messages import Image, Opened
from deployment.ownership.words import Epoch, Member, SessionKey
from deployment.session import Session, engine_id_of
from deployment.session_log import LoggedTurn, living, logged_turns
from deployment.turn_records import turn_record
from state.errors import StateError

log = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Rebuilt:
    """A session as its copies say it. `newest`: the last turn that its log tells, which may have to go on; `arrival`:
    what its last owner sent, if its state was made of that."""

    session: Session
    hit: Hit
    newest: LoggedTurn | None
    arrival: Arrival | None


class Rebuilder:
    """Of one replica. Raises RequestError (503) for a session that cannot be continued now."""

    def __init__(
        self, replica: str, service: EngineService, cluster: Cluster, arrivals: Arrivals, transfers: Transfers
    ) -> None:
        self._replica = replica
        self._service = service
        self._cluster = cluster
        self._arrivals = arrivals
        self._transfers = transfers

    async def rebuilt(self, opened: Opened) -> Rebuilt:
        arrival = self._arrivals.arrived(opened.key, opened.end)
        came = await self._of_arrival(opened, arrival) if arrival is not None else None
        session, hit = came or await self._newest_image(opened)
        said = living(opened.records)
        session.created = bool(opened.images) or any(
            isinstance(record, HeadMoved) and record.turn is None and not record.length for record in said
        )
        booked = {turn.id for turn in session.turns}
        turns = logged_turns(said)
        for turn in turns:
            if turn.began.turn not in booked:
                self._book(session, turn)
        session.order = opened.end.sequence
        if exists(opened):
            session.arrived = time.monotonic()
        return Rebuilt(session, hit, turns[-1] if turns else None, arrival if came is not None else None)

    async def of_document(self, opened: Opened, document: bytes, hit: Hit) -> tuple[Session, Hit]:
        """The session as its document has it, and `hit` if any state of it is on the device now."""
        key, name = opened.key, engine_id_of(opened.key)
        try:
            imported = await self._service.call(Import(_call(), name, document, hit, tenant=key.tenant))
        except EngineError as error:
            raise session_unavailable(key.session, f"its state cannot be loaded ({error})") from None
        assert isinstance(imported, Imported) and imported.record is not None
        if imported.record.id != key.session:
            await self._service.call(Drop(_call(), name))
            raise session_unavailable(key.session, f"its copy is that of session {imported.record.id!r}")
        return self._of_import(opened, imported, hit)

    async def onto_device(self, key: SessionKey, members: Sequence[Member]) -> None:
        """The newest Host replica that any of these stores has. EngineError if it does not fit."""
        for member in members:
            for image in reversed(await self._cluster.images(member, key)):
                document = await self._fetched(member, image, key)
                if document is not None:
                    hit = self._hit_of(member)
                    await self._service.call(Import(_call(), engine_id_of(key), document, hit, tenant=key.tenant))
                    return
        raise session_unavailable(key.session, "no copy of its state was found; send the full history")

    def _book(self, session: Session, turn: LoggedTurn) -> None:
        """What a logged turn that is over has committed: of several choices the first that did, since nothing goes on
        from them. One that committed nothing leaves no trace."""
        ends = [(choice, end) for choice in turn.choices if (end := turn.finished(choice)) is not None]
        said = [(choice, end) for choice, end in ends if end.token_ids or end.hidden_ids]
        if not turn.over or not said:
            return
        choice, finished = said[0]
        request, prompt = turn.request(session.key), turn.prompt(session.media)
        text = turn_text(self._service.tokenizer, request, prompt, choice)
        text.push(finished.token_ids, finished.text_cut)
        text.flush()
        ended_at = max(one.ended.at for one in turn.courses.values() if one.ended is not None)
        record = turn_record(request, self._replica, request.turn, turn.began.seed, None, finished, ended_at)
        session.book(prompt, finished, told_in_all(request, text), record)

    async def _of_arrival(self, opened: Opened, arrival: Arrival) -> tuple[Session, Hit] | None:
        """None if the copies may have more of its state than what came."""
        key, name = opened.key, engine_id_of(opened.key)
        command = Import(_call(), name, arrival.document, "peer", tenant=key.tenant, migration=arrival.migration)
        try:
            imported = await self._service.call(command)
        except EngineError as error:
            log.warning("what came of session %s cannot be loaded: %s", key, error)
            return None
        assert isinstance(imported, Imported)
        if not imported.frontiers and opened.images:
            return None
        return self._of_import(opened, imported, "peer")

    async def _newest_image(self, opened: Opened) -> tuple[Session, Hit]:
        """The newest one that can be read and that the log goes on from; none where the log says all there is."""
        first = read_head(opened.records[0]) if opened.records else None
        begins = opened.end.sequence + 1 if first is None else first.order.sequence
        whole = begins == 1 or (first is not None and first.kind is Deleted)
        for image in reversed(opened.images):
            if image.order.sequence + 1 < begins:
                break
            document = await self._fetched(opened.source, image, opened.key)
            if document is not None and opened.source is not None:
                return await self.of_document(opened, document, self._hit_of(opened.source))
        if opened.images and not whole:
            raise session_unavailable(opened.key.session, "the image that its log begins with cannot be read now")
        return Session(opened.key, opened.epoch), "none"

    async def _fetched(self, source: Member | None, image: Image, key: SessionKey) -> bytes | None:
        if source is None:
            return None
        began = time.perf_counter()
        try:
            document = await self._cluster.image(source, image, key)
        except (RayError, StateError, TimeoutError, ValueError) as error:
            log.warning("an image of session %s could not be read: %s", key, error)
            return None
        self._transfers.fetched(len(document), time.perf_counter() - began)
        return document

    def _hit_of(self, source: Member) -> Hit:
        return "host" if source.node == self._cluster.node else "peer"

    def _of_import(self, opened: Opened, imported: Imported, hit: Hit) -> tuple[Session, Hit]:
        assert imported.record is not None
        session = Session.of_record(opened.key, opened.epoch, imported.record)
        if imported.foreign is not None and imported.foreign.mismatch.matter in ("text", "weights"):
            session.foreign = imported.foreign
        return session, hit if imported.frontiers else "none"


def exists(opened: Opened) -> bool:
    """Whether anything is there; what was deleted, or never began, is not."""
    return bool(opened.images) or any(not _needs_image(record) for record in living(opened.records))


def unfinished(opened: Opened) -> bool:
    """Whether somebody made the session of a past that did not get into its copies: nobody was told that it exists."""
    return not exists(opened) and bool(living(opened.records))


def lacks_image(opened: Opened) -> bool:
    """Whether an older session was to be given new copies, and its owner died before the first of them had it. What its
    log says after that, if anything, is not all of it, unless a turn that began it anew brought its past along."""
    said = living(opened.records)
    if opened.images or not said or not isinstance(said[0], HeadMoved) or said[0].turn is None:
        return False
    following = next((record for record in said if not isinstance(record, HeadMoved) or record.length), None)
    return not isinstance(following, TurnBegan) or following.request["mode"] == "append"


def begun_again(opened: Opened) -> Epoch | None:
    """The epoch under which that began; None if it did not, or if the session has gone on since."""
    said = living(opened.records)
    untouched = lacks_image(opened) and all(isinstance(one, HeadMoved) for one in said)
    return said[0].order.epoch if untouched else None


def _needs_image(record: Record) -> bool:
    """A fork, an import or a session out of the durable tier begins with so many ids, which only its image says."""
    return isinstance(record, HeadMoved) and record.turn is None and record.length > 0


def _call() -> str:
    return secrets.token_hex(8)
