"""Reading JSON configs field by field, so that every refusal names the field, its value and what would be right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from model.errors import ModelError

_MISSING = object()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError if the file is missing, not JSON, or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


class Fields:
    """Typed look-ups in one or more JSON objects; the first that has the field wins. `null` counts as missing.

    Every reader raises ModelError for a missing field without a default, and for a value of the wrong kind.
    """

    def __init__(self, label: str, *sources: Mapping[str, Any]) -> None:
        self.label = label
        self._sources = sources

    def fail(self, sentence: str) -> NoReturn:
        raise ModelError(f"{self.label}: {sentence}")

    def raw(self, name: str) -> Any:
        """The value as it stands in the file, or None."""
        return next((source[name] for source in self._sources if source.get(name) is not None), None)

    def _value(self, name: str, default: Any) -> Any:
        value = self.raw(name)
        if value is not None:
            return value
        if default is _MISSING:
            self.fail(f"{name} is required but missing")
        return default

    def integer(self, name: str, default: Any = _MISSING, *, minimum: int = 1) -> Any:
        value = self._value(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.fail(f"{name} is {value!r}, but must be a whole number of at least {minimum}")
        return value

    def number(self, name: str, default: Any = _MISSING, *, above: float | None = 0.0) -> Any:
        """A finite number; `above` is an exclusive lower bound, None for no bound."""
        value = self._value(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
            self.fail(f"{name} is {value!r}, but must be a finite number")
        if above is not None and not value > above:
            self.fail(f"{name} is {value!r}, but must be greater than {above:g}")
        return float(value)

    def flag(self, name: str, default: Any = _MISSING) -> Any:
        value = self._value(name, default)
        if value is not default and not isinstance(value, bool):
            self.fail(f"{name} is {value!r}, but must be true or false")
        return value

    def text(self, name: str, default: Any = _MISSING) -> Any:
        value = self._value(name, default)
        if value is not default and not isinstance(value, str):
            self.fail(f"{name} is {value!r}, but must be a string")
        return value

    def choices(self, name: str, allowed: tuple[str, ...]) -> tuple[Any, ...] | None:
        """A list whose items are all among `allowed`; None if missing."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list):
            self.fail(f"{name} is {value!r}, but must be a list")
        for index, item in enumerate(value):
            if item not in allowed:
                self.fail(f"{name}[{index}] is {item!r}, but must be one of {', '.join(allowed)}")
        return tuple(value)

    def ids(self, name: str) -> tuple[int, ...] | None:
        """One id or a list of ids, each a whole number of at least 0; None if missing."""
        value = self.raw(name)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                self.fail(f"{name} is {value!r}, but must hold whole numbers of at least 0")
        return tuple(items)

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            self.fail(f"{name} is {value!r}, but must be an object")
        return value

    def refuse(self, name: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuses `name` unless it is missing or one of `allowed` (1 is not True here)."""
        value = self.raw(name)
        if value is None or any(type(value) is type(item) and value == item for item in allowed):
            return
        self.fail(f"{name} is {value!r}, which is not supported: {why}")
