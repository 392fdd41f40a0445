"""What the objects of one answer have in common, whichever interface they belong to: identity, usage, and two additions
of ours, `session` and `meta_info`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from deployment.wire import Closed, Delta, Opened, SessionFacts, TurnEvent

FINISH = {"stop": "stop", "length": "length", "cancelled": "abort"}
"""Finish reasons as the interface names them."""


class Choices:
    """What is known of `n` answers that come side by side, in the order of their events."""

    def __init__(self, n: int) -> None:
        self.deltas: list[list[Delta]] = [[] for _ in range(n)]
        self.closed: list[Closed | None] = [None] * n

    def take(self, event: TurnEvent) -> None:
        if isinstance(event, Delta):
            self.deltas[event.choice].append(event)
        elif isinstance(event, Closed):
            self.closed[event.choice] = event

    @property
    def complete(self) -> bool:
        return None not in self.closed

    @property
    def ended(self) -> list[Closed]:
        return [one for one in self.closed if one is not None]


class AnswerFormat(Protocol):
    """An interface's objects of one answer: whole, or chunk by chunk."""

    @property
    def answer(self) -> Answer: ...

    def whole(self, choices: Choices) -> dict[str, Any]: ...

    def first(self) -> list[dict[str, Any]]:
        """What a stream begins with, choice by choice; may be nothing."""
        ...

    def delta(self, delta: Delta) -> dict[str, Any] | None:
        """None if there is nothing to show."""
        ...

    def last(self, closed: Closed) -> dict[str, Any]: ...

    def usage_chunk(self, closed: Sequence[Closed]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Answer:
    """The same in all chunks, and for whoever follows the turn again. `prefix` of the id: what kind of answer it is."""

    opened: Opened
    prefix: str

    @property
    def headers(self) -> dict[str, str]:
        headers = {"x-replica": self.opened.replica, "x-turn-id": self.opened.turn}
        if self.opened.session is not None:
            headers["x-session-id"] = self.opened.session.id
            headers["x-session-resume"] = self.opened.session.header
        return headers

    def object(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.opened.turn}",
            "object": kind,
            "created": self.opened.created,
            "model": self.opened.model,
        }

    def whole(self, kind: str, listed: list[dict[str, Any]], closed: Sequence[Closed]) -> dict[str, Any]:
        """The answer of a request that does not stream. Several choices have their own `meta_info`."""
        document = {**self.object(kind), "choices": listed, "usage": self.usage(closed)}
        if len(closed) == 1:
            return {**document, **self.additions(closed[0])}
        for choice, one in zip(listed, closed, strict=True):
            choice.update(self.additions(one))
        return document

    def usage(self, closed: Sequence[Closed]) -> dict[str, Any]:
        """Of all choices; the prompt, which they share, counts once."""
        return {
            **self.used(sum(one.completion_tokens for one in closed)),
            "prompt_tokens_details": {"cached_tokens": self.opened.reused},
            "completion_tokens_details": {"reasoning_tokens": sum(one.reasoning_tokens for one in closed)},
        }

    def used(self, completion: int) -> dict[str, Any]:
        """So far; `completion`: tokens of all choices."""
        prompt = self.opened.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def additions(self, closed: Closed) -> dict[str, Any]:
        session = {"session": _session_object(closed.session, self.opened.replica)} if closed.session else {}
        return {
            **session,
            "meta_info": {
                "replica": self.opened.replica,
                "turn": self.opened.turn,
                "seed": self.opened.seed,
                "spec_accept_length": closed.acceptance_length,
                "spec_verify_ct": len(closed.rounds),
                "rounds": list(closed.rounds),
                "seconds": closed.seconds,
            },
        }


def _session_object(facts: SessionFacts, replica: str) -> dict[str, Any]:
    """The header `x-session-resume` as an object, and where the session ended."""
    return {**asdict(facts), "replica": replica}


def ending(closed: Closed) -> dict[str, Any]:
    """A turn that ended by itself after calls waits for their results."""
    reason = "tool_calls" if closed.calls and closed.finish_reason == "stop" else FINISH[closed.finish_reason]
    return {"finish_reason": reason, "stop_reason": closed.stop_reason}


def finite(logprob: float | None) -> float | None:
    """The interface's numbers are finite: what is impossible has -9999. None: there is none."""
    return None if logprob is None else max(logprob, -9999.0)
