"""May a web page have sent this request? Only one of the server's own, where no key says who asks.

A browser sends what any page tells it to, to whatever it reaches: a server that listens for this machine alone
included. It says from which host the page is (`Origin`), and by which name it knows the server (`Host`): a page may
have given a name of its own the address of this machine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployment.authentication import OPEN
from deployment.errors import Refused
from deployment.path_names import route_path


class WebPages:
    def __init__(
        self,
        app: ASGIApp,
        names: Callable[[], Collection[str] | None],
        refusal: Callable[[HTTPConnection, Refused], Response],
    ) -> None:
        """`names` of this server beside `localhost`; None: a key says who asks, and pages have none. It is asked for
        once a request, since there is none before the application runs. `refusal`: in the form of the interface."""
        self._app = app
        self._names = names
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = None if scope["type"] == "lifespan" or route_path(scope) in OPEN else self._names()
        refused = None if names is None else why_not(scope, names)
        if refused is None:
            await self._app(scope, receive, send)
        else:
            await self._refusal(HTTPConnection(scope), refused)(scope, receive, send)


def why_not(scope: Scope, names: Collection[str]) -> Refused | None:
    headers = Headers(scope=scope)
    origin, asked = headers.get("origin"), headers.get("host", "")
    host = _host_of(asked)
    if origin is not None and (host is None or _host_of(origin.partition("://")[2]) != host):
        wanted = f"of {asked[:80]!r}; only a server with api_keys takes requests of others"
        message = f"Origin: {origin[:80]!r} is no page {wanted}"
        return Refused(403, "foreign_page", message, "Origin")
    if asked and _for_this_machine(scope) and not _is_known(host, names):
        message = f"Host: {asked[:80]!r} is no name of this server; list it in host_names, or start it with api_keys"
        return Refused(403, "foreign_host", message, "Host")
    return None


def _host_of(place: str) -> str | None:
    """Of `host:port`. None for what names no host."""
    try:
        return urlsplit(f"//{place}").hostname
    except ValueError:
        return None


def _for_this_machine(scope: Scope) -> bool:
    """Whether the connection came in where nobody but this machine's programs can come."""
    server = scope.get("server")
    found = _address(str(server[0])) if server else None
    # A server on `::` takes IPv4's connections too, and knows their addresses by IPv6's names.
    address = getattr(found, "ipv4_mapped", None) or found
    return address is not None and address.is_loopback


def _is_known(host: str | None, names: Collection[str]) -> bool:
    if host is None:
        return False
    return host == "localhost" or _address(host) is not None or host in {name.lower() for name in names}


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
