"""A turn's events, kept from its first to its last, for any number of readers who begin anywhere.

Readers walk along one list: who is slow holds nobody up and costs nothing, and who comes late or again misses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from deployment.errors import Refused, RequestError, invalid
from deployment.event_ids import EventId, PublishedIds
from deployment.parsing.turn_text import TurnText
from deployment.wire import Closed, Delta, Moved, Opened, Told, TurnEvent


@dataclass(frozen=True)
class Place:
    """Where a reader goes on after the turn's first event: with `rest`, if its event id named the middle of an event,
    then with the events from `index` on."""

    index: int = 1
    rest: Told | None = None


class TurnStream:
    """The events of all choices of a request, in the order in which they came. The last one is the last choice's
    Closed, or a Refused or a Moved, which end all of them; what comes later is dropped."""

    def __init__(self, turn: str, choices: int, start: int, text: Callable[[int], TurnText]) -> None:
        """`start`: the ledger position of the first id to come. `text`: a choice, as yet without a word."""
        self.turn = turn
        self.start = start
        self._text = text
        self._told: list[Told] = []
        self._published = [PublishedIds() for _ in range(choices)]
        self._open = choices
        self._news = asyncio.Event()

    @property
    def over(self) -> bool:
        return self._open == 0

    @property
    def opened(self) -> bool:
        """Whether the prompt is in."""
        return bool(self._told) and isinstance(self._told[0].event, Opened)

    @property
    def moved(self) -> bool:
        """Whether it goes on elsewhere."""
        return bool(self._told) and isinstance(self._told[-1].event, Moved)

    @property
    def weight(self) -> int:
        """What is kept, counted in log-probabilities and token ids, those of the prompt too: its request is kept."""
        deltas = [told.event for told in self._told if isinstance(told.event, Delta)]
        facts = (fact for delta in deltas for fact in delta.logprobs)
        return self.start + sum(len(delta.token_ids) for delta in deltas) + sum(1 + len(fact.top) for fact in facts)

    def publish(self, event: TurnEvent) -> None:
        if self.over or (isinstance(event, Opened) and self._told):
            return
        choice = event.choice if isinstance(event, Delta | Closed) else 0
        if isinstance(event, Delta):
            self._published[choice].add(event.token_ids)
        self._told.append(Told(str(self._id(choice)), event))
        if isinstance(event, Refused | Moved):
            self._open = 0
        elif isinstance(event, Closed):
            self._open -= 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    def said(self, choice: int) -> tuple[str, str]:
        """Reasoning and content of a choice so far."""
        events = [told.event for told in self._told if isinstance(told.event, Delta | Closed)]
        said = [event for event in events if event.choice == choice]
        return "".join(event.reasoning for event in said), "".join(event.content for event in said)

    async def begun(self) -> None:
        """Waits for the first event."""
        while not self._told:
            await self._news.wait()

    async def read(self, place: Place) -> AsyncIterator[Told]:
        """The first event, which says how the turn began, and everything from a place on, until the turn is over."""
        await self.begun()
        yield self._told[0]
        if place.rest is not None:
            yield place.rest
        index = place.index
        while True:
            while index < len(self._told):
                yield self._told[index]
                index += 1
            if self.over:
                return
            await self._news.wait()

    def place_after(self, seen: EventId) -> Place:
        """Raises RequestError for an event id that this stream cannot have given: 400 for one of another turn or
        choice, 409 for one with other ids, or beyond what was published."""
        ids = self._published[self._choice_of(seen)]
        known = seen.position - self.start
        if seen.turn != self.turn:
            raise invalid(f"after: {str(seen)!r} is an event of turn {seen.turn}; this is turn {self.turn}", "after")
        if not 0 <= known <= len(ids):
            what = f"turn {self.turn} has published positions {self.start} to {self.start + len(ids)}"
            raise RequestError(409, "event_out_of_turn", f"after: position {seen.position} is none; {what}", "after")
        right = ids.digest_at(known)
        if seen.digest != right:
            what = f"the ids up to position {seen.position} of turn {self.turn} have hash {right}, not {seen.digest}"
            raise RequestError(409, "event_mismatch", f"after: another text was read; {what}", "after")
        return self._place(seen, known)

    def _choice_of(self, seen: EventId) -> int:
        several = len(self._published) > 1
        if (seen.choice is not None) != several or (seen.choice or 0) >= len(self._published):
            which = f"one of choices 0 to {len(self._published) - 1}" if several else "no choice, since there is one"
            raise invalid(f"after: an event id of turn {self.turn} names {which}; got {str(seen)!r}", "after")
        return seen.choice or 0

    def _place(self, seen: EventId, known: int) -> Place:
        if not known:
            return Place()
        choice = seen.choice or 0
        for index, told in enumerate(self._told):
            delta = told.event
            if not isinstance(delta, Delta) or delta.choice != choice or delta.position < seen.position:
                continue
            rest = self._rest(delta, known) if delta.position > seen.position else None
            return Place(index + 1, Told(told.id, rest) if rest else None)
        raise AssertionError(f"no event of turn {self.turn} ends at or after {seen}")

    def _rest(self, delta: Delta, known: int) -> Delta:
        """What a delta brings beyond its choice's first `known` ids: their text is made again up to there."""
        text, ids = self._text(delta.choice), self._published[delta.choice]
        text.push(ids[:known])
        left = ids[known : delta.position - self.start]
        said = text.push(left, delta.text_cut)
        return replace(
            delta,
            reasoning=said.reasoning,
            content=said.content,
            calls=said.calls,
            logprobs=delta.logprobs[-len(left) :],
            token_ids=tuple(left),
            rounds=(),
        )

    def _id(self, choice: int) -> EventId:
        ids = self._published[choice]
        return EventId(self.turn, self.start + len(ids), ids.digest, choice if len(self._published) > 1 else None)
