"""Sessions over HTTP: made, listed, shown, checkpointed, forked, moved, exported, imported, deleted."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.exceptions import RayError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployment.body_reading import parse
from deployment.cluster.transport import Cluster
from deployment.errors import Refused, RequestError, invalid, session_exists, session_unavailable, unknown_session
from deployment.fork_points import ForkAt
from deployment.keyed_turns import is_keyed
from deployment.ownership.messages import Placed, Wait
from deployment.ownership.words import SessionKey
from deployment.replica_calls import Replicas
from deployment.request_reading import body_of, document_of, session_name, tenant_of, visible_name
from deployment.schemas import CheckpointBody, ForkBody, MigrateBody, NewSessionBody, SessionBody
from deployment.server_objects import (
    adopted_object,
    checkpoint_object,
    checkpoints_object,
    listed,
    placement_object,
    session_details,
    turns_object,
)
from deployment.wire import Adopted, ExportedSession, Movement, Route, SessionInfo
from state.errors import StateError

if TYPE_CHECKING:
    from state.document import SessionDocument

LOCATE_SECONDS = 10.0
SHOWN_SECONDS = 10.0
STAYING_SECONDS = 2.0

PIECE_BYTES = 4 << 20
"""Of a document that is exported: about a millisecond's copy."""

DOCUMENT_TYPE = "application/vnd.dflash.session"


def _opened(body: bytearray) -> SessionDocument:
    # the only work of an ingress that needs torch, whose import takes seconds and memory
    from state.document import open_document

    return open_document(body)


