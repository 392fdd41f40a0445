"""The Responses interface. A stored response is a turn of a session, in which the responses that follow it go on.

A response that follows another one than its session's newest begins a session of its own, with the same past.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployment.body_reading import parse
from deployment.content_parts import kept_or_chat_part
from deployment.errors import Refused, RequestError, invalid
from deployment.fork_points import ForkAt
from deployment.openai_responses.format import (
    ResponseFormat,
    response_object,
    session_name,
    session_of,
    status_of,
    usage_of,
)
from deployment.openai_responses.items import input_items, output_items
from deployment.openai_responses.schema import PromptBody, ResponsesBody
from deployment.openai_responses.stored import Note, Stored, note_of, stored_in
from deployment.ownership.words import SessionKey
from deployment.replica_calls import Replicas
from deployment.request_reading import Asking, asking_of, beside, turn_request
from deployment.schemas import TurnBody
from deployment.session_api import SessionApi
from deployment.sse import kept_alive
from deployment.token_api import TokenApi
from deployment.turn_api import TurnApi, begun, told_whole
from deployment.wire import NOTHING, ReplicaInfo, Route, SessionInfo, TurnRequest

SESSION_MOVED_ON = "session_moved_on"

_ALIKE, _TIME = 16, 11
"""Hex digits of a session's name that say what began it from an older response, and when, in milliseconds."""

_IN_ITS_SESSION = "images of earlier responses are in their session alone"


