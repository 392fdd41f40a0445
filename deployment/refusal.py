"""A refusal as an HTTP response."""

from __future__ import annotations

from starlette.responses import JSONResponse

from deployment.errors import Refused

_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "1"}}


def refusal(refused: Refused) -> JSONResponse:
    return JSONResponse(refused.body, refused.status, _HEADERS.get(refused.status))
