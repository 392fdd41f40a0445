"""From a request's JSON to its body, or to a sentence that names the first field at fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from deployment.errors import RequestError, field_name, invalid
from deployment.json_reading import json_type, shown
from deployment.schemas import NEUTRAL_WITHOUT_TOOLS, AnswerBody, neutral_values

Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], document: Any) -> Body:
    """Validates a request body, or raises a RequestError that names the first field at fault. A field that is null is
    one that was left out."""
    if not isinstance(document, dict):
        raise invalid(f"the request body must be a JSON object, not {json_type(document)}")
    fields = kind.model_fields
    known = {
        name: value
        for name, value in document.items()
        if name in fields and (value is not None or fields[name].is_required())
    }
    for name, value in document.items():
        if name not in fields and not _may_say(kind, name, document):
            raise invalid(f"{name}: {shown(value)} is not supported", name)
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise _explained(error, known) from None


_NEUTRAL = neutral_values()


def _may_say(kind: type[BaseModel], name: str, document: Mapping[str, Any]) -> bool:
    """Whether a body may hold what is no field of its kind."""
    if not issubclass(kind, AnswerBody):
        return kind.model_config.get("extra") == "ignore"
    return name not in _NEUTRAL or asks_nothing(name, document)


def asks_nothing(name: str, document: Mapping[str, Any]) -> bool:
    """Whether a field of a document leaves the answer as it is without it. No for a field that nobody knows."""
    value = document.get(name)
    values = () if document.get("tools") else NEUTRAL_WITHOUT_TOOLS.get(name, ())
    return name in _NEUTRAL and (value is None or any(_same(value, one) for one in (*_NEUTRAL[name], *values)))


def _same(value: Any, neutral: Any) -> bool:
    """bool is an int to Python: `n: true` is not `n: 1`."""
    return value == neutral and _kind(value) == _kind(neutral)


def _kind(value: Any) -> type:
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


def _parts(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(part, dict) for part in value)


def _explained(error: ValidationError, document: dict[str, Any]) -> RequestError:
    first, *others = error.errors(include_url=False)
    while first["type"] == "string_type" and _parts(first["input"]):
        # Text, or a list of parts: whoever sent a list wants to know what is wrong in it.
        stem = first["loc"][:-1]
        others = [other for other in others if other["loc"][: len(stem)] == stem and len(other["loc"]) > len(stem) + 1]
        if not others:
            break
        first, *others = others
    param = field_name(_place(first["loc"], document))
    message = first["msg"].removeprefix("Value error, ")
    return invalid(f"{param}: {message[:1].lower()}{message[1:]}, got {shown(first['input'])}", param)


def _place(location: tuple[str | int, ...], value: Any) -> Iterator[str | int]:
    """The fields and indices of a location in a document: members of a union, their tags and validators add names of
    their own, which the client does not know."""
    for part, following in zip(location, (*location[1:], None), strict=True):
        if isinstance(part, int):
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif isinstance(value, dict) and _is_field(part, following, value):
            value = value.get(part)
        else:
            continue
        yield part


def _is_field(part: str, following: str | int | None, fields: dict[str, Any]) -> bool:
    """Whether this part of a location is a field's name. One that is missing comes last."""
    if "[" in part or (part not in fields and following is not None):
        return False
    return part != fields.get("type") or following not in fields
