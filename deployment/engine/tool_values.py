"""What may stand as the value of a tool's parameter? A JSON Schema, split into texts and JSON.

A value of the type string is written as it is and every other one as JSON, so that one schema can allow both. What
stands as it is comes from the keywords of strings here; what stands as JSON is left to the grammar library, as the
chat template's `tojson` writes it. Local references are followed, to `$defs` and `definitions` of the parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ANY = "TEXT"
"""The pattern of a string without limits: a terminal that the grammar around it defines."""

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
     "contentMediaType", "contentEncoding"}
)  # fmt: skip
_OF_STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
_TYPE_OF = {
    "properties": "object", "required": "object", "additionalProperties": "object", "patternProperties": "object",
    "items": "array", "prefixItems": "array", "minItems": "array", "maxItems": "array",
    "minimum": "number", "maximum": "number", "exclusiveMinimum": "number", "exclusiveMaximum": "number",
    "multipleOf": "number", **dict.fromkeys(_OF_STRINGS, "string"),
}  # fmt: skip
"""Which type a schema means that has a keyword of one type only and does not say."""

_SHARED = ("$defs", "definitions")
_AS_RENDERED = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_MAX_DEPTH = 32
_MAX_VISITS = 2000
_WORDS = {
    "null": '"null"',
    "boolean": '"true" | "false"',
    "integer": "/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?/",
}

_DATE = (
    r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "email": rf"[A-Za-z0-9_+-]{{1,64}}(\.[A-Za-z0-9_+-]{{1,64}}){{0,3}}@{_LABEL}(\.{_LABEL}){{1,3}}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:(\/\/[A-Za-z0-9.:-]+)?[A-Za-z0-9._~:\/?@!$&'()*+,;=%-]*",
}
"""Texts of a format: never a wrong one, but not all of them. A 29th of February needs a pattern."""


class SchemaRefused(ValueError):
    """A schema that this cannot express; the message names the keyword."""


@dataclass(frozen=True)
class Values:
    """`patterns`: terminals of Lark; `words`: strings that may stand there as they are; `schemas`: JSON Schemas of what
    is no string. Where there are patterns, they are all."""

    patterns: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    schemas: tuple[dict[str, Any], ...] = ()

    def __add__(self, other: Values) -> Values:
        return Values(
            self.patterns + other.patterns,
            self.words + tuple(word for word in other.words if word not in self.words),
            self.schemas + other.schemas,
        )


def values_of(schema: Any, root: Mapping[str, Any]) -> Values:
    """`schema` of one parameter; `root`: the parameters' own schema. Raises SchemaRefused."""
    shared = {name: root[name] for name in _SHARED if name in root}
    # a parameter is compiled alone, with what lies in `$defs` and `definitions`, and nothing else
    for reference in _references([schema, shared], 0):
        if not re.match(r"#/(\$defs|definitions)/", reference):
            raise SchemaRefused(f"$ref is {reference!r}, must lead to #/$defs/ or #/definitions/ of the parameters")
        _resolved(reference, root)
    found = _Splitter(root).values(schema, 0)
    if ANY in found.patterns:
        return Values((ANY,))  # all that is no string has the text of a string
    if found.patterns:
        words = (*map(lark_string, found.words), *(_scalars(part) for part in found.schemas))
        return Values(found.patterns + words)
    wrong = next((word for word in found.words if "\n</parameter>" in f"\n{word}"), None)
    if wrong is not None:
        raise SchemaRefused(f"the value {wrong!r} has a line that begins with </parameter>, which ends a value")
    return Values((), found.words, tuple({**shared, **part, **_AS_RENDERED} for part in found.schemas))


