"""A turn of ours as a text completion, whole or in chunks: the older interface, without messages and roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from deployment.answer import Answer, Choices, ending, finite
from deployment.wire import Closed, Delta, Opened, TokenFact

_KIND = "text_completion"


@dataclass(frozen=True)
class CompletionFormat:
    """Offsets of tokens in `logprobs.text_offset` count from the beginning of their choice's text in this object."""

    opened: Opened

    @property
    def answer(self) -> Answer:
        return Answer(self.opened, "cmpl")

    def whole(self, choices: Choices) -> dict[str, Any]:
        closed = choices.ended
        listed = [self._choice(deltas, one) for deltas, one in zip(choices.deltas, closed, strict=True)]
        return self.answer.whole(_KIND, listed, closed)

    def first(self) -> list[dict[str, Any]]:
        return []

    def delta(self, delta: Delta) -> dict[str, Any] | None:
        if not delta.content and not delta.logprobs:
            return None
        return self._chunk(delta.choice, delta.content, logprobs=_logprobs(delta.logprobs))

    def last(self, closed: Closed) -> dict[str, Any]:
        return {**self._chunk(closed.choice, closed.content, **ending(closed)), **self.answer.additions(closed)}

    def usage_chunk(self, closed: Sequence[Closed]) -> dict[str, Any]:
        return {**self.answer.object(_KIND), "choices": [], "usage": self.answer.usage(closed)}

    def _choice(self, deltas: Sequence[Delta], closed: Closed) -> dict[str, Any]:
        text = "".join(part.content for part in (*deltas, closed))
        logprobs = _logprobs([fact for delta in deltas for fact in delta.logprobs])
        return {"index": closed.choice, "text": text, "logprobs": logprobs, **ending(closed)}

    def _chunk(self, index: int, text: str, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}
        return {**self.answer.object(_KIND), "choices": [choice]}


def _logprobs(facts: Sequence[TokenFact]) -> dict[str, Any] | None:
    if not facts:
        return None
    tokens = [_shown(fact.data) for fact in facts]
    offsets = list(accumulate((len(token) for token in tokens), initial=0))[:-1]
    return {
        "tokens": tokens,
        "token_logprobs": [finite(fact.logprob) for fact in facts],
        "top_logprobs": [{_shown(data): finite(logprob) for data, logprob in fact.top} for fact in facts],
        "text_offset": offsets,
    }


def _shown(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
