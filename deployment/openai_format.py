"""Turns of ours as objects of the OpenAI interface, with two additions: `session` and `meta_info`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from deployment.errors import Refused
from deployment.ownership import Placement
from deployment.wire import Closed, Delta, Opened, ReplicaInfo, SessionFacts

_FINISH = {"stop": "stop", "length": "length", "cancelled": "abort"}


@dataclass(frozen=True)
class Completion:
    """One answer's identity, the same in all of its chunks."""

    id: str
    opened: Opened
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def headers(self) -> dict[str, str]:
        headers = {"x-replica": self.opened.replica}
        if self.opened.session is not None:
            headers["x-session-id"] = self.opened.session.id
            headers["x-session-resume"] = self.opened.session.header
        return headers

    def whole(self, reasoning: str, content: str, closed: Closed) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        message = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _FINISH[closed.finish_reason]}
        return {
            **self._base("chat.completion"),
            "choices": [choice],
            "usage": self.usage(closed),
            **self._extra(closed),
        }

    def first(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def delta(self, delta: Delta) -> dict[str, Any]:
        part: dict[str, Any] = {}
        if delta.reasoning:
            part["reasoning_content"] = delta.reasoning
        if delta.content:
            part["content"] = delta.content
        return self._chunk(part, None)

    def last(self, closed: Closed) -> dict[str, Any]:
        return {**self._chunk({}, _FINISH[closed.finish_reason]), **self._extra(closed)}

    def usage_chunk(self, closed: Closed) -> dict[str, Any]:
        """Asked for by `stream_options.include_usage`; it has no choices."""
        return {**self._base("chat.completion.chunk"), "choices": [], "usage": self.usage(closed)}

    def usage(self, closed: Closed) -> dict[str, Any]:
        prompt, completion = self.opened.prompt_tokens, closed.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.opened.reused},
        }

    def _base(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.opened.model}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
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
