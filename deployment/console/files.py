"""The console's files, and the headers that they are sent with: nothing that the page needs lies elsewhere, and no text
that it shows can become a script."""

from __future__ import annotations

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


_FILES = {path.name: path.read_bytes() for path in sorted(_PLACE.iterdir()) if path.suffix in _TYPES}
"""All that there are: what a request names is only ever looked up among them."""

PATHS = frozenset({"/console", *(f"/console/{name}" for name in _FILES)})


def console_file(name: str) -> Response:
    """RequestError (404) for what is no file of the page."""
    if name not in _FILES:
        raise RequestError(404, "not_found", f"the console has no file {name[:80]!r}")
    return Response(_FILES[name], media_type=_TYPES[Path(name).suffix], headers=HEADERS)