class SessionApi:
    def __init__(self, replicas: Replicas, cluster: Cluster, document_limit: int) -> None:
        """`document_limit`: bytes of a document that is imported."""
        self._replicas = replicas
        self._cluster = cluster
        self._document_limit = document_limit

    async def placement(self, request: Request, name: str) -> Placed:
        """Where one of the asker's sessions is. A name that cannot be one is unknown like any other: 404."""
        key = SessionKey(tenant_of(request), name)
        placement = None if is_keyed(key) else await located(self._cluster, key)
        if placement is None:
            raise unknown_session(name)
        return placement

    async def beginning(self, request: Request, start: str) -> tuple[str, ...]:
        """Names of the asker's sessions that begin so, in their order."""
        tenant = tenant_of(request)
        names = [placed.key.session for placed in await self._sessions(tenant)]
        return tuple(sorted(name for name in names if name.startswith(start)))

    async def create(self, request: Request) -> Any:
        body = parse(NewSessionBody, await document_of(request, empty=True))
        key = _key_of(request, body)
        if body.id is not None:
            await self._free(key)
        answer = await self._replicas.ask("create_session", Route(str(key)), key, not body.store)
        if isinstance(answer, Refused):
            raise answer.error
        return adopted_object(key.session, "created", answer)

    async def list(self, request: Request) -> Any:
        placements = await self._sessions(tenant_of(request))
        return listed([placement_object(placement) for placement in placements if not is_keyed(placement.key)])

    async def show(self, request: Request, name: str) -> Any:
        placement = await self.placement(request, name)
        asked = self._replicas.ask("session_info", _owner(placement), placement.key)
        try:
            known = await asyncio.wait_for(asked, SHOWN_SECONDS)
        except TimeoutError:  # as when who has it is cut off: the directory knows some of it
            known = None
        if isinstance(known, Refused):
            raise known.error
        # A long transcript takes seconds to write: other requests' streams must not wait for it.
        return await asyncio.to_thread(_shown, placement, known)

    async def turns(self, request: Request, name: str) -> Any:
        return turns_object(await self._loaded(request, name))

    async def checkpoints(self, request: Request, name: str) -> Any:
        return checkpoints_object(await self._loaded(request, name))

    async def checkpoint(self, request: Request, name: str) -> Any:
        placement = await self.placement(request, name)
        body = parse(CheckpointBody, await document_of(request, empty=True))
        # Named here, so that one that is asked for again, since its replica was lost, is the same.
        wanted = secrets.token_hex(4) if body.name is None else visible_name(body.name, "name", "a checkpoint's name")
        if "/" in wanted:
            raise invalid(f"name: a checkpoint's name is a part of its path, and has no slash, got {wanted!r}", "name")
        answer = await self._replicas.ask("checkpoint", _owner(placement), placement.key, wanted)
        if isinstance(answer, Refused):
            raise answer.error
        return checkpoint_object(answer, session=name)

    async def delete_checkpoint(self, request: Request, name: str, checkpoint: str) -> Any:
        placement = await self.placement(request, name)
        answer = await self._replicas.ask("delete_checkpoint", _owner(placement), placement.key, checkpoint)
        if isinstance(answer, Refused):
            raise answer.error
        return {"name": checkpoint, "object": "session.checkpoint.deleted", "session": name, "deleted": True}

    async def delete(self, request: Request, name: str) -> Any:
        placement = await self.placement(request, name)
        answer = await self._replicas.ask("delete", _owner(placement), placement.key)
        if isinstance(answer, Refused):
            raise answer.error
        return {"id": name, "object": "session.deleted", "deleted": True}

    async def migrate(self, request: Request, name: str) -> Any:
        placement = await self.placement(request, name)
        body = parse(MigrateBody, await document_of(request, empty=True))
        target = await self._emptiest(name, placement.owner) if body.to is None else body.to
        if body.to is not None and not await self._is_there(body.to):
            raise RequestError(404, "replica_not_found", f"to: there is no replica {target!r}", "to")
        key, source, movement = placement.key, placement.owner, Movement()
        if source is not None and source != target:
            movement = await self._replicas.ask("move", _owner(placement), key, target)
            if isinstance(movement, Refused):
                raise movement.error
            if movement is None:
                raise RequestError(503, "not_moved", f"session {name!r} could not be moved to {target!r}; it goes on")
        answer = await self._replicas.ask_here("adopt", Route(str(key), target, placement), key)
        if isinstance(answer, Refused):
            raise answer.error
        if not isinstance(answer, Adopted):
            raise RequestError(503, "replica_lost", f"to: replica {target!r} is gone", "to")
        return {
            "id": name,
            "object": "session.migrated",
            "from": placement.owner,
            "to": answer.replica,
            "epoch": str(answer.epoch),
            "hit": answer.hit,
            "frontier": answer.frontier,
            **asdict(movement),
        }

    async def fork(self, request: Request, name: str) -> Any:
        placement = await self.placement(request, name)
        body = parse(ForkBody, await document_of(request, empty=True))
        at = ForkAt(body.checkpoint, body.turn, body.frontier)
        child = _key_of(request, body)
        at = None if at == ForkAt() else at
        answer = await self._replicas.ask("fork", _owner(placement), placement.key, child, at)
        if isinstance(answer, Refused):
            raise answer.error
        return adopted_object(child.session, "forked", answer, parent=name)

    async def export(self, request: Request, name: str) -> Response:
        placement = await self.placement(request, name)
        answer = await self._replicas.ask("export_session", _owner(placement), placement.key)
        if isinstance(answer, Refused):
            raise answer.error
        assert isinstance(answer, ExportedSession)
        headers = {"content-length": str(answer.document.nbytes)}
        return StreamingResponse(_pieces(answer.document), media_type=DOCUMENT_TYPE, headers=headers)

    async def import_(self, request: Request, id: str | None) -> Any:
        """The new session belongs to whoever imports it; the document names no tenant."""
        name = None if id is None else session_name(id, "id")
        body = await body_of(request, self._document_limit)
        try:
            document = await asyncio.to_thread(_opened, body)
        except StateError as error:
            raise RequestError(400, "bad_state", f"document: {error}", "document") from None
        key = SessionKey(tenant_of(request), name or document.manifest.session.id)
        await self._free(key)
        answer = await self._replicas.ask("import_session", Route(str(key)), key, np.frombuffer(body, np.uint8))
        if isinstance(answer, Refused):
            raise answer.error
        return adopted_object(key.session, "imported", answer)

    async def _emptiest(self, name: str, owner: str | None) -> str:
        """Of those that stay: one that is about to go would give the session away at once. The directory hears of one
        that has just come within a moment. RequestError: there is no other one (409), or the directory names nobody at
        all (503)."""
        others = [one for one in await self._replicas.all() if one.replica != owner]
        deadline = time.monotonic() + STAYING_SECONDS
        named = False
        while others:
            staying = await self._cluster.staying(beside="")
            if stay := [one for one in others if one.replica in staying]:
                return min(stay, key=lambda one: one.sessions).replica
            named = named or bool(staying)
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.25)
        if others and not named:  # nor the owner, which is there: it is silent, or knows nobody yet
            raise session_unavailable(name, "the directory does not say which replicas stay")
        raise RequestError(409, "no_other_replica", "to: there is no other replica to move to", "to")

    async def _is_there(self, replica: str) -> bool:
        """By the directory, since an engine in a long step keeps its replica from answering; or by the replica itself,
        which may be too new for the directory."""
        if replica in await self._cluster.staying(beside=""):
            return True
        return replica in [one.replica for one in await self._replicas.all()]

    async def _sessions(self, tenant: str) -> tuple[Placed, ...]:
        """All of a tenant's. RequestError (503) while nobody can say."""
        # Of a name that no session has it is known when all of them are that it is none.
        await located(self._cluster, SessionKey(tenant, ""))
        try:
            return await self._cluster.sessions(tenant)
        except (RayError, TimeoutError):
            raise RequestError(503, "unavailable", "the directory does not answer; try again") from None

    async def _loaded(self, request: Request, name: str) -> SessionInfo:
        placement = await self.placement(request, name)
        answer = await self._replicas.ask("session_info", _owner(placement), placement.key)
        if isinstance(answer, Refused):
            raise answer.error
        return answer

    async def _free(self, key: SessionKey) -> None:
        """RequestError (409) if there is such a session."""
        if await located(self._cluster, key) is not None:
            raise session_exists(key.session)


def _shown(placement: Placed, known: SessionInfo | None) -> Response:
    return JSONResponse(session_details(placement, known))


async def _pieces(document: np.ndarray) -> AsyncIterator[bytes]:
    """Of a document, which may be as large as half the memory, one copy after the other."""
    for start in range(0, len(document), PIECE_BYTES):
        # In a thread, since a server that writes to a fast reader waits for nothing in between: neither would the loop.
        yield await asyncio.to_thread(document[start : start + PIECE_BYTES].tobytes)


async def located(cluster: Cluster, key: SessionKey) -> Placed | None:
    """Where a session is; None: there is none. RequestError (503) while nobody can say."""
    deadline = time.monotonic() + LOCATE_SECONDS
    while True:
        try:
            placed = await cluster.locate(key)
        except (RayError, TimeoutError):
            placed = Wait(key, 0.25)
        if not isinstance(placed, Wait):
            return placed
        if time.monotonic() > deadline:
            raise session_unavailable(key.session, "the directory does not know enough yet")
        await asyncio.sleep(min(placed.seconds, 0.25))


def _key_of(request: Request, body: SessionBody) -> SessionKey:
    """A new session's."""
    name = secrets.token_hex(16) if body.id is None else session_name(body.id, "id")
    return SessionKey(tenant_of(request), name)


def _owner(placement: Placed) -> Route:
    return Route(str(placement.key), placement.owner, placement)
