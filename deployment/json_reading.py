"""How is a request body read? As JSON that can be rendered, kept in a session and sent back, within its limits."""

from __future__ import annotations

import json
import math
from typing import Any

from deployment.errors import field_name, invalid

MAX_DEPTH = 16
"""Nesting of a request body. What a session keeps of it lies deeper in a manifest, which has a limit of its own."""

MAX_SCHEMA_DEPTH = 64
"""The same for schemas and for what a tool was called with, which a session keeps as text, if at all."""

_SCHEMAS = ("response_format", "tools", "text", "output_config")
"""The fields that hold schemas, in one interface or another."""


def read_json(body: bytes | bytearray) -> Any:
    """Parses a request body into values that can be rendered, kept in a session and sent back.

    Raises RequestError (400): for what is no JSON, for text that UTF-8 cannot hold, for numbers that are no 64-bit
    integer or finite float, and for a nesting deeper than MAX_DEPTH, or MAX_SCHEMA_DEPTH where that holds.
    """
    try:
        document = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise invalid(f"the request body is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise invalid(f"the request body is not JSON: {error}") from None
    _check_plain(document, (), MAX_DEPTH)
    return document


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _check_plain(value: Any, place: tuple[str | int, ...], limit: int) -> None:
    wrong = ""
    if len(place) > limit:
        place, wrong = place[:1], f"is nested deeper than {limit} levels"
    elif isinstance(value, dict):
        for key, element in value.items():
            _check_plain(key, (*place, ascii(key)[1:-1]), limit)
            _check_plain(element, (*place, key), MAX_SCHEMA_DEPTH if _as_text(key, value, place) else limit)
    elif isinstance(value, list):
        for index, element in enumerate(value):
            _check_plain(element, (*place, index), limit)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            wrong = f"holds a lone surrogate at character {error.start}, which is no text"
    elif isinstance(value, int):
        wrong = "" if -(2**63) <= value < 2**64 else f"{shown(value)} does not fit 64 bits"
    elif isinstance(value, float):
        wrong = "" if math.isfinite(value) else "must be a finite number"
    if wrong:
        param = field_name(place)
        raise invalid(f"{param or 'the request body'}: {wrong}", param or None)


def _as_text(field: str, fields: dict[str, Any], place: tuple[str | int, ...]) -> bool:
    """Whether this field of `fields`, which stand at `place`, becomes text before anybody keeps it."""
    if not place:
        return field in _SCHEMAS
    # A tool's call in a message of Anthropic's interface, messages[0].content[0].input: no other takes such a block.
    return len(place) == 4 and (place[0], place[2], field, fields.get("type")) == (
        "messages", "content", "input", "tool_use",
    )  # fmt: skip


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
