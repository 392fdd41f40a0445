"""Server-sent events out of bytes that may be cut anywhere. What was not ended by an empty line did not come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerEvent:
    data: str
    id: str = ""
    name: str = "message"


class EventLines:
    """The events of one connection. Lines end with LF or CRLF, as this interface writes them."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._fields: dict[str, str] = {}

    def feed(self, data: bytes) -> Iterator[ServerEvent]:
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            text = bytes(line).removesuffix(b"\r").decode("utf-8", errors="replace")
            if text:
                self._take(text)
            elif event := self._event():
                yield event

    def _take(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data" and "data" in self._fields:
            value = f"{self._fields['data']}\n{value}"
        # A comment is a line whose name is empty.
        if name in ("id", "data", "event"):
            self._fields[name] = value

    def _event(self) -> ServerEvent | None:
        fields, self._fields = self._fields, {}
        if "data" not in fields and "event" not in fields:
            return None
        return ServerEvent(fields.get("data", ""), fields.get("id", ""), fields.get("event", "message"))
