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
    """Offsets of tokens in `logprobs.text_offset` count from the beginning of their choice's text in this object.

    `scored`: log-probabilities were asked for, so that those of a prompt that is told come with it. `answered`: whether
    anything was to be generated; if not, what the engine did is not told.
    """

    opened: Opened
    scored: bool = False
    answered: bool = True

    @property
    def answer(self) -> Answer:
        return Answer(self.opened, "cmpl")

    def whole(self, choices: Choices) -> dict[str, Any]:
        closed = choices.ended
        listed = [self._choice(deltas, one) for deltas, one in zip(choices.deltas, closed, strict=True)]
        document = self.answer.whole(_KIND, listed, closed)
        return document if self.answered else {**document, "usage": self.answer.usage(())}

    def first(self) -> list[dict[str, Any]]:
        if not self.opened.echo:
            return []
        prompt, logprobs = self._prompt, _logprobs(self.opened.echo if self.scored else ())
        return [self._chunk(choice, prompt, logprobs=logprobs) for choice in range(self.opened.choices)]

    def delta(self, delta: Delta) -> dict[str, Any] | None:
        if not delta.content and not delta.logprobs:
            return None
        return self._chunk(delta.choice, delta.content, logprobs=_logprobs(delta.logprobs))

    def last(self, closed: Closed) -> dict[str, Any]:
        return {**self._chunk(closed.choice, closed.content, **ending(closed)), **self.answer.additions(closed)}

    def usage_chunk(self, closed: Sequence[Closed]) -> dict[str, Any]:
        return {**self.answer.object(_KIND), "choices": [], "usage": self.answer.usage(closed)}

    @property
    def _prompt(self) -> str:
        return b"".join(fact.data for fact in self.opened.echo).decode("utf-8", errors="replace")

    def _choice(self, deltas: Sequence[Delta], closed: Closed) -> dict[str, Any]:
        text = "".join(part.content for part in (*deltas, closed)) if self.answered else ""
        facts = [fact for delta in deltas for fact in delta.logprobs] if self.answered else []
        logprobs = _logprobs([*(self.opened.echo if self.scored else ()), *facts])
        return {"index": closed.choice, "text": self._prompt + text, "logprobs": logprobs, **ending(closed)}

    def _chunk(self, index: int, text: str, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}
        return {**self.answer.object(_KIND), "choices": [choice]}


def merged(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole answers of several prompts as one: their choices in the prompts' order, and what they used in all."""
    if len(documents) == 1:
        return documents[0]
    choices: list[dict[str, Any]] = []
    for document in documents:
        additions = {"meta_info": document["meta_info"]} if "meta_info" in document else {}
        for choice in document["choices"]:
            choices.append({**choice, **additions, "index": len(choices)})
    whole = {name: value for name, value in documents[0].items() if name != "meta_info"}
    return {**whole, "choices": choices, "usage": _sum([document["usage"] for document in documents])}


def _sum(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: _sum([usage[name] for usage in usages]) if isinstance(value, dict) else sum(u[name] for u in usages)
        for name, value in usages[0].items()
    }


def _logprobs(facts: Sequence[TokenFact]) -> dict[str, Any] | None:
    if not facts:
        return None
    tokens = [_shown(fact.data) for fact in facts]
    offsets = list(accumulate((len(token) for token in tokens), initial=0))[:-1]
    return {
        "tokens": tokens,
        "token_logprobs": [finite(fact.logprob) for fact in facts],
        "top_logprobs": [_alternatives(fact) for fact in facts],
        "text_offset": offsets,
    }


def _alternatives(fact: TokenFact) -> dict[str, float | None] | None:
    """None of the first token of a prompt. Of tokens that look alike, parts of a character, the best one counts."""
    if fact.logprob is None:
        return None
    return {_shown(data): finite(logprob) for data, logprob in reversed(fact.top)}


def _shown(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
