"""A turn of ours as a chat completion, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployment.answer import Answer, Choices, ending, finite
from deployment.parsing.turn_text import ToolCall, assistant_message
from deployment.wire import Closed, Delta, Opened, TokenFact

_CHUNK = "chat.completion.chunk"


@dataclass(frozen=True)
class ChatFormat:
    opened: Opened

    @property
    def answer(self) -> Answer:
        return Answer(self.opened, "chatcmpl")

    def whole(self, choices: Choices) -> dict[str, Any]:
        closed = choices.ended
        listed = [_choice(deltas, one) for deltas, one in zip(choices.deltas, closed, strict=True)]
        return self.answer.whole("chat.completion", listed, closed)

    def first(self) -> list[dict[str, Any]]:
        return [self._chunk(choice, {"role": "assistant", "content": ""}) for choice in range(self.opened.choices)]

    def delta(self, delta: Delta) -> dict[str, Any] | None:
        part = _text(delta.reasoning, delta.content) | _calls(delta.calls)
        if not part and not delta.logprobs:
            return None
        return self._chunk(delta.choice, part, logprobs=_logprobs(delta.logprobs))

    def last(self, closed: Closed) -> dict[str, Any]:
        part = _text(closed.reasoning, closed.content)
        return {**self._chunk(closed.choice, part, **ending(closed)), **self.answer.additions(closed)}

    def usage_chunk(self, closed: Sequence[Closed]) -> dict[str, Any]:
        """Asked for by `stream_options.include_usage`; it has no choices."""
        return {**self.answer.object(_CHUNK), "choices": [], "usage": self.answer.usage(closed)}

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**self.answer.object(_CHUNK), "choices": [choice]}


def _choice(deltas: Sequence[Delta], closed: Closed) -> dict[str, Any]:
    content = "".join(part.content for part in (*deltas, closed))
    reasoning = "".join(part.reasoning for part in (*deltas, closed))
    calls = [call for delta in deltas for call in delta.calls]
    message = assistant_message(reasoning, content, calls) | {"refusal": None}
    logprobs = _logprobs([fact for delta in deltas for fact in delta.logprobs])
    return {"index": closed.choice, "message": message, "logprobs": logprobs, **ending(closed)}


def _text(reasoning: str, content: str) -> dict[str, Any]:
    return {name: text for name, text in (("reasoning_content", reasoning), ("content", content)) if text}


def _calls(calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Each comes in one piece: whether text is a call is known when it is whole."""
    return {"tool_calls": [{"index": call.index, **call.object} for call in calls]} if calls else {}


def _logprobs(facts: Sequence[TokenFact]) -> dict[str, Any] | None:
    if not facts:
        return None

    def entry(data: bytes, logprob: float | None) -> dict[str, Any]:
        text = data.decode("utf-8", errors="replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

    content = [
        {**entry(fact.data, fact.logprob), "top_logprobs": [entry(*other) for other in fact.top]} for fact in facts
    ]
    return {"content": content, "refusal": None}