class _Splitter:
    """Follows the references and alternatives at the top of a schema. `root`: where references lead."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._visits = 0

    def values(self, schema: Any, depth: int) -> Values:
        self._visits += 1
        if depth > _MAX_DEPTH or self._visits > _MAX_VISITS:
            raise SchemaRefused("references and alternatives lead in a circle, or to too many parts")
        if schema is True:
            return Values((ANY,))
        if not isinstance(schema, dict):
            raise SchemaRefused(f"a schema is {json.dumps(schema)[:40]}, must be an object or true")
        own = {key: value for key, value in schema.items() if key not in _ANNOTATIONS and not key.startswith("x-")}
        if "$ref" in own:
            _alone("$ref", own)
            if not isinstance(own["$ref"], str):
                raise SchemaRefused(f"$ref is {own['$ref']!r}, must be a text that begins with #/")
            return self.values(_resolved(own["$ref"], self._root), depth + 1)
        if isinstance(own.get("allOf"), list) and len(own["allOf"]) == 1:
            _alone("allOf", own)
            return self.values(own["allOf"][0], depth + 1)
        keyword = next((keyword for keyword in ("anyOf", "oneOf") if keyword in own), None)
        if keyword is None or ("type" in own and "string" not in _types(own)):
            return _plain(own)
        found = self._alternatives(keyword, own[keyword], depth)
        if not found.patterns and not found.words:
            return Values((), (), (own,))
        _alone(keyword, own)
        return found

    def _alternatives(self, keyword: str, parts: Any, depth: int) -> Values:
        if not isinstance(parts, list) or not parts:
            raise SchemaRefused(f"{keyword} must be a list of at least one schema")
        found = Values()
        for part in parts:
            more = self.values(part, depth + 1)
            both = (found.patterns or found.words) and (more.patterns or more.words)
            if keyword == "oneOf" and both and (found.patterns or more.patterns or set(found.words) & set(more.words)):
                raise SchemaRefused("oneOf has several parts that one string may match; anyOf allows that")
            found += more
        if keyword == "oneOf" and len(found.schemas) > 1:
            return Values(found.patterns, found.words, ({"oneOf": list(found.schemas)},))
        return found


def _plain(own: dict[str, Any]) -> Values:
    """A schema without references and alternatives at its top."""
    types = _types(own)
    rest = [kind for kind in types if kind != "string"]
    if "const" in own or "enum" in own:
        _alone("const" if "const" in own else "enum", own, "type")
        listed = [own["const"]] if "const" in own else own["enum"]
        if not isinstance(listed, list) or not listed:
            raise SchemaRefused("enum must be a list of at least one value")
        words = tuple(value for value in listed if isinstance(value, str)) if "string" in types else ()
        others = [value for value in listed if not isinstance(value, str)] if rest else []
        if not words and not others:
            raise SchemaRefused("no value of enum or const has the type")
        kinds = {"type": rest} if "type" in own else {}
        return Values((), words, ({**kinds, "enum": others},) if others else ())
    if "string" not in types:
        return Values((), (), (own,))
    numeric = {"number"} if "integer" in rest else set[str]()
    allowed = _OF_STRINGS | {"type"} | {key for key, kind in _TYPE_OF.items() if kind in numeric.union(rest)}
    unknown = next((key for key in own if key not in allowed), None)
    if unknown is not None:
        raise SchemaRefused(f"{unknown} is not supported where the value may be a string")
    others = {key: value for key, value in own.items() if key not in _OF_STRINGS}
    return Values((_string(own),), (), ({**others, "type": rest},) if rest else ())


def _types(own: Mapping[str, Any]) -> list[str]:
    """The types that a schema allows; where it says nothing, what its keywords are of, or all."""
    given = own.get("type")
    if given is None:
        meant = next((kind for key, kind in _TYPE_OF.items() if key in own), None)
        return [meant] if meant else ["string", "number", "boolean", "null", "object", "array"]
    types = given if isinstance(given, list) else [given]
    if not types or not all(isinstance(kind, str) for kind in types):
        raise SchemaRefused(f"type is {json.dumps(given)}, must be the name of a type or a list of them")
    return types


def _alone(keyword: str, own: Mapping[str, Any], *beside: str) -> None:
    other = next((key for key in own if key not in (keyword, *beside)), None)
    if other is not None:
        raise SchemaRefused(f"{other} beside {keyword} is not supported where the value may be a string")


# ------------------------------------------------------------------------------------------------ references


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    part: Any = root
    for name in reference.removeprefix("#/").split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(part, dict) or name not in part:
            raise SchemaRefused(f"$ref is {reference!r}, which leads nowhere")
        part = part[name]
    return part


def _references(part: Any, depth: int) -> Iterator[str]:
    if depth > 4 * _MAX_DEPTH:
        raise SchemaRefused(f"the schema is nested deeper than {4 * _MAX_DEPTH} levels")
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for inner in part.values():
            yield from _references(inner, depth + 1)
    elif isinstance(part, list):
        for inner in part:
            yield from _references(inner, depth + 1)


# ------------------------------------------------------------------------------------------------ strings


def lark_string(text: str) -> str:
    """A literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _string(own: Mapping[str, Any]) -> str:
    """The terminal of a string within the limits of a schema."""
    parts: list[str] = []
    if "pattern" in own:
        parts.append(_searched(own["pattern"]))
    if "format" in own:
        known = FORMATS.get(own["format"]) if isinstance(own["format"], str) else None
        if known is None:
            raise SchemaRefused(f"format is {own['format']!r}, must be one of {', '.join(FORMATS)}")
        parts.append(known)
    if "minLength" in own or "maxLength" in own:
        least, most = own.get("minLength", 0), own.get("maxLength", "")
        for keyword, value in (("minLength", least), ("maxLength", most)):
            if value != "" and (type(value) is not int or value < 0):
                raise SchemaRefused(f"{keyword} is {value!r}, must be an integer of at least 0")
        if most != "" and most < least:
            raise SchemaRefused(f"maxLength is {most}, must be at least minLength, which is {least}")
        parts.append(f"(?s:.{{{least},{most}}})")
    return " & ".join(f"/{part}/" for part in parts) or ANY


def _searched(pattern: Any) -> str:
    """A schema's pattern, which may match anywhere in a string, as one that matches all of it."""
    if not isinstance(pattern, str) or not pattern:
        raise SchemaRefused(f"pattern is {pattern!r}, must be a regular expression")
    branches: list[list[str]] = [[]]
    depth = 0
    for piece in re.findall(r"\\.|\[(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            branches.append([])
        else:
            escaped = re.sub(r"\\.|/", lambda m: r"\/" if m[0] == "/" else m[0], piece, flags=re.DOTALL)
            branches[-1].append(escaped.replace("\n", r"\n"))
    anything = "(?s:.*)"
    whole: list[str] = []
    for branch in branches:
        begins, ends = branch[:1] == ["^"], branch[-1:] == ["$"]
        inner = "".join(branch[begins : len(branch) - ends])
        whole.append(f"{'' if begins else anything}({inner}){'' if ends else anything}")
    return "|".join(whole)


def _scalars(schema: Mapping[str, Any]) -> str:
    """What is no string beside strings with limits, as a terminal: JSON's words, and numbers without limits."""
    if set(schema) <= {"type", "enum"} and not any(isinstance(v, dict | list) for v in schema.get("enum", ())):
        if "enum" in schema:
            return " | ".join(lark_string(json.dumps(value, ensure_ascii=False)) for value in schema["enum"])
        types = _types(schema)
        if all(kind in _WORDS for kind in types):
            return " | ".join(_WORDS[kind] for kind in types)
    raise SchemaRefused(
        "beside a string with limits there may be null, booleans, numbers without limits and fixed values only"
    )
