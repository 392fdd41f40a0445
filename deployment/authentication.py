"""Who sends a request? Told here, before any route sees it, or the request is refused.

A layer around the whole application, so that no route, one that is added later neither, can be reached without it.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployment.api_keys import TenantOf
from deployment.console import files as console
from deployment.errors import Refused
from deployment.path_names import route_path

OPEN = frozenset({"/health", *console.PATHS})
"""For load balancers, which have no key, and for browsers, which have none before they have the page that asks for it.
They say nothing of anybody."""

MISSING = Refused(
    401, "invalid_api_key", "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY", "authorization"
)
WRONG = Refused(401, "invalid_api_key", "this API key is not known here", "authorization")


class Authentication:
    """Gives each request its tenant, as `request.state.tenant`."""

    def __init__(
        self,
        app: ASGIApp,
        tenant_of: Callable[[], TenantOf],
        refusal: Callable[[HTTPConnection, Refused], Response],
    ) -> None:
        """`tenant_of` is asked for once a request, since there is none before the application runs. `refusal`: in the
        form of the interface that was asked."""
        self._app = app
        self._tenant_of = tenant_of
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or route_path(scope) in OPEN:
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        key = _key_of(connection)
        tenant = self._tenant_of()(key)
        if tenant is None:
            await self._refusal(connection, WRONG if key else MISSING)(scope, receive, send)
            return
        connection.state.tenant = tenant
        await self._app(scope, receive, send)


def _key_of(connection: HTTPConnection) -> str:
    """OpenAI's header, or Anthropic's; empty without one."""
    header = connection.headers.get("authorization") or connection.headers.get("x-api-key", "")
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else header
