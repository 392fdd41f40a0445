"""A refusal as an HTTP response."""

from __future__ import annotations

from starlette.responses import JSONResponse

from deployment.errors import Refused


def refusal(refused: Refused) -> JSONResponse:
    headers = {"retry-after": "1"} if refused.status in (429, 503) else {}
    return JSONResponse(refused.body, refused.status, headers)
