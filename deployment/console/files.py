"""The console's files, and the headers that they are sent with: nothing that the page needs lies elsewhere, and no text
that it shows can become a script."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.responses import Response

from deployment.errors import RequestError

PAGE = "index.html"

_PLACE = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def console_file(name: str) -> Response:
    """One of the files beside this one. RequestError (404)."""
    files = _files()
    if name not in files:
        raise RequestError(404, "not_found", f"the console has no file {name[:80]!r}")
    return Response(files[name], media_type=_TYPES[Path(name).suffix], headers=HEADERS)


@cache
def _files() -> dict[str, bytes]:
    """Those that there are: what a request names is only ever looked up among them."""
    return {path.name: path.read_bytes() for path in _PLACE.iterdir() if path.suffix in _TYPES}
