"""Session state into bytes and back, and forks: what leaves the engine, and what comes in. All or nothing each time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import get_args

from deployment.engine import errors
from deployment.engine.commands import (
    DropStaged,
    Export,
    ExportPages,
    Foreign,
    Fork,
    Import,
    Publish,
    SegmentBytes,
    StageSegments,
    VerifyStaged,
)
from deployment.engine.durable_sessions import DurableSessions
from deployment.engine.errors import EngineError
from deployment.engine.events import CheckpointKind, Exported, Imported, Pages, Publishing, Staged
from deployment.engine.lane import Lane
from deployment.engine.loading import Models
from deployment.engine.media_checks import misplaced
from deployment.engine.options import EngineOptions
from deployment.engine.sessions import SessionTable
from deployment.engine.staging import StagedSegments
from state.checkpoint import Checkpoint
from state.codec import (
    DetachedSegment,
    SegmentDigests,
    SessionParts,
    encode_detached,
    encode_pages,
    encode_session,
    encode_sliced,
)
from state.document import SessionDocument, open_document
from state.errors import CoverageError, FingerprintMismatch, FormatError, MissingSegment
from state.fingerprint import Fingerprint, Mismatch, compare
from state.media import Placed, begun, page_keys
from state.media_manifest import bare
from state.memory import StateMemory
from state.session_record import SessionRecord

logger = logging.getLogger(__name__)


class StateExchange:
    """Raises EngineError for a session that is not here, StateError for a state that is not whole or does not fit."""

    def __init__(
        self,
        models: Models,
        options: EngineOptions,
        memory: StateMemory,
        sessions: SessionTable,
        clock: Callable[[], float],
        durable: DurableSessions | None = None,
    ) -> None:
        """`durable`: where sessions are published to, and where segments of detached documents lie; whoever sends
        such a document sees to it that they stay there until it is imported."""
        self._models = models
        self._accept_numeric_path = options.accept_numeric_path
        self._key = options.cluster_key()
        self._memory = memory
        self._sessions = sessions
        self._durable = durable
        self._digests = SegmentDigests()
        self._staged = StagedSegments(options.staged_bytes, options.staged_seconds, clock)

    @property
    def staged_bytes(self) -> int:
        return self._staged.size

    # ------------------------------------------------------------------------------------------------ going out

    def export(self, command: Export) -> Exported:
        bare = command.foreign is not None or not command.checkpoints
        chosen = [] if bare else self._chosen(command)
        record = command.record or _record_of(chosen)
        if not chosen and not record.ledger:
            raise _nothing_held(command.session)
        made_by, key = self._made_by(command.foreign), self._key_for(command.session)
        without = command.without or frozenset()
        segments: tuple[SegmentBytes, ...] = ()
        payload: tuple[bytes, ...] = ()
        sizes: tuple[int, ...] = ()
        trailer = b""
        serials = tuple(checkpoint.serial for checkpoint in chosen)
        if command.slice_bytes is not None:
            most, after = command.slice_bytes, command.begun
            parts = encode_sliced(self._memory, chosen, record, made_by, key, self._digests, without, most, after)
            if not isinstance(parts, SessionParts):
                segments, piece = _read(parts.segments), parts.piece
                return Exported(
                    command.call, command.session, b"", (), (), segments, piece=piece, whole=False, chosen=serials
                )
            document, trailer = parts.head, parts.trailer
            payload = tuple(segment.sha256 for segment in parts.segments)
            sizes = tuple(segment.size for segment in parts.segments)
            segments = _read(segment for segment in parts.segments if segment.sha256 not in without)
        elif command.without is None:
            document = encode_session(self._memory, chosen, record, made_by, key)
        else:
            detached = encode_detached(
                self._memory, chosen, record, made_by, key, self._digests, keep_bytes=True, hashed=command.hashed
            )
            document = detached.document
            segments = _read(segment for segment in detached.segments if segment.sha256 not in without)
        kinds: list[CheckpointKind] = [kind for c in chosen if (kind := _known(c.kind))]
        frontiers = tuple(c.frontier for c in chosen)
        return Exported(
            command.call,
            command.session,
            document,
            tuple(kinds),
            frontiers,
            segments,
            payload,
            sizes,
            trailer,
            chosen=serials,
        )

    def pages(self, command: ExportPages, lane: Lane) -> Pages:
        """Of a lane between two rounds."""
        full = self._memory.full_pages(lane.memory)
        first, most = command.first, command.most
        if not (first >= 0 and most >= 1):
            raise EngineError(
                errors.INVALID_REQUEST, f"first is {first}, most is {most}, must be from 0 and 1", "first"
            )
        numbers = range(first, max(first, min(first + most, full)))
        segments = _read(encode_pages(self._memory, lane.memory, numbers, self._digests))
        return Pages(command.call, command.turn, first, numbers.stop, full, segments)

    def publish(self, command: Publish) -> Publishing:
        """What the device holds of the session is read before this returns it `whole`; it becomes durable later."""
        if self._durable is None:
            raise EngineError(errors.INVALID_REQUEST, "this engine was started without a durable tier")
        chosen = self._standing_for(command.session) if command.foreign is None else []
        waiting = self._durable.publish(
            self._memory,
            self._digests,
            command.session,
            command.key,
            command.order,
            chosen,
            command.record,
            self._made_by(command.foreign),
            self._key_for(command.session),
            command.record_alone,
            command.slice_bytes,
        )
        frontiers = tuple(at for _, at in waiting.state)
        return Publishing(command.call, command.session, frontiers, waiting.read, waiting.whole)

    def forget(self, session: str) -> None:
        """The session has no state any more, or another one."""
        self._sessions.drop(session)
        if self._durable is not None:
            self._durable.forget(session)

    # ------------------------------------------------------------------------------------------------ coming in

    def stage(self, command: StageSegments) -> Staged:
        self._staged.add(command.migration, command.segments, command.hashed)
        return Staged(command.call, command.migration, *self._staged.held(command.migration))

    def verify_staged(self, command: VerifyStaged) -> Staged:
        self._staged.verify(command.migration, dict(command.digests))
        return Staged(command.call, command.migration, *self._staged.held(command.migration))

    def drop_staged(self, command: DropStaged) -> Staged:
        self._staged.drop(command.migration)
        return Staged(command.call, command.migration, *self._staged.held(command.migration))

    def expire(self) -> None:
        """Drops what was staged and not imported in time."""
        self._staged.expire()

    def import_(self, command: Import) -> Imported:
        """The session keeps what it had unless the document is whole, fits this model, and finds room. A checkpoint
        whose payload is damaged or missing is a miss, since the ledger is enough; `exact` refuses all for one."""
        fetch = self._durable.segment if self._durable is not None else None
        staged = partial(self._staged.segment, command.migration)
        document = open_document(command.document, fetch=fetch, verified=staged, key=self._key)
        mismatch = compare(document.manifest.fingerprint, self._models.fingerprint)
        if mismatch is not None and command.exact:
            refused = FingerprintMismatch(mismatch.field, mismatch.stored, mismatch.here)
            raise EngineError(errors.FINGERPRINT_MISMATCH, str(refused), mismatch.field)
        if mismatch is None or mismatch.matter != "text":
            document.check_tokens(self._models.target.public_rows)
        if mismatch is None or mismatch.matter not in ("text", "weights"):
            self._check_media(document)
        record = document.record()
        loaded = self._load(document, command) if self._loadable(mismatch) else []
        if command.migration is not None:
            self._staged.imported(command.migration)
        self.forget(command.session)
        self._sessions.replace(command.session, loaded, command.origin, command.tenant, shared=document.signed)
        if loaded and record.ledger:
            self._sessions.commit(command.session, record.ledger, media=record.media)
        frontiers = tuple(c.frontier for c in self._sessions.checkpoints(command.session))
        foreign = Foreign(mismatch, document.manifest.fingerprint) if mismatch is not None else None
        return Imported(command.call, command.session, frontiers, record, foreign, document.signed)

    # ------------------------------------------------------------------------------------------------ staying here

    def checkpoint(self, session: str) -> int:
        """Pins the deepest checkpoint on the way to the session's end; returns its frontier."""
        deepest = max(self._held(session), key=lambda checkpoint: checkpoint.frontier)
        deepest = self._sessions.on_the_way(session) or deepest
        if deepest.kind != "explicit" or deepest not in self._sessions.checkpoints(session):
            fork = partial(self._memory.fork, deepest, "explicit")
            pinned = self._sessions.with_room(fork, keep=session, source=deepest)
            self._sessions.add(session, pinned)
        return deepest.frontier

    def fork(self, command: Fork) -> Imported:
        forked: list[Checkpoint] = []
        try:
            for checkpoint in _on_the_way(command.ledger, command.media, self._held(command.session)):
                fork = partial(self._memory.fork, checkpoint)
                forked.append(self._sessions.with_room(fork, keep=command.session, source=checkpoint))
        except BaseException:
            self._release(forked)
            raise
        tenant, shared = self._sessions.tenant(command.session), not self._sessions.is_private(command.session)
        self._sessions.replace(command.child, forked, "device", tenant, shared=shared)
        frontiers = tuple(c.frontier for c in self._sessions.checkpoints(command.child))
        return Imported(command.call, command.child, frontiers)

    def _key_for(self, session: str) -> bytes | None:
        """What came from outside unsigned does not become this cluster's own by passing through it."""
        return None if self._sessions.is_private(session) else self._key

    def _made_by(self, foreign: Foreign | None) -> Fingerprint:
        return foreign.fingerprint if foreign is not None else self._models.fingerprint

    def _loadable(self, mismatch: Mismatch | None) -> bool:
        if mismatch is None:
            return True
        accepted = mismatch.matter == "numeric" and self._accept_numeric_path
        action = "loaded all the same" if accepted else "not loaded, and will be rebuilt from its ledger"
        logger.info("a session's state is %s: %s was %r, is %r", action, mismatch.field, mismatch.stored, mismatch.here)
        return accepted

    def _check_media(self, document: SessionDocument) -> None:
        """Raises EngineError for media that this model's tower could not have been shown where they stand."""
        manifest = document.manifest
        rows = [("manifest.media", manifest.session.ledger, manifest.media)]
        for number, entry in enumerate(manifest.checkpoints):
            place = f"manifest.checkpoints[{number}].media"
            rows.append((place, manifest.ledger_of(entry), manifest.media_of(entry)))
        for place, tokens, media in rows:
            if not media:
                continue  # most have none, and a ledger may be long
            problem = misplaced(tokens.tolist(), bare(media), self._models.vision)
            if problem is not None:
                raise EngineError(errors.BAD_STATE, f"{place}{problem}")

    def _load(self, document: SessionDocument, command: Import) -> list[Checkpoint]:
        """The checkpoints of a document that are whole."""
        document.check_fit(self._memory.geometry)
        for number, entry in enumerate(document.manifest.checkpoints):
            if _known(entry.kind) is None:
                problem = f"manifest.checkpoints[{number}].kind is {entry.kind!r}, which is not known here"
                raise EngineError(errors.BAD_STATE, problem)
        if command.exact:
            document.check_payload()
        doubtful = MissingSegment if command.exact else (MissingSegment, FormatError, CoverageError)
        loaded: list[Checkpoint] = []
        try:
            for entry in document.manifest.checkpoints:
                load = partial(document.load, self._memory, entry)
                try:
                    loaded.append(self._sessions.with_room(load, keep=command.session))
                except doubtful as error:
                    logger.warning("a checkpoint of a session is missed: %s", error)
        except BaseException:
            self._release(loaded)
            raise
        return loaded

    def _chosen(self, command: Export) -> list[Checkpoint]:
        """Those of a document: with its first slice they are chosen for all of it."""
        if command.chosen is not None:
            kept = {checkpoint.serial: checkpoint for checkpoint in self._memory.checkpoints}
            if not kept.keys() >= set(command.chosen):
                message = f"a checkpoint of session {command.session!r} went before all of it was exported"
                raise EngineError(errors.UNKNOWN_CHECKPOINT, message, "chosen")
            return [kept[serial] for serial in command.chosen]
        chosen = self._standing_for(command.session)
        if command.without is not None and command.slice_bytes is None:
            chosen = self._with_pinned(command.session, chosen)
        return chosen

    def _standing_for(self, session: str) -> list[Checkpoint]:
        """The newest checkpoint of each kind, and the deepest one on the way to the ledger's end, whoever holds it:
        where the turn's end has no image, whoever goes on prefills what came after that one."""
        newest: dict[str, Checkpoint] = {}
        for checkpoint in self._sessions.checkpoints(session):
            newest.pop(checkpoint.kind, None)
            newest[checkpoint.kind] = checkpoint
        chosen = list(newest.values())
        deepest = self._sessions.on_the_way(session)
        return chosen if deepest is None or deepest in chosen else [*chosen, deepest]

    def _with_pinned(self, session: str, chosen: list[Checkpoint]) -> list[Checkpoint]:
        """Whoever gets the session for good gets all that its client has asked to keep."""
        held = self._sessions.checkpoints(session)
        among = [c for c in held if c.kind == "explicit" or c in chosen]
        return among + [c for c in chosen if c not in held]

    def _held(self, session: str) -> tuple[Checkpoint, ...]:
        held = self._sessions.whole(session)
        if not held:
            raise _nothing_held(session)
        return held

    def _release(self, checkpoints: list[Checkpoint]) -> None:
        for checkpoint in checkpoints:
            self._memory.release(checkpoint)


