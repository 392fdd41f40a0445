"""What do the written values of a call mean? Its schema says which types a parameter may have.

A value of the type string stands as it is and every other one as JSON, so that some texts have two readings. JSON of a
type that the schema allows wins; what is none is the string itself, whatever the schema says: whoever runs the function
can tell its model what is wrong with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from deployment.parsing.tool_calls import WrittenCall

_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MAX_DEPTH = 16
_MAX_VISITS = 1000
_WORDS = {"true": True, "false": False, "null": None, "none": None}
"""Templates of the Qwen family write Python's words for them in a history, and models write what they have read."""


def arguments_of(call: WrittenCall, schema: Mapping[str, Any] | None) -> str:
    """The call's arguments as JSON text. `schema`: that of its function's parameters; None if nobody knows it, and then
    every value is a string."""
    root = schema or {}
    properties = root.get("properties")
    known = properties if isinstance(properties, dict) else {}
    others = root.get("additionalProperties", {"type": "string"})
    values = {key: _typed(text, types_of(known.get(key, others), root)) for key, text in call.parameters}
    return json.dumps(values, ensure_ascii=False)


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; all of them where it does not say, or cannot be understood."""
    return _SchemaTypes(root).of(schema)


class _SchemaTypes:
    """References may branch as often as they are followed: after so many parts, nothing more is understood."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._visits = 0

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        self._visits += 1
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or self._visits > _MAX_VISITS:
            return _TYPES
        given = schema.get("type")
        named = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        types = frozenset(name for name in named if isinstance(name, str)) & _TYPES or _TYPES
        for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
            if isinstance(values, list) and values:
                types &= frozenset().union(*map(_types_of_value, values))
        if isinstance(schema.get("$ref"), str):
            types &= self.of(_led_to(schema["$ref"], self._root), depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(keyword), list) and parts:
                types &= frozenset().union(*(self.of(part, depth + 1) for part in parts))
        if isinstance(parts := schema.get("allOf"), list):
            for part in parts:
                types &= self.of(part, depth + 1)
        return types or frozenset({"string"})


def _led_to(reference: str, root: Mapping[str, Any]) -> Any:
    part: Any = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        part = part.get(name) if isinstance(part, dict) else None
    return part


def _types_of_value(value: Any) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    kinds = {str: "string", float: "number", type(None): "null", dict: "object", list: "array"}
    return frozenset({kinds[type(value)]})


def _typed(text: str, types: frozenset[str]) -> Any:
    if types == {"string"}:
        return text
    try:
        value = _read(text)
    except (ValueError, RecursionError):
        return text
    kinds = _types_of_value(value)
    if isinstance(value, str) or not kinds & types:
        return text
    return int(value) if isinstance(value, float) and "integer" in kinds and "number" not in types else value


def _read(text: str) -> Any:
    word = text.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    value = json.loads(text)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("no number of JSON")
    # what lies in it must be JSON too, which knows neither NaN nor infinity
    json.dumps(value, allow_nan=False)
    return value
