"""How does what an engine holds become durable, and how is it found there again? The engine's side of the durable tier.

What a publication needs of the device is read on the engine's thread, some of it at a time, while the checkpoints are
there; writing it is a background writer's work. Pages that were hashed before are not hashed again, and what is known
to be stored is not read: a turn costs what it added. A turn whose state need not follow yet costs its record alone: the
document then names the state that was written before, of the same session under the same epoch: after a delete its id
may come back. So does that of a session whose state the device has let go of: what is written never says less than what
was.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from deployment.engine.counts import Flow
from deployment.engine.durable_reading import Reading
from state.background import BackgroundWriter, Job, Superseded
from state.byte_store import Bytes
from state.checkpoint import Checkpoint
from state.codec import DetachedSegment, DetachedSession, SegmentDigests, encode_carried, encode_detached
from state.durable import DurableTier, Published
from state.errors import FormatError, MissingSegment, StateError
from state.fingerprint import Fingerprint
from state.manifest import Segment
from state.media import begun, page_keys
from state.memory import StateMemory
from state.names import Epoch, Order, SessionKey
from state.publication_record import StoredCheckpoint, StoredSegment
from state.session_record import SessionRecord

logger = logging.getLogger(__name__)

Outcome = Published | Superseded | Exception
"""What became of a publication; it is durable if this is `Published`."""

KindsAt = tuple[tuple[str, int], ...]
"""Kind and frontier of each of a session's checkpoints."""

REMEMBERED = 1 << 16
"""Segments that are known to be stored; of more than that, some are read once more than needed."""

REMEMBERED_SESSIONS = 1 << 12
"""Sessions whose written state is known; of more than that, some write state with a record that could do without."""


MEDIA_SECONDS = 1e12
"""What a session's media count as worth in seconds of prefill: more than any state."""

_Kept = tuple[Checkpoint, tuple[Segment, ...]]


@dataclass(frozen=True)
class _Written:
    """State that a publication brought. `session`: as the engine knows it; `epoch`: under which it was published;
    `made_by`: what computed it; `signed`: whether as this cluster's own."""

    session: str
    epoch: Epoch
    made_by: Fingerprint
    signed: bool
    kept: tuple[_Kept, ...]

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return tuple(checkpoint for checkpoint, _ in self.kept)


@dataclass(frozen=True)
class Waiting:
    """A publication that waits to be written. `state`: the checkpoints that it names; `read`: bytes of segments that
    were read of the device for it; not `whole`: there are more, and it waits to be asked for them."""

    state: KindsAt
    read: int
    whole: bool


@dataclass(frozen=True)
class _Prepared:
    """A publication that is being read. `waiting`: segments that are held for one that is to be written before it;
    `whole`: see `_Publication`."""

    order: Order
    document: DetachedSession
    state: _Written
    reading: Reading
    waiting: Mapping[bytes, Bytes]
    whole: bool = True


@dataclass(frozen=True, eq=False)
class _Publication:
    """What is written later, without the device. `state`: the checkpoints that the document names, with their segments;
    `media`: the segments of its media. `held`: segments by digest, all that were not known to be stored. `whole`: state
    that should have gone with it did."""

    key: SessionKey
    order: Order
    document: bytes
    state: _Written
    media: tuple[Segment, ...]
    held: Mapping[bytes, Bytes]
    whole: bool

    def read(self, sha256: bytes) -> Bytes:
        if sha256 not in self.held:
            raise MissingSegment("stored before", sha256)
        return self.held[sha256]


