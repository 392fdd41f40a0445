"""One turn from the first request to its last event, over as many connections as it takes.

No I/O: says which call to make, is told what came, and says what is new. A turn of a session is followed after the last
event that was read; without a session, or before the first event, the same request is sent again under its key, which
gives the same turn from its first event.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx

from deployment.client.answers import PROXY_FAULTS, pause_after_answer, pause_after_failure
from deployment.client.calls import Call, Turn
from deployment.client.chunks import Chunk, Done, GoOn, read_event
from deployment.client.errors import Contradiction, Refusal, UnexpectedAnswer, worth_another_try
from deployment.client.events import AnswerEvent, Began, Interrupted, Resumed, Usage
from deployment.client.heard import Heard
from deployment.client.outage import Outage
from deployment.client.sse_reading import EventLines


class TurnReading:
    """`pause`: seconds to wait before the next connection. `left`: the present one brings nothing more. `over`: no
    further one is needed. All methods but `connect` raise ClientError."""

    def __init__(self, turn: Turn, outage: Outage) -> None:
        self._asked = turn
        self._outage = outage
        self._turn: str | None = None
        self._heard: dict[int, Heard] = {}
        self._usage: Usage | None = None
        self._call = turn.ask
        self._lines = EventLines()
        self.pause = 0.0
        self.left = False
        self.over = False

    def connect(self) -> Call:
        """The next connection's request."""
        self._lines, self.left = EventLines(), False
        only = next(iter(self._heard.values())) if len(self._heard) == 1 else None
        if self._asked.session is not None and only is not None:
            self._call = self._asked.follow(only.last.turn, str(only.last))
            only.go_on()
        else:
            self._call = self._asked.ask
            for heard in self._heard.values():
                heard.begin_again()
        return self._call

    def answered(self, response: httpx.Response) -> Iterator[AnswerEvent]:
        """The status line is there; of an answer that is no success, the body too."""
        # A server that starts again is a while without its routes.
        faults = PROXY_FAULTS if self._turn is None else PROXY_FAULTS | {404}
        pause = pause_after_answer(response, self._call, self._outage, faults)
        if pause is not None:
            yield from self._interrupted(f"the server answers {response.status_code}", pause)
        elif not response.headers.get("content-type", "").startswith("text/event-stream"):
            raise UnexpectedAnswer(f"{response.url} does not answer with an event stream")

    def failed(self, error: httpx.TransportError) -> Iterator[AnswerEvent]:
        """There is no connection, or no more."""
        pause = pause_after_failure(error, self._call, self._outage)
        yield from self._interrupted(str(error) or type(error).__name__, pause)

    def ended(self) -> Iterator[AnswerEvent]:
        """The connection was closed in peace."""
        yield from self._cut("the stream ended before the answer")

    def fed(self, data: bytes) -> Iterator[AnswerEvent]:
        for event in self._lines.feed(data):
            match read_event(event):
                case Chunk() as chunk:
                    yield from self._chunk(chunk)
                case Usage() as usage:
                    yield from self._counted(usage)
                case Done():
                    yield from self._done()
                case GoOn():
                    yield from self._cut("the server asks to follow the turn elsewhere")
                case Refusal() as refusal if worth_another_try(refusal):
                    yield from self._cut(refusal.message, refusal)
                case Refusal() as refusal:
                    raise refusal
            if self.left or self.over:
                return

    # ------------------------------------------------------------------------------------------------ events

    def _chunk(self, chunk: Chunk) -> Iterator[AnswerEvent]:
        place = chunk.place
        news: list[AnswerEvent] = [*self._began(chunk)]
        heard = self._heard.get(place.choice or 0)
        if heard is None:
            # What opens a choice has no text: what came before this event would be missing.
            if chunk.content or chunk.reasoning or chunk.calls or chunk.ended:
                raise Contradiction(f"event {place} is the first one of its choice, but does not open it")
            heard = self._heard[place.choice or 0] = Heard(place)
        if chunk.ended is not None:
            news += heard.close(place, chunk.reasoning, chunk.content, chunk.ended)
        else:
            news += heard.take(chunk)
        if news:
            yield from self._outage_over()
            yield from news

    def _began(self, chunk: Chunk) -> Iterator[AnswerEvent]:
        turn = chunk.place.turn
        if turn == self._turn:
            return
        if any(heard.tokens or heard.ended for heard in self._heard.values()):
            raise Contradiction(f"turn {self._turn} was read, and now turn {turn} comes in its place")
        self._turn, self._heard = turn, {}
        yield Began(turn, chunk.model)

    def _counted(self, usage: Usage) -> Iterator[AnswerEvent]:
        tokens = sum(heard.tokens for heard in self._heard.values())
        if usage.completion_tokens != tokens:
            raise Contradiction(f"turn {self._turn} had {usage.completion_tokens} tokens, of which {tokens} were read")
        if self._usage is None:
            self._usage = usage
            yield from self._outage_over()
            yield usage

    def _done(self) -> Iterator[AnswerEvent]:
        if self._usage is None or any(heard.ended is None for heard in self._heard.values()):
            raise UnexpectedAnswer(f"the stream of turn {self._turn} ends without saying how the turn ended")
        self.over = True
        yield from self._outage_over()

    def _outage_over(self) -> Iterator[AnswerEvent]:
        if self._outage.lasts:
            yield Resumed(*self._outage.end())

    def _cut(self, reason: str, cause: Refusal | None = None) -> Iterator[AnswerEvent]:
        yield from self._interrupted(reason, self._outage.pause(reason, cause))

    def _interrupted(self, reason: str, pause: float) -> Iterator[AnswerEvent]:
        self.left, self.pause = True, pause
        if self._outage.attempts == 1:
            yield Interrupted(reason)
