"""Turns of ours as objects of the OpenAI interface, with two additions: `session` and `meta_info`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deployment.errors import Refused
from deployment.ownership import Placement
from deployment.wire import Closed, Delta, Opened, ReplicaInfo, SessionFacts, SessionInfo, TokenFact, TurnEvent

_FINISH = {"stop": "stop", "length": "length", "cancelled": "abort"}


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


@dataclass(frozen=True)
class Completion:
    """One answer's identity, the same in all of its chunks. `n`: its choices."""

    id: str
    opened: Opened
    n: int = 1
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def headers(self) -> dict[str, str]:
        headers = {"x-replica": self.opened.replica}
        if self.opened.session is not None:
            headers["x-session-id"] = self.opened.session.id
            headers["x-session-resume"] = self.opened.session.header
        return headers

    def whole(self, choices: Choices) -> dict[str, Any]:
        """The answer of a request that does not stream. Several choices have their own `meta_info`."""
        closed = [one for one in choices.closed if one is not None]
        listed = [self._choice(deltas, one) for deltas, one in zip(choices.deltas, closed, strict=True)]
        document = {**self._base("chat.completion"), "choices": listed, "usage": self.usage(closed)}
        if self.n == 1:
            return {**document, **self._extra(closed[0])}
        for choice, one in zip(listed, closed, strict=True):
            choice.update(self._extra(one))
        return document

    def _choice(self, deltas: Sequence[Delta], closed: Closed) -> dict[str, Any]:
        content = "".join(delta.content for delta in deltas)
        reasoning = "".join(delta.reasoning for delta in deltas)
        message = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        return {
            "index": closed.choice,
            "message": message,
            "logprobs": _logprobs([fact for delta in deltas for fact in delta.logprobs]),
            "finish_reason": _FINISH[closed.finish_reason],
            "stop_reason": closed.stop_reason,
        }

    def first(self, choice: int) -> dict[str, Any]:
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> dict[str, Any]:
        part: dict[str, Any] = {}
        if delta.reasoning:
            part["reasoning_content"] = delta.reasoning
        if delta.content:
            part["content"] = delta.content
        return self._chunk(delta.choice, part, logprobs=_logprobs(delta.logprobs))

    def last(self, closed: Closed) -> dict[str, Any]:
        ending = {"finish_reason": _FINISH[closed.finish_reason], "stop_reason": closed.stop_reason}
        return {**self._chunk(closed.choice, {}, **ending), **self._extra(closed)}

    def usage_chunk(self, closed: Sequence[Closed]) -> dict[str, Any]:
        """Asked for by `stream_options.include_usage`; it has no choices."""
        return {**self._base("chat.completion.chunk"), "choices": [], "usage": self.usage(closed)}

    def usage(self, closed: Sequence[Closed]) -> dict[str, Any]:
        """Of all choices; the prompt, which they share, counts once."""
        prompt, completion = self.opened.prompt_tokens, sum(one.completion_tokens for one in closed)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.opened.reused},
        }

    def _base(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.opened.model}

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**self._base("chat.completion.chunk"), "choices": [choice]}

    def _extra(self, closed: Closed) -> dict[str, Any]:
        session = {"session": session_object(closed.session, self.opened.replica)} if closed.session else {}
        return {
            **session,
            "meta_info": {
                "replica": self.opened.replica,
                "seed": self.opened.seed,
                "spec_accept_length": closed.acceptance_length,
                "spec_verify_ct": len(closed.rounds),
                "rounds": list(closed.rounds),
                "seconds": closed.seconds,
            },
        }


def _logprobs(facts: Sequence[TokenFact]) -> dict[str, Any] | None:
    """The interface's object; its numbers are finite, so that what is impossible has -9999."""
    if not facts:
        return None

    def entry(data: bytes, logprob: float) -> dict[str, Any]:
        text = data.decode("utf-8", errors="replace")
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(data)}

    content = [
        {**entry(fact.data, fact.logprob), "top_logprobs": [entry(*other) for other in fact.top]} for fact in facts
    ]
    return {"content": content, "refusal": None}


def session_object(facts: SessionFacts, replica: str) -> dict[str, Any]:
    """The header `x-session-resume` as an object, and where the session ended."""
    return {**asdict(facts), "replica": replica}


def placement_object(placement: Placement) -> dict[str, Any]:
    return {
        "id": placement.key.session,
        "object": "session",
        "created": placement.created,
        "updated": placement.updated,
        "replica": placement.owner,
        "epoch": str(placement.epoch),
        "copies": [
            {"node": copy.node, "epoch": str(copy.epoch), "frontier": copy.frontier} for copy in placement.copies
        ],
    }


def session_details(placement: Placement, known: SessionInfo | None) -> dict[str, Any]:
    """With what the owner knows, if it does. Bytes, which only an imported session can hold, are shown as hex."""
    shown = placement_object(placement)
    if known is not None:
        shown |= {
            "tokens": known.tokens,
            "frontier": known.frontier,
            "running": known.running,
            "transcript": list(known.transcript),
            "turns": list(known.turns),
        }
    return json.loads(json.dumps(shown, default=bytes.hex))


def replica_object(replica: ReplicaInfo) -> dict[str, Any]:
    return {
        "id": replica.replica,
        "object": "replica",
        "pid": replica.pid,
        "node": replica.node,
        "model": replica.model,
        "backend": replica.backend,
        "sessions": replica.sessions,
        "running": replica.running,
        "engine": replica.engine,
    }


def sse(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"


def sse_error(refused: Refused) -> str:
    """An error after the status line has been sent: the last event of the stream."""
    return sse(refused.body)