class ResponsesApi:
    def __init__(self, turns: TurnApi, tokens: TokenApi, sessions: SessionApi, replicas: Replicas, model: str) -> None:
        self._turns = turns
        self._tokens = tokens
        self._sessions = sessions
        self._replicas = replicas
        self._model = model

    async def create(self, request: Request) -> Response:
        document, size = await self._turns.document(request)
        body = await beside(size, parse, ResponsesBody, document)
        self._turns.check_model(body.model)
        asking = asking_of(request, document)
        if asking.key is not None:
            raise invalid("x-session-id: a response is in the session that its id names", "x-session-id")
        before = await self._before(request, body)
        goes_on = before is not None and await self._goes_on(request, before, asking)
        name = before.name if before is not None and goes_on else await self._begun_by(request, asking, body, before)
        try:
            return await self._created(asking, size, body, before, name)
        except RequestError as error:
            if error.refused.code not in (SESSION_MOVED_ON, "session_busy"):
                raise
        name = await self._begun_by(request, asking, body, before) if goes_on else _new_session(None)
        return await self._created(asking, size, body, before, name)

    async def _goes_on(self, request: Request, before: Stored, asking: Asking) -> bool:
        """Whether the session of `before` is the one to ask first. A request that comes again may be what that has gone
        on with, unless it began a session under its key."""
        if asking.idempotency_key is None:
            return before.newest or asking.repeated
        return not await self._exists(request, _new_session(asking.idempotency_key))

    async def _begun_by(self, request: Request, asking: Asking, body: ResponsesBody, before: Stored | None) -> str:
        """The session that a request begins. A request that says that it comes again finds the one that it began, if
        that has a past: it is the last one that a request like it began from there."""
        if asking.idempotency_key is not None or before is None or not body.store:
            return _new_session(asking.idempotency_key)
        alike = _digits(f"{before.name} {before.turn} {body.model_dump_json()}")[:_ALIKE]
        begun = await self._sessions.beginning(request, session_name(alike)) if asking.repeated else []
        return begun[-1] if begun else session_name(_later_than_others(alike))

    async def _created(
        self, asking: Asking, size: int, body: ResponsesBody, before: Stored | None, name: str
    ) -> Response:
        past = list(before.past) if before is not None else []
        key = SessionKey(asking.tenant, name)
        forks = before is not None and before.shows_media and name != before.name
        goes_on = before is not None and (name == before.name or forks)
        if before is not None and before.shows_media and not body.store:
            raise invalid(f"store: must be true, since {_IN_ITS_SESSION}", "store")
        if body.store:
            asking = replace(asking, key=key, must_exist=goes_on, hint=None)
        facts = {**body.facts, **await self._defaults(body), "created_at": int(time.time())}
        turn = replace(
            await beside(size, _turn, body, past, asking),
            note=Note.of(facts, begin=len(past), end=len(past) + len(body.given) + 1).text,
            follows=(before.turn if before is not None and goes_on else NOTHING) if body.store else None,
            unattended=body.background,
            store=None if body.store else False,
        )
        turn = await self._turns.seen(turn, size, body.media_places, kept_or_chat_part)
        if before is not None and forks:
            await self._fork(before, key)
        events = self._turns.events(turn, body.stream)
        opened = await begun(events)
        shown = ResponseFormat(opened, facts)
        if body.stream:
            parts = kept_alive(shown.events(events))
            return StreamingResponse(parts, media_type="text/event-stream", headers=shown.headers)
        if body.background:
            await events.aclose()
            return JSONResponse(shown.begun, headers=shown.headers)
        return JSONResponse(shown.whole(await told_whole(opened, events)), headers=shown.headers)

    async def count(self, request: Request) -> Any:
        document, size = await self._turns.document(request)
        body = await beside(size, parse, PromptBody, document)
        self._turns.check_model(body.model)
        before = await self._before(request, body)
        if before is not None and before.shows_media:
            message = f"has images, which are not counted here, since {_IN_ITS_SESSION}"
            raise invalid(f"previous_response_id: {message}", "previous_response_id")
        past = list(before.past) if before is not None else []
        turn = await beside(size, _turn, body, past, asking_of(request, document))
        count = await self._tokens.count(await self._turns.seen(turn, size, body.media_places))
        return {"object": "response.input_tokens", "input_tokens": count}

    async def show(self, request: Request, name: str) -> Any:
        if request.query_params.get("stream") == "true":
            raise invalid("stream: a response is shown whole; its stream is followed as its session's turn", "stream")
        known, session, turn = await self._known(request, name)
        if known.running == turn and (note := note_of(known.running_note)) is not None:
            return response_object(name, self._model, note.all_facts, "in_progress", [], None)
        stored = stored_in(known, session, turn)
        if stored is None:
            raise _unknown(name)
        record = stored.record
        # The session does not keep how many of the tokens were thinking: their text is counted again.
        thought = stored.answer.get("reasoning_content")
        thinking = await self._tokens.count(TurnRequest("", "prompt", (), prompt=thought)) if thought else 0
        usage = usage_of(record["prompt_tokens"], record["reused"], record["completion_tokens"], thinking)
        output = output_items(stored.answer, stored.turn)
        status = status_of(record["finish_reason"])
        return response_object(name, self._model, stored.facts, status, output, usage)

    async def inputs(self, request: Request, name: str) -> Any:
        stored = await self._stored(request, name)
        items = input_items(stored.asked, stored.turn)
        if request.query_params.get("order", "desc") == "desc":
            items.reverse()
        names = {"first_id": items[0]["id"] if items else None, "last_id": items[-1]["id"] if items else None}
        return {"object": "list", "data": items, "has_more": False, **names}

    async def delete(self, request: Request, name: str) -> Any:
        """With the session that it is in, which is the only place where any of it is kept."""
        stored = await self._stored(request, name)
        await self._sessions.delete(request, stored.name)
        return {"id": name, "object": "response", "deleted": True}

    async def cancel(self, request: Request, name: str) -> Any:
        found = session_of(name)
        if found is None:
            raise _unknown(name)
        session, turn = found
        placement = await self._placed(request, session, name)
        route = Route(str(placement.key), placement.owner, placement)
        answer = await self._replicas.ask("cancel_turn", route, placement.key, turn)
        if isinstance(answer, Refused):
            raise answer.error
        try:
            return await self.show(request, name)
        except RequestError as error:
            if error.refused.status != 404:
                raise
            # Nothing is kept of a turn that had committed nothing.
            note = note_of(answer)
            if note is None:
                raise _unknown(name) from None
            return response_object(name, self._model, note.all_facts, "cancelled", [], None)

    # ------------------------------------------------------------------------------------------------ what is stored

    async def _before(self, request: Request, body: PromptBody) -> Stored | None:
        name = body.previous_response_id
        try:
            return None if name is None else await self._stored(request, name)
        except RequestError as error:
            if error.refused.param != "response_id":
                raise
            raise replace(error.refused, param="previous_response_id").error from None

    async def _fork(self, before: Stored, child: SessionKey) -> None:
        """A session of its own with what was up to `before`, images included, unless a retry has made it already."""
        key = SessionKey(child.tenant, before.name)
        answer = await self._replicas.ask("fork", Route(str(key)), key, child, ForkAt(turn=before.turn))
        if isinstance(answer, Refused) and answer.code != "session_exists":
            raise answer.error

    async def _stored(self, request: Request, name: str) -> Stored:
        """One that is over."""
        known, session, turn = await self._known(request, name)
        stored = stored_in(known, session, turn)
        if stored is None and known.running == turn:
            raise RequestError(409, "response_in_progress", f"response {name!r} is not complete yet", "response_id")
        if stored is None:
            raise _unknown(name)
        return stored

    async def _known(self, request: Request, name: str) -> tuple[SessionInfo, str, str]:
        """The session that a response's id names, its name, and the response's turn."""
        found = session_of(name)
        if found is None:
            raise _unknown(name)
        session, turn = found
        placement = await self._placed(request, session, name)
        route = Route(str(placement.key), placement.owner, placement)
        known = await self._replicas.ask("session_info", route, placement.key)
        if isinstance(known, Refused):
            raise known.error
        return known, session, turn

    async def _exists(self, request: Request, session: str) -> bool:
        try:
            await self._sessions.placement(request, session)
        except RequestError as error:
            if error.refused.status != 404:
                raise
            return False
        return True

    async def _placed(self, request: Request, session: str, name: str) -> Any:
        try:
            return await self._sessions.placement(request, session)
        except RequestError as error:
            raise (_unknown(name) if error.refused.status == 404 else error) from None

    async def _defaults(self, body: ResponsesBody) -> dict[str, float]:
        info: ReplicaInfo = await self._replicas.ask_any("info", self._model)
        return {
            "temperature": info.defaults.temperature if body.temperature is None else body.temperature,
            "top_p": info.defaults.top_p if body.top_p is None else body.top_p,
            "presence_penalty": info.defaults.presence_penalty,
            "frequency_penalty": info.defaults.frequency_penalty,
        }


def _turn(body: PromptBody, past: list[dict[str, Any]], asking: Asking) -> TurnRequest:
    return turn_request(parse(TurnBody, body.chat(past)), "history", asking)


def _new_session(key: str | None) -> str:
    """A request that is sent again under its key is in the same session."""
    return session_name(secrets.token_hex(16) if key is None else _digits(key))


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _later_than_others(alike: str) -> str:
    """The digits of a session that a request begins: those it shares with requests like it, the time, and a draw that
    nobody can guess."""
    return f"{alike}{int(time.time() * 1000):0{_TIME}x}{secrets.token_hex(16)}"


def _unknown(name: str) -> RequestError:
    return RequestError(404, "response_not_found", f"response {name!r} does not exist", "response_id")
