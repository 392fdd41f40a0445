"""Stop strings: where an answer's text ends, and which ids may be shown before that is known.

Matching is over bytes, since byte-level tokens mean the same bytes wherever they stand: a stop string may begin and end
inside a token, inside a character's bytes, and in different rounds. What is shown depends on the tokens alone, never on
how they came in rounds:

    end     the first byte at which a stop string is complete; of several that end there, the longest
    shown   ids that begin before the string, or end before it; the text of the last of them may have to be cut
    held    ids with a byte in the longest suffix of the text that may still become a stop string
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """`shown`: ids of the answer that are published. Without the last `text_cut` characters their text is the answer's,
    which ends before `string`, or with it where it is included."""

    string: str
    shown: int
    text_cut: int


class StopStrings:
    """Watches one answer. Ids are pushed as they are kept, in order."""

    def __init__(
        self,
        strings: Sequence[str],
        bytes_of: Callable[[Iterable[int]], bytes],
        *,
        include: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`strings` are not empty. A match that leaves less than `min_tokens` ids to be shown is none."""
        self._strings = [(string, string.encode()) for string in strings]
        self._longest = max(len(data) for _, data in self._strings)
        self._bytes_of = bytes_of
        self._include = include
        self._min_tokens = min_tokens
        self._tail = b""
        self._ends: list[int] = []

    def push(self, token: int) -> StopMatch | None:
        """The match that this id completes, if it completes one."""
        data = self._bytes_of((token,))
        window = self._tail + data
        total = (self._ends[-1] if self._ends else 0) + len(data)
        self._ends.append(total)
        self._tail = window[max(0, len(window) - self._longest + 1) :]
        for end, start, string in sorted(self._found(window, len(window) - len(data))):
            match = self._match(string, window, start, end, total - len(window))
            if match.shown >= self._min_tokens:
                return match
        return None

    @property
    def free(self) -> int:
        """How many of the pushed ids can be shown whatever comes next."""
        total = self._ends[-1] if self._ends else 0
        return len(self._ends) if self._include else bisect_right(self._ends, total - self._held())

    def _found(self, window: bytes, known: int) -> list[tuple[int, int, str]]:
        """(end, start, string) of every match in `window` that ends beyond its first `known` bytes."""
        found = []
        for string, data in self._strings:
            start = window.find(data, max(0, known - len(data) + 1))
            while start >= 0:
                found.append((start + len(data), start, string))
                start = window.find(data, start + 1)
        return found

    def _match(self, string: str, window: bytes, start: int, end: int, base: int) -> StopMatch:
        """`base`: bytes of the answer before `window`."""
        if self._include:
            return StopMatch(string, len(self._ends), _characters(window[end:]))
        at = base + start
        shown = bisect_right(self._ends, at)
        if (self._ends[shown - 1] if shown else 0) < at:
            shown += 1  # the id that the string begins inside of
        shown_end = self._ends[shown - 1] if shown else 0
        return StopMatch(string, shown, _characters(window[start : max(start, shown_end - base)]))

    def _held(self) -> int:
        """Length of the longest suffix of the text that begins a stop string."""
        longest = 0
        for _, data in self._strings:
            for length in range(min(len(data) - 1, len(self._tail)), longest, -1):
                if self._tail.endswith(data[:length]):
                    longest = length
                    break
        return longest


def _characters(data: bytes) -> int:
    return len(data.decode("utf-8", errors="replace"))
