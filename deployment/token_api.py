"""Prompts as tokens, and tokens as text, in the form that vLLM's server has given these two routes."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool
from starlette.requests import Request

from deployment.body_reading import parse
from deployment.errors import Refused
from deployment.replica_calls import Replicas
from deployment.request_reading import Asking, document_of, tenant_of, turn_request
from deployment.schemas import TokenId, TurnBody
from deployment.turn_api import TurnApi
from deployment.wire import Encoded, TurnRequest


class TextBody(BaseModel):
    """`add_special_tokens` changes nothing: these tokenizers add none."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: str
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool = False


class TokensBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]


class TokenApi:
    def __init__(self, replicas: Replicas, turns: TurnApi, model: str) -> None:
        self._replicas = replicas
        self._turns = turns
        self._model = model

    async def encode(self, request: Request) -> dict[str, Any]:
        """Of a text, or of a conversation as a turn would have it."""
        document, size = await self._turns.document(request)
        tenant = tenant_of(request)
        if isinstance(document, dict) and "messages" in document:
            turn = await self._turns.seen(turn_request(parse(TurnBody, document), "history", Asking(tenant)), size)
            with_strings = document.get("return_token_strs") is True
        else:
            body = parse(TextBody, document)
            turn = TurnRequest(secrets.token_hex(16), "prompt", (), tenant=tenant, prompt=body.prompt)
            with_strings = body.return_token_strs
        encoded = await self.encoded(turn)
        strings = [data.decode("utf-8", errors="replace") for data in encoded.spelled] if with_strings else None
        return {
            "count": len(encoded.ids),
            "max_model_len": encoded.context_limit,
            "tokens": list(encoded.ids),
            "token_strs": strings,
        }

    async def decode(self, request: Request) -> dict[str, Any]:
        body = parse(TokensBody, await document_of(request))
        text = await self._replicas.ask_any("decode", self._model, tuple(body.tokens))
        if isinstance(text, Refused):
            raise text.error
        return {"prompt": text}

    async def encoded(self, turn: TurnRequest) -> Encoded:
        """RequestError (400) for a conversation that cannot be rendered."""
        answer = await self._replicas.ask_any("encode", self._model, turn)
        if isinstance(answer, Refused):
            raise answer.error
        return answer