def _read(segments: Iterable[DetachedSegment]) -> tuple[SegmentBytes, ...]:
    return tuple(SegmentBytes(segment.sha256, segment.read()) for segment in segments)


def _on_the_way(ledger: Sequence[int] | None, media: Placed, held: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
    """Of a session's checkpoints, those at prefixes of `ledger` that show the same media."""
    if ledger is None:
        return held
    found = [
        c
        for c in held
        if c.frontier <= len(ledger)
        and c.ledger[: c.frontier] == tuple(ledger[: c.frontier])
        and page_keys(begun(c.media, c.frontier)) == page_keys(begun(media, c.frontier))
    ]
    if not found:
        places = ", ".join(str(checkpoint.frontier) for checkpoint in held)
        message = f"ledger: none of the session's checkpoints, which are at {places}, is on the way to its end"
        raise EngineError(errors.UNKNOWN_CHECKPOINT, message, "ledger")
    return found


def _record_of(checkpoints: Sequence[Checkpoint]) -> SessionRecord:
    """A session of which only its checkpoints are known."""
    deepest = max(checkpoints, key=lambda checkpoint: checkpoint.frontier, default=None)
    if deepest is None:
        return SessionRecord("session", ())
    return SessionRecord("session", deepest.ledger, frontier=deepest.frontier, media=deepest.media)


def _nothing_held(session: str) -> EngineError:
    return EngineError(errors.UNKNOWN_SESSION, f"no state of session {session!r} is held here")


def _known(kind: str) -> CheckpointKind | None:
    return next((known for known in get_args(CheckpointKind) if known == kind), None)
