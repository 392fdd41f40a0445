"""What an answer says, in the order in which it says it: thinking, text, and calls between texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from deployment.parsing.turn_text import ToolCall
from deployment.wire import Closed, Delta


@dataclass(frozen=True)
class Thought:
    text: str


@dataclass(frozen=True)
class Text:
    text: str


Piece = Thought | Text | ToolCall


def pieces(event: Delta | Closed) -> Iterator[Piece]:
    """What one event adds."""
    if event.reasoning:
        yield Thought(event.reasoning)
    begin = 0
    for call in event.calls if isinstance(event, Delta) else ():
        if call.at > begin:
            yield Text(event.content[begin : call.at])
        yield call
        begin = call.at
    if event.content[begin:]:
        yield Text(event.content[begin:])


def joined(events: Iterable[Delta | Closed]) -> list[Piece]:
    """All that events add; neighbours of one kind are one piece."""
    whole: list[Piece] = []
    for event in events:
        for piece in pieces(event):
            last = whole[-1] if whole else None
            if isinstance(piece, Text) and isinstance(last, Text):
                whole[-1] = Text(last.text + piece.text)
            elif isinstance(piece, Thought) and isinstance(last, Thought):
                whole[-1] = Thought(last.text + piece.text)
            else:
                whole.append(piece)
    return whole
