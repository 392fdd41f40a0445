"""Session state into bytes and back, and forks: what leaves the engine, and what comes in. All or nothing each time."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

from deployment.engine import errors
from deployment.engine.errors import EngineError
from deployment.engine.loading import Models
from deployment.engine.messages import CheckpointKind, Export, Exported, Fork, Import, Imported
from deployment.engine.sessions import SessionTable
from state.checkpoint import Checkpoint
from state.codec import decode_checkpoint, encode_checkpoint
from state.memory import StateMemory


class StateExchange:
    """Raises EngineError for a session that is not here, StateError for a state that is not whole or does not fit."""

    def __init__(self, models: Models, memory: StateMemory, sessions: SessionTable) -> None:
        self._models = models
        self._memory = memory
        self._sessions = sessions

    def export(self, command: Export) -> Exported:
        newest: dict[str, Checkpoint] = {}
        for checkpoint in self._held(command.session):
            if checkpoint.kind in command.kinds:
                newest.pop(checkpoint.kind, None)
                newest[checkpoint.kind] = checkpoint
        chosen = list(newest.values())
        deepest = self._sessions.on_the_way(command.session)
        if deepest is not None and deepest not in chosen and "turn_end" in command.kinds:
            chosen.append(deepest)  # the turn's end has no image: whoever goes on prefills what came after this one
        if not chosen:
            wanted = ", ".join(command.kinds)
            raise EngineError(errors.UNKNOWN_SESSION, f"session {command.session!r} has no checkpoint of kind {wanted}")
        blobs = tuple(encode_checkpoint(self._memory, c, self._models.fingerprint, command.record) for c in chosen)
        kinds: list[CheckpointKind] = [kind for c in chosen if (kind := _known(c.kind))]
        return Exported(command.call, command.session, blobs, tuple(kinds), tuple(c.frontier for c in chosen))

    def import_(self, command: Import) -> Imported:
        """The session keeps what it had unless every checkpoint is whole, fits this model, and finds room."""
        if not command.blobs:
            raise EngineError(errors.BAD_STATE, "an import needs at least one checkpoint")
        decoded: list[Checkpoint] = []
        record: dict[str, Any] = {}
        try:
            for blob in command.blobs:
                decode = partial(
                    decode_checkpoint, self._memory, blob, self._models.fingerprint, self._models.target.public_rows
                )
                checkpoint, record = self._sessions.with_room(decode, keep=command.session)
                decoded.append(checkpoint)
                if _known(checkpoint.kind) is None:
                    raise EngineError(
                        errors.BAD_STATE, f"manifest.kind is {checkpoint.kind!r}, which is not known here"
                    )
        except BaseException:
            self._release(decoded)
            raise
        self._sessions.replace(command.session, decoded, command.origin)
        return self._imported(command.call, command.session, record)

    def fork(self, command: Fork) -> Imported:
        forked: list[Checkpoint] = []
        try:
            for checkpoint in self._held(command.session):
                fork = partial(self._memory.fork, checkpoint)
                forked.append(self._sessions.with_room(fork, keep=command.session, source=checkpoint))
        except BaseException:
            self._release(forked)
            raise
        self._sessions.replace(command.child, forked, "device", self._sessions.tenant(command.session))
        return self._imported(command.call, command.child, {})

    def _held(self, session: str) -> tuple[Checkpoint, ...]:
        held = self._sessions.whole(session)
        if not held:
            raise EngineError(errors.UNKNOWN_SESSION, f"no state of session {session!r} is held here")
        return held

    def _release(self, checkpoints: list[Checkpoint]) -> None:
        for checkpoint in checkpoints:
            self._memory.release(checkpoint)

    def _imported(self, call: str, session: str, record: dict[str, Any]) -> Imported:
        return Imported(call, session, tuple(c.frontier for c in self._sessions.checkpoints(session)), record)


def _known(kind: str) -> CheckpointKind | None:
    return next((known for known in get_args(CheckpointKind) if known == kind), None)