class DurableSessions:
    """One engine's. `publish` is called by the engine's thread only."""

    def __init__(
        self,
        tier: DurableTier,
        writer: BackgroundWriter,
        token_seconds: float,
        done: Callable[[SessionKey, Order, Outcome, KindsAt], None],
    ) -> None:
        """`token_seconds`: what it takes to prefill a token, which says what a checkpoint is worth. `done` is called
        by the writer's thread, once for each publication; it must not block or raise. It is told which checkpoints the
        tier has of the session now, if it was published."""
        self._tier = tier
        self._writer = writer
        self._token_seconds = token_seconds
        self._done = done
        self._stored: dict[bytes, None] = {}
        self._written: dict[SessionKey, _Written] = {}
        self._coming: dict[SessionKey, list[_Publication]] = {}
        """Of each session those that have no outcome yet, the newest last."""
        self._prepared: dict[SessionKey, _Prepared] = {}
        self._lock = threading.Lock()
        self.flow_out = self.flow_in = Flow()
        """What was written and read so far."""

    def segment(self, sha256: bytes) -> bytes | None:
        """A stored segment. None: it is not there, or was damaged. `StoreError` where the store cannot say."""
        began = time.perf_counter()
        try:
            data = self._tier.segment(sha256)
        except FormatError as error:
            logger.warning("a stored segment is lost: %s", error)
            return None
        if data is not None:
            self.flow_in = self.flow_in.plus(len(data), time.perf_counter() - began)
        return data

    def publish(
        self,
        memory: StateMemory,
        digests: SegmentDigests,
        session: str,
        key: SessionKey,
        order: Order,
        checkpoints: Sequence[Checkpoint],
        record: SessionRecord,
        fingerprint: Fingerprint,
        signing_key: bytes | None,
        record_alone: bool = False,
        slice_bytes: int | None = None,
    ) -> Waiting:
        """Raises `CapacityError` if too many sessions wait; where too many bytes of theirs do, the record goes without
        state that is not written yet, and the outcome has no `payload`. `digests`: those of the memory, so that nothing
        is hashed again that went to a copy of the session before.

        The state that was written last, or still waits to be, stays as it is, and nothing is read of the device, where
        `checkpoints` are further from the record's end than that; and where the record goes alone, `record_alone`:
        without such a state, the device's goes with it all the same. `slice_bytes`: see `Publish`.
        """
        prepared = self._prepared.pop(key, None)
        if prepared is None or prepared.order != order or not prepared.reading.stands(memory):
            prepared = self._prepare(
                memory, digests, session, key, order, checkpoints, record, fingerprint, signing_key, record_alone
            )
        whole = prepared.reading.read(slice_bytes)
        if whole:
            self._submit(key, prepared)
        else:
            self._prepared[key] = prepared
        return Waiting(_kinds_at(prepared.state), prepared.reading.taken, whole)

    def _prepare(
        self,
        memory: StateMemory,
        digests: SegmentDigests,
        session: str,
        key: SessionKey,
        order: Order,
        checkpoints: Sequence[Checkpoint],
        record: SessionRecord,
        fingerprint: Fingerprint,
        signing_key: bytes | None,
        record_alone: bool,
    ) -> _Prepared:
        known, waiting = self._known(key, order.epoch, fingerprint)

        def carried(state: _Written) -> _Prepared:
            its_key = signing_key if state.signed else None
            document = encode_carried(memory, state.kept, record, fingerprint, its_key, digests)
            return _Prepared(order, document, state, Reading((), self._unknown(document.of_media())), waiting)

        def fresh(checkpoints: Sequence[Checkpoint]) -> _Prepared:
            document = encode_detached(memory, checkpoints, record, fingerprint, signing_key, digests, keep_bytes=True)
            kept = _kept(checkpoints, document)
            state = _Written(session, order.epoch, fingerprint, signing_key is not None, kept)
            missing = [segment for segment in self._unknown(document.segments) if segment.sha256 not in waiting]
            return _Prepared(order, document, state, Reading(checkpoints, missing), waiting)

        if known is not None and (record_alone or not _nearer(checkpoints, known.checkpoints, record)):
            return carried(known)
        prepared = fresh(checkpoints)
        beside = sum(other.reading.size for other in self._prepared.values())
        if not prepared.reading.left or self._writer.has_room(key, beside):
            return prepared
        logger.warning("session %s becomes durable without its newest state: too much waits to be written", key)
        return replace(fresh(()) if known is None else carried(known), whole=False)

    def _submit(self, key: SessionKey, prepared: _Prepared) -> None:
        document = prepared.document
        media = tuple(Segment(segment.size, segment.sha256) for segment in document.of_media())
        names, waiting = (segment.sha256 for segment in document.segments), prepared.waiting
        held = {name: waiting[name] for name in names if name in waiting} | prepared.reading.held
        publication = _Publication(key, prepared.order, document.document, prepared.state, media, held, prepared.whole)
        write, ended = partial(self._write, publication), partial(self._ended, publication)
        with self._lock:
            self._coming.setdefault(key, []).append(publication)
        try:
            self._writer.submit(Job(key, prepared.order, write, ended, sum(map(len, held.values()))))
        except StateError:
            with self._lock:
                self._has_ended(publication)
            raise

    def forget(self, session: str) -> None:
        """The session has no state any more, or another one: what was written of it goes with no further record, nor
        does what is still to be."""
        with self._lock:
            for key in [key for key, written in self._written.items() if written.session == session]:
                del self._written[key]
            for key in [key for key, coming in self._coming.items() if coming[-1].state.session == session]:
                del self._coming[key]
        for key in [key for key, prepared in self._prepared.items() if prepared.state.session == session]:
            del self._prepared[key]

    def _unknown(self, segments: Sequence[DetachedSegment]) -> list[DetachedSegment]:
        """Those that are not known to be stored."""
        with self._lock:
            return [segment for segment in segments if segment.sha256 not in self._stored]

    def _known(
        self, key: SessionKey, epoch: Epoch, made_by: Fingerprint
    ) -> tuple[_Written | None, Mapping[bytes, Bytes]]:
        """What may stand beside a new record, and those of its segments that wait to be written: a record that comes
        later must not bring back the state before."""
        with self._lock:
            coming = self._coming.get(key)
            newest = coming[-1] if coming and coming[-1].state.kept else None
            state, waiting = (newest.state, newest.held) if newest is not None else (self._written.get(key), {})
        fits = state is not None and (state.epoch, state.made_by) == (epoch, made_by)
        return (state, waiting) if fits else (None, {})

    def _has_ended(self, publication: _Publication) -> bool:
        """Takes a publication off the list. False: what is known of its session is of another one by now."""
        coming = self._coming.get(publication.key, [])
        if publication not in coming:
            return False
        coming.remove(publication)
        if not coming:
            del self._coming[publication.key]
        return True

    def _described(self, kept: Sequence[_Kept]) -> tuple[StoredCheckpoint, ...]:
        among = [checkpoint for checkpoint, _ in kept]
        return tuple(
            StoredCheckpoint(
                id=checkpoint.id,
                ancestor=_ancestor(checkpoint, among),
                seconds=checkpoint.frontier * self._token_seconds,
                segments=tuple(StoredSegment(segment.sha256, segment.size) for segment in segments),
            )
            for checkpoint, segments in kept
        )

    def _write(self, publication: _Publication) -> Published:
        key, order, document = publication.key, publication.order, publication.document
        media = _described_media(publication.media)

        def publish(described: tuple[StoredCheckpoint, ...]) -> Published:
            began = time.perf_counter()
            published = self._tier.publish(key, order.epoch, order.sequence, document, described, publication.read)
            self.flow_out = self.flow_out.plus(published.written, time.perf_counter() - began)
            return published

        try:
            return publish((*media, *self._described(publication.state.kept)))
        except MissingSegment as error:
            # The store let go of it in the meantime. The ledger must not wait for the turn that writes it again.
            logger.info("session %s becomes durable without its state: %s", key, error)
        try:
            return replace(publish(media), payload=False)
        except MissingSegment as error:
            logger.warning("session %s becomes durable without its media: %s", key, error)
            return replace(publish(()), payload=False)

    def _ended(self, publication: _Publication, outcome: Outcome) -> None:
        digests = {segment.sha256 for _, segments in publication.state.kept for segment in segments}
        digests |= {segment.sha256 for segment in publication.media}
        with self._lock:
            if self._has_ended(publication) and isinstance(outcome, Published):
                self._written.pop(publication.key, None)
                if outcome.payload and publication.state.kept:
                    self._written[publication.key] = publication.state
            for digest in digests if outcome != "superseded" else ():
                self._stored.pop(digest, None)
                if isinstance(outcome, Published) and outcome.payload:
                    self._stored[digest] = None
            while len(self._stored) > REMEMBERED:
                del self._stored[next(iter(self._stored))]
            while len(self._written) > REMEMBERED_SESSIONS:
                del self._written[next(iter(self._written))]
        stored: KindsAt = ()
        if isinstance(outcome, Published) and outcome.payload:
            stored, outcome = _kinds_at(publication.state), replace(outcome, payload=publication.whole)
        self._done(publication.key, publication.order, outcome, stored)


