"""Which parts of an arena are free, and which one is taken next? In memory alone: it follows from what is not free.

Small things are taken from the bottom and large ones from the top, so that the small do not come to lie between the
large. A span that is given back becomes one with its free neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Span:
    """`place`: where it begins, `size`: how far it goes, in bytes."""

    place: int
    size: int

    @property
    def end(self) -> int:
        return self.place + self.size


class FreeSpans:
    """Spans that do not touch each other, in the order of their places."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self.total = 0

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    @property
    def largest(self) -> int:
        return max((span.size for span in self._spans), default=0)

    def take(self, size: int, *, from_top: bool) -> Span | None:
        """Takes out the first span, from the bottom or the top, that has at least `size` bytes. None: there is none."""
        order = range(len(self._spans))
        for index in reversed(order) if from_top else order:
            if self._spans[index].size >= size:
                span = self._spans.pop(index)
                self.total -= span.size
                return span
        return None

    def give(self, span: Span) -> Span:
        """Puts back a span that is not among them, and says as part of which one it is free now."""
        self.total += span.size
        index = bisect_left(self._spans, span)
        if index < len(self._spans) and span.end == self._spans[index].place:
            span = Span(span.place, span.size + self._spans.pop(index).size)
        if index and self._spans[index - 1].end == span.place:
            before = self._spans.pop(index - 1)
            span = Span(before.place, before.size + span.size)
        insort(self._spans, span)
        return span
