"""What a turn brings its reader: where it began, text, what became of the connection, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Began:
    """The prompt is in. `turn`: 32 hex digits."""

    turn: str
    model: str


@dataclass(frozen=True)
class Text:
    """New text of one choice. `position`: the ledger position after its last token. `logprobs`: where they were asked
    for, the interface's objects, one a token."""

    content: str
    reasoning: str = ""
    choice: int = 0
    position: int = 0
    logprobs: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Called:
    """The model calls a tool. `arguments`: JSON text of an object. `index`: which call of its choice it is, from 0."""

    id: str
    name: str
    arguments: str
    index: int = 0
    choice: int = 0


@dataclass(frozen=True)
class Interrupted:
    """The connection is lost, or there is none yet, and the client tries again."""

    reason: str


@dataclass(frozen=True)
class Resumed:
    """Something new has come, `seconds` after the interruption and with so many `attempts`."""

    seconds: float
    attempts: int


@dataclass(frozen=True)
class Resume:
    """What it cost to go on in a session. `hit`: where its state came from (device, host, peer, disk, none).
    `frontier`: where it stands now."""

    session: str
    hit: str
    reused: int
    prefilled: int
    epoch: str
    frontier: int | None


@dataclass(frozen=True)
class Ended:
    """One choice is over. `rounds`: accepted drafts of each. `seconds`: as the server measured them."""

    finish_reason: str
    stop_reason: str | int | None
    seed: int
    rounds: tuple[int, ...]
    acceptance_length: float
    seconds: float
    replica: str
    choice: int = 0
    resume: Resume | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens of all choices; the prompt, which they share, counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


AnswerEvent = Began | Text | Called | Interrupted | Resumed | Ended | Usage


@dataclass(frozen=True)
class Choice:
    content: str
    reasoning: str
    logprobs: tuple[dict[str, Any], ...]
    ended: Ended
    calls: tuple[Called, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """What stands before the results of its calls in a full history."""
        called = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        return message | ({"tool_calls": called} if called else {})


@dataclass(frozen=True)
class Answer:
    """A whole answer. `interruptions`: how often its connection was lost on the way."""

    turn: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    interruptions: int

    @property
    def content(self) -> str:
        return self.choices[0].content

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def calls(self) -> tuple[Called, ...]:
        return self.choices[0].calls

    @property
    def ended(self) -> Ended:
        return self.choices[0].ended

    @property
    def tokens_per_second(self) -> float:
        return self.usage.completion_tokens / max(self.ended.seconds, 1e-9)

    @property
    def resume(self) -> Resume | None:
        return self.ended.resume


def collected(events: Iterable[AnswerEvent]) -> Answer:
    """The answer that all events of a turn make."""
    began: Began | None = None
    usage = Usage(0, 0, 0)
    texts: dict[int, list[Text]] = {}
    calls: dict[int, list[Called]] = {}
    ends: dict[int, Ended] = {}
    interruptions = 0
    for event in events:
        match event:
            case Began():
                began = event
            case Text():
                texts.setdefault(event.choice, []).append(event)
            case Called():
                calls.setdefault(event.choice, []).append(event)
            case Ended():
                ends[event.choice] = event
            case Interrupted():
                interruptions += 1
            case Usage():
                usage = event
    assert began is not None and ends, "a stream that ends without both is refused before"
    choices = tuple(_choice(texts.get(index, []), calls.get(index, []), ends[index]) for index in sorted(ends))
    return Answer(began.turn, began.model, choices, usage, interruptions)


def _choice(texts: list[Text], calls: list[Called], ended: Ended) -> Choice:
    content = "".join(text.content for text in texts)
    reasoning = "".join(text.reasoning for text in texts)
    logprobs = tuple(entry for text in texts for entry in text.logprobs)
    return Choice(content, reasoning, logprobs, ended, tuple(calls))