def _kinds_at(state: _Written) -> KindsAt:
    return tuple((checkpoint.kind, checkpoint.frontier) for checkpoint in state.checkpoints)


def _nearer(here: Sequence[Checkpoint], written: Sequence[Checkpoint], record: SessionRecord) -> bool:
    """Whether who goes on from the record prefills no more with the state that is here than with what was written."""
    return bool(here) and _reach(here, record) >= _reach(written, record)


def _reach(checkpoints: Sequence[Checkpoint], record: SessionRecord) -> int:
    """Tokens that the deepest checkpoint on the way to the record's end spares."""
    return max((c.frontier for c in checkpoints if _on_the_way(c, record)), default=0)


def _on_the_way(checkpoint: Checkpoint, record: SessionRecord) -> bool:
    end = checkpoint.frontier
    return checkpoint.ledger[:end] == record.ledger[:end] and page_keys(begun(checkpoint.media, end)) == page_keys(
        begun(record.media, end)
    )


def _described_media(media: Sequence[Segment]) -> tuple[StoredCheckpoint, ...]:
    """Nothing brings them back: of all payload they go last."""
    segments = tuple(StoredSegment(segment.sha256, segment.size) for segment in media)
    return (StoredCheckpoint("media", None, MEDIA_SECONDS, segments),) if media else ()


def _kept(checkpoints: Sequence[Checkpoint], detached: DetachedSession) -> tuple[_Kept, ...]:
    return tuple(
        (checkpoint, tuple(Segment(segment.size, segment.sha256) for segment in detached.of(number)))
        for number, checkpoint in enumerate(checkpoints)
    )


def _ancestor(checkpoint: Checkpoint, among: Sequence[Checkpoint]) -> str | None:
    """The deepest of the checkpoints that this one's ledger continues; else where its sequence or fork came from."""
    tokens = checkpoint.ledger[: checkpoint.frontier]
    earlier = [
        c
        for c in among
        if c.frontier < checkpoint.frontier
        and c.ledger[: c.frontier] == tokens[: c.frontier]
        and begun(c.media, c.frontier) == begun(checkpoint.media, c.frontier)
    ]
    if earlier:
        return max(earlier, key=lambda c: c.frontier).id
    return checkpoint.fork_origin or checkpoint.parent
