"""What was read of one choice, and does what comes now go on from there?

A stream that is taken up again begins after the last event that was read, or from the turn's first one. In both cases
only what is new is handed out, and everything else must equal what was: the text, the calls, and at each position that
had an event the hash of all ids up to it and the lengths of the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deployment.client.chunks import Chunk
from deployment.client.errors import Contradiction
from deployment.client.events import Called, Ended, Text
from deployment.event_ids import EventId, digest_of


class _Channel:
    """One kind of text: all that was handed out, and where in it the present connection is."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._before = ""
        self.length = 0
        self.at = 0

    def rewind(self, at: int) -> None:
        self._before = "".join(self._pieces)
        self._pieces = [self._before]
        self.at = at

    @property
    def behind(self) -> bool:
        return self.at < self.length

    def take(self, text: str) -> str | None:
        """The part that is new; None if the rest is not what was handed out."""
        known = min(len(text), self.length - self.at)
        # Only a connection that was rewound can be behind, and then what is ahead of it was there before it began.
        if known and not self._before.startswith(text[:known], self.at):
            return None
        new = text[known:]
        if new:
            self._pieces.append(new)
        self.at += len(text)
        self.length = max(self.length, self.at)
        return new


@dataclass(frozen=True)
class _Mark:
    """A place in the stream: `digest` of all ids before `position`, and how much text and how many calls they had
    given."""

    position: int
    digest: str
    reasoning: int
    content: int
    calls: int


class Heard:
    """One choice of one turn."""

    def __init__(self, first: EventId) -> None:
        """`first`: the id of an event before any text."""
        if first.digest != digest_of(()):
            raise Contradiction(f"event {first} begins a stream, but its hash is not that of no tokens")
        self._marks = {first.position: _Mark(first.position, first.digest, 0, 0, 0)}
        self._first = self._last = first
        self._reasoning, self._content = _Channel(), _Channel()
        self._calls: list[Called] = []
        self._calls_at = 0
        self._at = first.position
        self.ended: Ended | None = None

    @property
    def last(self) -> EventId:
        """What the next connection is to go on after."""
        return self._last

    @property
    def tokens(self) -> int:
        return self._last.position - self._first.position

    def go_on(self) -> None:
        """The next events come after `last`."""
        mark = self._marks[self._last.position]
        self._at = mark.position
        self._reasoning.rewind(mark.reasoning)
        self._content.rewind(mark.content)
        self._calls_at = mark.calls

    def begin_again(self) -> None:
        """The next events are the turn's first ones."""
        self._at = self._first.position
        self._reasoning.rewind(0)
        self._content.rewind(0)
        self._calls_at = 0

    def take(self, chunk: Chunk) -> Iterator[Text | Called]:
        """What is new in an event with text or calls. Contradiction."""
        place, logprobs = chunk.place, chunk.logprobs
        tokens, before = place.position - self._at, self._last.position
        if tokens < 0 or (tokens == 0 and (chunk.reasoning or chunk.content or chunk.calls)):
            raise Contradiction(f"event {place} brings text again that ended at position {self._at}")
        if logprobs and len(logprobs) != tokens:
            raise Contradiction(f"event {place} brings {len(logprobs)} tokens' log-probabilities, and {tokens} tokens")
        new, calls = self._new(place, chunk.reasoning, chunk.content), self._new_calls(chunk)
        fresh = max(0, place.position - before)
        if not fresh and (new.reasoning or new.content or calls):
            raise Contradiction(f"event {place} brings text that was not there when position {before} was read")
        self._mark(place)
        if fresh or new.reasoning or new.content:
            told = logprobs[len(logprobs) - fresh :]
            yield Text(new.content, new.reasoning, place.choice or 0, place.position, told)
        yield from calls

    def close(self, place: EventId, reasoning: str, content: str, ended: Ended) -> tuple[Text | Ended, ...]:
        """The last event, which may complete a character. One that came before brings nothing. Contradiction."""
        more = place.position - self._last.position
        if more < 0 or (more and self.ended is not None):
            raise Contradiction(f"event {place} ends the turn at another position than {self._last.position}")
        # Before its text is taken: whoever goes on after this place gets that text again.
        self._mark(place)
        new = self._new(place, reasoning, content)
        if self.ended is not None:
            if new.reasoning or new.content or self.ended.finish_reason != ended.finish_reason:
                raise Contradiction(f"event {place} ends the turn in another way than before")
            return ()
        self.ended = ended
        text = Text(new.content, new.reasoning, place.choice or 0, place.position)
        return (text, ended) if text.content or text.reasoning else (ended,)

    def _new(self, place: EventId, reasoning: str, content: str) -> Text:
        new = self._reasoning.take(reasoning), self._content.take(content)
        if None in new:
            raise Contradiction(f"event {place} brings other text than was read before")
        return Text(content=new[1] or "", reasoning=new[0] or "")

    def _new_calls(self, chunk: Chunk) -> list[Called]:
        new: list[Called] = []
        for call in chunk.calls:
            known = self._calls[self._calls_at] if self._calls_at < len(self._calls) else None
            if call.index != self._calls_at or known not in (None, call):
                raise Contradiction(f"event {chunk.place} brings another call than was read before")
            if known is None:
                self._calls.append(call)
                new.append(call)
            self._calls_at += 1
        return new

    def _mark(self, place: EventId) -> None:
        """Notes a place, or checks that it is as it was."""
        if place.position > self._last.position:
            if self._reasoning.behind or self._content.behind or self._calls_at < len(self._calls):
                raise Contradiction(f"event {place} comes without text that was read before {self._last.position}")
            self._last = place
        now = _Mark(place.position, place.digest, self._reasoning.at, self._content.at, self._calls_at)
        known = self._marks.setdefault(place.position, now)
        if known.digest != place.digest:
            raise Contradiction(f"event {place}: position {place.position} had the hash {known.digest} before")
        if known != now:
            raise Contradiction(f"event {place}: the text up to position {place.position} had another length before")
        self._at = place.position
