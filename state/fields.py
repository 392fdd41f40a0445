"""How are fields taken out of a decoded map that nobody vouches for? Each with the type and range it must have."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from state.errors import FormatError

LARGEST = 1 << 53

Tokens = NDArray[np.uint32]


class Fields:
    """A decoded map; `place` names it in errors. Every method raises `FormatError` naming the field.

    `ignore_unknown`: the map is of a newer minor version, in which there may be fields that we do not know.
    """

    def __init__(self, values: dict[str, Any], place: str, ignore_unknown: bool = False) -> None:
        self.values = values
        self.place = place
        self._ignore_unknown = ignore_unknown

    def raw(self, name: str) -> object:
        if name not in self.values:
            raise FormatError(f"{self.place}.{name}", "is missing")
        return self.values[name]

    def allow_only(self, names: Collection[str]) -> None:
        for name in () if self._ignore_unknown else self.values:
            if name not in names:
                raise FormatError(f"{self.place}.{_short(name)}", "is not a field of this format version")

    def refuse(self, name: str, wanted: str) -> FormatError:
        return FormatError(f"{self.place}.{_short(name)}", f"is {_short(self.raw(name))}, must be {wanted}")

    def whole(self, name: str, lowest: int = 0, limit: int = LARGEST) -> int:
        """A whole number in [lowest, limit)."""
        value = self.raw(name)
        if type(value) is not int or not lowest <= value < limit:
            raise self.refuse(name, f"a whole number from {lowest} to {limit - 1}")
        return value

    def optional_whole(self, name: str) -> int | None:
        return None if self.raw(name) is None else self.whole(name)

    def number(self, name: str, wanted: str) -> float:
        """A number in [0, 2^53)."""
        value = self.raw(name)
        if type(value) not in (int, float) or not 0 <= (found := float(cast(float, value))) < LARGEST:
            raise self.refuse(name, wanted)
        return found

    def octets(self, name: str, size: int | None = None) -> bytes:
        value = self.raw(name)
        if not isinstance(value, bytes):
            raise self.refuse(name, "bytes")
        if size is not None and len(value) != size:
            raise FormatError(f"{self.place}.{name}", f"has {len(value)} bytes, must have {size}")
        return value

    def words(self, name: str, limit: int) -> Tokens:
        """Unsigned 32-bit numbers, at most `limit`: a view, nothing is copied."""
        data = self.octets(name)
        if len(data) % 4:
            raise FormatError(f"{self.place}.{name}", f"has {len(data)} bytes, must be a multiple of 4")
        if len(data) // 4 > limit:
            raise FormatError(f"{self.place}.{name}", f"has {len(data) // 4} entries, may have {limit}")
        return np.frombuffer(data, dtype="<u4")

    def text(self, name: str, longest: int = 64) -> str:
        value = self.raw(name)
        if not isinstance(value, str) or not 1 <= len(value) <= longest:
            raise self.refuse(name, f"text of 1 to {longest} characters")
        return value

    def optional_text(self, name: str, longest: int) -> str | None:
        return None if self.raw(name) is None else self.text(name, longest)

    def one_of(self, name: str, allowed: Collection[str]) -> str:
        value = self.raw(name)
        if not isinstance(value, str) or value not in allowed:
            raise self.refuse(name, f"one of {', '.join(allowed)}")
        return value

    def visible(self, name: str) -> str:
        value = self.text(name, 128)
        if not _is_visible(value):
            raise self.refuse(name, "1 to 128 visible ASCII characters")
        return value

    def hex_id(self, name: str) -> str:
        value = self.raw(name)
        if not isinstance(value, str) or len(value) != 32 or set(value) - set("0123456789abcdef"):
            raise self.refuse(name, "32 hex digits")
        return value

    def optional_hex_id(self, name: str) -> str | None:
        return None if self.raw(name) is None else self.hex_id(name)

    def wholes(self, name: str, count: int) -> tuple[int, ...]:
        """So many whole numbers."""
        numbers = _whole_numbers(self.raw(name))
        if numbers is None or len(numbers) != count:
            raise self.refuse(name, f"{count} whole numbers")
        return numbers

    def numbers(self, name: str) -> tuple[float, ...]:
        """Any count of numbers in [0, 2^53)."""
        value = self.raw(name)
        found = cast(list[object], value) if isinstance(value, list) else [None]
        if not all(type(one) in (int, float) and 0 <= cast(float, one) < LARGEST for one in found):
            raise self.refuse(name, "a list of numbers from 0")
        return tuple(float(cast(float, one)) for one in found)

    def pair(self, name: str) -> tuple[int, int]:
        numbers = _whole_numbers(self.raw(name))
        if numbers is None or len(numbers) != 2:
            raise self.refuse(name, "two whole numbers")
        return numbers[0], numbers[1]

    def optional_pair(self, name: str) -> tuple[int, int] | None:
        return None if self.raw(name) is None else self.pair(name)

    def layout(self, name: str) -> tuple[str, tuple[int, ...]]:
        value = self.raw(name)
        if isinstance(value, list) and len(cast(list[object], value)) == 2:
            dtype, shape = cast(list[object], value)
            sizes = _whole_numbers(shape)
            if isinstance(dtype, str) and sizes is not None:
                return dtype, sizes
        raise self.refuse(name, "[dtype, shape]")

    def facts(self) -> dict[str, str | int]:
        """The map itself, of text and whole numbers, named by 1 to 64 visible ASCII characters."""
        for name, value in self.values.items():
            if not 1 <= len(name) <= 64 or not _is_visible(name):
                problem = "is no name of a fact, which has 1 to 64 visible ASCII characters"
                raise FormatError(f"{self.place}.{_short(name)}", problem)
            if type(value) not in (str, int):
                raise self.refuse(name, "text or a whole number")
        return self.values

    def plain(self, name: str) -> dict[str, Any]:
        """A map whose content is the writer's business."""
        return self.child(name).values

    def child(self, name: str) -> Fields:
        value = self.raw(name)
        if not isinstance(value, dict):
            raise self.refuse(name, "a map")
        return Fields(cast(dict[str, Any], value), f"{self.place}.{_short(name)}", self._ignore_unknown)

    def maps(self, name: str) -> list[dict[str, Any]]:
        """A list of maps, of which nothing else is asked: there may be a million."""
        value = self.raw(name)
        if not isinstance(value, list):
            raise self.refuse(name, "a list of maps")
        elements = cast(list[object], value)
        wrong = next((index for index, entry in enumerate(elements) if not isinstance(entry, dict)), None)
        if wrong is not None:
            raise FormatError(f"{self.place}.{name}[{wrong}]", f"is {_short(elements[wrong])}, must be a map")
        return cast(list[dict[str, Any]], value)

    def children(self, name: str, limit: int | None = None) -> list[Fields]:
        elements = self.maps(name)
        if limit is not None and len(elements) > limit:
            raise FormatError(f"{self.place}.{name}", f"has {len(elements)} entries, may have {limit}")
        entries: list[Fields] = []
        for index, entry in enumerate(elements):
            place = f"{self.place}.{name}[{index}]"
            entries.append(Fields(entry, place, self._ignore_unknown))
        return entries


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    numbers = cast(list[object], value)
    if all(type(number) is int and 0 <= number < LARGEST for number in numbers):
        return tuple(cast(list[int], numbers))
    return None


def _is_visible(text: str) -> bool:
    return all("!" <= character <= "~" for character in text)


def _short(value: object) -> str:
    shown = value if isinstance(value, str) and value.isidentifier() else repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
