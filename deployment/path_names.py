"""Which part of a request's path is whose name? A slash that came as %2F belongs to a name, and parts nothing.

An ASGI server hands on the path decoded, where `/v1/sessions/x%2Fexport` and `/v1/sessions/x/export` are the same. Here
it is taken as it came: slashes and percent signs of names stay encoded until a route has found its names.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from starlette.convertors import Convertor, register_url_convertor
from starlette.types import ASGIApp, Receive, Scope, Send


class Name(Convertor[str]):
    """A part of the path, decoded."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return unquote(value)

    def to_string(self, value: str) -> str:
        return quote(value, safe="")


class LongName(Name):
    """The same, or several parts: some write the slashes of a name as they are."""

    regex = ".*"


register_url_convertor("name", Name())
register_url_convertor("long_name", LongName())


class PathNames:
    """Around the whole application, whose routes take each of their names as a `name` or a `long_name`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            scope = {**scope, "path": _kept(scope.get("raw_path"), scope["path"])}
        await self._app(scope, receive, send)


def route_path(scope: Scope) -> str:
    """The path as the routes name it: without the prefix under which Serve has the application."""
    return scope.get("path", "").removeprefix(scope.get("root_path", ""))


def _kept(raw: bytes | None, path: str) -> str:
    parts = path.split("/") if raw is None else map(unquote, raw.decode("ascii").split("/"))  # ASGI may not have it
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in parts)
