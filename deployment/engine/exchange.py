"""Session state into bytes and back, and forks: what leaves the engine, and what comes in. All or nothing each time."""

from __future__ import annotations

from functools import partial
from typing import Any

from deployment.engine import errors
from deployment.engine.errors import EngineError
from deployment.engine.loading import Models
from deployment.engine.messages import CheckpointKind, Export, Exported, Fork, Import, Imported
from deployment.engine.sessions import SessionTable
from state.checkpoint import Checkpoint
from state.codec import decode_checkpoint, encode_checkpoint
from state.errors import StateError
from state.memory import StateMemory


class StateExchange:
    """Raises EngineError for a session that is not here, StateError for a state that is not whole or does not fit."""

    def __init__(self, models: Models, memory: StateMemory, sessions: SessionTable) -> None:
        self._models = models
        self._memory = memory
        self._sessions = sessions

    def export(self, command: Export) -> Exported:
        held = self._sessions.checkpoints(command.session)
        if not held:
            raise EngineError(errors.UNKNOWN_SESSION, f"no state of session {command.session!r} is held here")
        newest: dict[str, Checkpoint] = {}
        for checkpoint in held:
            if checkpoint.kind in command.kinds:
                newest[checkpoint.kind] = checkpoint
        chosen = [checkpoint for checkpoint in held if newest.get(checkpoint.kind) is checkpoint]
        blobs = tuple(encode_checkpoint(self._memory, c, self._models.fingerprint, command.record) for c in chosen)
        kinds: tuple[CheckpointKind, ...] = tuple(c.kind for c in chosen)  # pyright: ignore[reportAssignmentType]
        return Exported(command.call, command.session, blobs, kinds, tuple(c.frontier for c in chosen))

    def import_(self, command: Import) -> Imported:
        if not command.blobs:
            raise EngineError(errors.BAD_STATE, "an import needs at least one checkpoint")
        rows = self._models.target.public_rows
        decoded: list[Checkpoint] = []
        record: dict[str, Any] = {}
        try:
            for blob in command.blobs:
                decode = partial(decode_checkpoint, self._memory, blob, self._models.fingerprint, rows)
                checkpoint, record = self._sessions.with_room(decode, keep=command.session)
                decoded.append(checkpoint)
        except StateError:
            for checkpoint in decoded:
                self._memory.release(checkpoint)
            raise
        self._sessions.replace(command.session, decoded, command.origin)
        return self._imported(command.call, command.session, record)

    def fork(self, command: Fork) -> Imported:
        held = self._sessions.checkpoints(command.session)
        if not held:
            raise EngineError(errors.UNKNOWN_SESSION, f"no state of session {command.session!r} is held here")
        forked: list[Checkpoint] = []
        try:
            for checkpoint in held:
                copy = self._sessions.with_room(
                    partial(self._memory.fork, checkpoint), command.session, keep_always=True
                )
                forked.append(copy)
        except StateError:
            for checkpoint in forked:
                self._memory.release(checkpoint)
            raise
        self._sessions.replace(command.child, forked, "device")
        return self._imported(command.call, command.child, {})

    def _imported(self, call: str, session: str, record: dict[str, Any]) -> Imported:
        held = self._sessions.checkpoints(session)
        deepest = max(held, key=lambda c: len(c.ledger))
        return Imported(call, session, tuple(c.frontier for c in held), deepest.ledger, record)
