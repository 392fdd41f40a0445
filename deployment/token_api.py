"""Prompts as tokens, and tokens as text, in the form that vLLM's server has given these two routes."""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployment.body_reading import parse
from deployment.errors import Refused, invalid
from deployment.replica_calls import Replicas
from deployment.request_reading import (
    MAX_BODY_BYTES,
    Asking,
    beside,
    body_too_large,
    document_of,
    tenant_of,
    turn_request,
)
from deployment.schemas import TokenId, TurnBody
from deployment.turn_api import TurnApi
from deployment.wire import MOST_TOLD_IDS, Encoded, EncodedAs, Route, TurnRequest


class HowTold(BaseModel):
    """What is told beside a prompt's token ids. `add_special_tokens` changes nothing: these tokenizers add none."""

    model_config = ConfigDict(extra="ignore")

    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool = False


class TextBody(HowTold):
    model: str | None = None
    prompt: str


class TokensBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MOST_TOLD_IDS)]


class TokenApi:
    def __init__(self, replicas: Replicas, turns: TurnApi, model: str) -> None:
        self._replicas = replicas
        self._turns = turns
        self._model = model

    async def encode(self, request: Request) -> Response:
        """Of a text, or of a conversation as a turn would have it."""
        document, size = await self._turns.document(request)
        tenant = tenant_of(request)
        if isinstance(document, dict) and "messages" in document:
            if document.get("prompt") is not None:
                raise invalid("prompt: must have exactly one of prompt and messages", "prompt")
            turn, with_strings = await beside(size, self._conversation, document, Asking(tenant))
            turn = await self._turns.seen(turn, size)
        else:
            if size > MAX_BODY_BYTES:
                raise body_too_large(MAX_BODY_BYTES)
            body = parse(TextBody, document)
            self._turns.check_model(body.model)
            turn = TurnRequest(secrets.token_hex(16), "prompt", (), tenant=tenant, prompt=body.prompt)
            with_strings = body.return_token_strs
        encoded = await self._encoded(turn, "spelled" if with_strings else "ids")
        # A million tokens take their time to write: other requests' streams must not wait for them.
        return await asyncio.to_thread(_answer, encoded, with_strings)

    async def decode(self, request: Request) -> dict[str, Any]:
        body = parse(TokensBody, await document_of(request))
        self._turns.check_model(body.model)
        text = await self._replicas.ask_any("decode", self._model, tuple(body.tokens))
        if isinstance(text, Refused):
            raise text.error
        return {"prompt": text}

    async def count(self, turn: TurnRequest) -> int:
        """Of a prompt's tokens. RequestError (400) for a conversation that cannot be rendered."""
        return (await self._encoded(turn, "count")).count

    def _conversation(self, document: Any, asking: Asking) -> tuple[TurnRequest, bool]:
        """The turn, and whether its tokens are spelled."""
        body = parse(TurnBody, document)
        self._turns.check_model(body.model)
        return turn_request(body, "history", asking), parse(HowTold, document).return_token_strs

    async def _encoded(self, turn: TurnRequest, wanted: EncodedAs) -> Encoded:
        # By name, since media may take a while to decode: a replica that is silent and lives is not asked twice.
        answer = await self._replicas.ask("encode", Route(self._model), turn, wanted)
        if isinstance(answer, Refused):
            raise answer.error
        return answer


def _answer(encoded: Encoded, with_strings: bool) -> Response:
    strings = [data.decode("utf-8", errors="replace") for data in encoded.spelled] if with_strings else None
    return JSONResponse(
        {
            "count": encoded.count,
            "max_model_len": encoded.context_limit,
            "tokens": encoded.ids,
            "token_strs": strings,
        }
    )
