"""What does the application hear of a client that has left? That it has, as ASGI says it.

Serve's proxy may cancel a request before it has told so. Then the next `receive` raises, in a call whose outcome nobody
asks for any more: each such client would leave a traceback in the log.
"""

from __future__ import annotations

from ray.exceptions import RayError
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class LeavingClients:
    """Around the whole application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def received() -> Message:
            try:
                return await receive()
            except RayError:  # whoever could have told is out of reach, and with it the client
                return {"type": "http.disconnect"}

        await self._app(scope, received if scope["type"] == "http" else receive, send)
