"""From a request to its prompt: the whole history, what an append turn adds to its session, or the text itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from deployment.engine import errors as engine_errors
from deployment.engine.service import EngineService
from deployment.errors import RequestError, invalid, unknown_session
from deployment.media_items import MediaItems
from deployment.media_limits import MediaLimits
from deployment.parsing.turn_text import think_is_open
from deployment.session import Session
from deployment.shown_media import ShownMedia
from deployment.splicing import spliced
from deployment.turn_records import tools_sha256
from deployment.turns import Prompt, append, full_history
from deployment.wire import TurnRequest
from model.errors import MediaError
from model.media import MediaItem
from state.fingerprint import Mismatch


class Prompter:
    """Long messages take seconds to render and tokenise, and so do media to decode: all on other threads."""

    def __init__(self, service: EngineService, *, accept_new_weights: bool, media: MediaLimits | None = None) -> None:
        vision = service.vision
        self._service = service
        self._accept_new_weights = accept_new_weights
        self._media = MediaItems(vision.rules if vision else None, media or MediaLimits(), service.context_limit)

    async def alone(self, request: TurnRequest, session: Session | None = None) -> Prompt:
        """The prompt of a request that carries all of it, but for images that its session has. RequestError: 400,
        or 429 where too many others wait for their media."""
        if request.mode == "prompt":
            return await asyncio.to_thread(self._text, request)
        items = await self._media.of(request.media, request.tenant, session.shown if session is not None else None)
        return await asyncio.to_thread(self._history, request, items)

    async def in_session(self, prompt: Prompt, session: Session) -> Prompt:
        """The prompt of a full history, in the tokens of what its session's model said, where it comes back as that was
        told (decision 20)."""
        if not session.ledger or session.keyed or session.foreign is not None:
            return prompt
        known = await asyncio.to_thread(spliced, self._service.tokenizer, prompt, session.ledger)
        return known if len(known.ids) < self._service.context_limit else prompt

    async def encoded(self, request: TurnRequest) -> tuple[int, ...]:
        """The prompt's ids, however long it is, and nothing that takes longer to find. RequestError (400)."""
        if request.mode == "prompt":
            asked, encode = request.prompt, self._service.tokenizer.encode
            return tuple(await asyncio.to_thread(encode, asked)) if isinstance(asked, str) else asked
        items = await self._media.of(request.media, request.tenant)
        return (await asyncio.to_thread(self._rendered, request, items, 1)).ids

    async def appended(self, request: TurnRequest, session: Session) -> Prompt:
        """The prompt of an append turn, which goes on from the session's ledger; the first turn of a session has
        nothing to go on from. RequestError: 400, 404, or 409 if something else made
        the ledger."""
        items = await self._media.of(request.media, request.tenant)
        return await asyncio.to_thread(self._appended, request, session, items)

    def _appended(self, request: TurnRequest, session: Session, items: Sequence[MediaItem]) -> Prompt:
        if not session.ledger and not session.created:
            raise unknown_session(session.key.session)
        if not session.ledger:
            return self._history(request, items)
        if session.foreign is not None:
            self._check_foreign(session, session.foreign.mismatch)
        _check_tools(request, session)
        return self._append(request, session, items)

    def _history(self, request: TurnRequest, items: Sequence[MediaItem]) -> Prompt:
        prompt = self._rendered(request, items, self._service.context_limit)
        self._check_length(prompt)
        return prompt

    def _rendered(self, request: TurnRequest, items: Sequence[MediaItem], limit: int) -> Prompt:
        service = self._service
        try:
            return full_history(
                service.chat_template,
                service.tokenizer,
                request.messages,
                enable_thinking=request.enable_thinking,
                preserve_thinking=request.preserve_thinking,
                tools=request.tools.tools if request.tools is not None else None,
                limit=limit,
                continues=request.continues,
                shown=ShownMedia(service.vision, items),
            )
        except ValueError as error:
            raise invalid(f"messages: {error}", "messages") from None

    def _check_foreign(self, session: Session, mismatch: Mismatch) -> None:
        """Decision 23: what an append turn may go on from. RequestError (409) naming the field."""
        if mismatch.matter == "weights" and self._accept_new_weights:
            return
        raise RequestError(
            409,
            engine_errors.FINGERPRINT_MISMATCH,
            f"session {session.key.session!r} was made with {mismatch.field} {mismatch.stored!r}, but "
            f"{mismatch.here!r} is served here; send the full history",
            mismatch.field,
        )

    def _append(self, request: TurnRequest, session: Session, items: Sequence[MediaItem]) -> Prompt:
        service = self._service
        try:
            prompt = append(
                service.chat_template,
                service.tokenizer,
                session.ledger,
                request.messages,
                think_is_open=think_is_open(service.tokenizer, session.ledger[session.opener :]),
                enable_thinking=request.enable_thinking,
                shown=ShownMedia(service.vision, items),
            )
        except ValueError as error:
            raise invalid(f"messages: {error}", "messages") from None
        self._check_length(prompt)
        return replace(prompt, media=(*session.media, *prompt.media))

    def _check_length(self, prompt: Prompt, param: str = "messages") -> None:
        limit = self._service.context_limit
        if len(prompt.ids) >= limit:
            raise RequestError(
                400,
                engine_errors.CONTEXT_LENGTH_EXCEEDED,
                f"{param}: the prompt has {len(prompt.ids)} tokens, but the context limit is {limit} tokens, "
                f"of which at least one must be left for the answer",
                param,
            )

    def _text(self, request: TurnRequest) -> Prompt:
        """Raw text has no template, and so no part that opens an answer."""
        tokenizer = self._service.tokenizer
        asked = request.prompt
        ids = tuple(tokenizer.encode(asked)) if isinstance(asked, str) else asked
        wrong = next((token for token in ids if token >= tokenizer.public_rows), None)
        if wrong is not None:
            what = f"token id {wrong} is unknown; the tokenizer's ids are below {tokenizer.public_rows}"
            raise invalid(f"prompt: {what}", "prompt")
        if not ids:
            raise invalid("prompt: is empty; at least one token is needed", "prompt")
        try:
            ShownMedia(self._service.vision).placed(ids)
        except MediaError as error:
            raise invalid(f"prompt: {error}", "prompt") from None
        prompt = Prompt(ids, len(ids))
        self._check_length(prompt, "prompt")
        return prompt


def _check_tools(request: TurnRequest, session: Session) -> None:
    """An append turn may call the tools that its session's prompt names. RequestError (400)."""
    rendered = next((turn for turn in reversed(session.turns) if turn.mode != "append"), None)
    rendered = rendered or next(iter(session.turns), None)
    known = (rendered.request.get("tools") or {}).get("source") if rendered is not None else None
    if request.tools is not None and tools_sha256(request.tools) != known:
        what = "other tools than these" if known else "no tools"
        raise invalid(f"tools: the session's prompt has {what}; send the full history to change them", "tools")
