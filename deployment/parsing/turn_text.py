"""What does a turn say? Its ids become thinking, an answer, and calls of tools, as they come.

Whatever way the ids are cut into rounds, the parts together are the same, and what was told of the first ones depends
on them alone: whoever goes on after them gets exactly the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployment.parsing.arguments import arguments_of
from deployment.parsing.tool_calls import Part, ToolCallReader, WrittenCall
from model.tokenizer import Detokenizer, Tokenizer

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


@dataclass(frozen=True)
class ToolCall:
    """`index`: which call of its answer it is, from 0. `arguments`: JSON text of an object. `at`: where it stands in
    what is told with it, after that many characters of `content`."""

    id: str
    index: int
    name: str
    arguments: str
    at: int = 0

    @property
    def object(self) -> dict[str, Any]:
        """As the OpenAI interface has it in a message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Said:
    """What some ids say: first `reasoning`, then `content`, with calls at their places in it."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


def think_is_open(tokenizer: Tokenizer, generated: Sequence[int]) -> bool:
    """Whether a think block is open at the end of `generated`: the ids of the generation prompt and after."""
    opened, closed = tokenizer.id_of(THINK_OPEN), tokenizer.id_of(THINK_CLOSE)
    for token in reversed(generated):
        if token == closed:
            return False
        if token == opened:
            return True
    return False


class TurnText:
    """One choice of a turn.

    `opener`: the prompt's ids from the stable boundary on, which say whether the template opened a think block; if it
    did not, the answer may begin with one. `tools`: parameters of each function that may be called; without any, a call
    is text like all other. `name` tells the ids of its calls from those of all others.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        opener: Sequence[int],
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        name: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._open, self._close = tokenizer.id_of(THINK_OPEN), tokenizer.id_of(THINK_CLOSE)
        self._thinking = self._close is not None and think_is_open(tokenizer, opener)
        self._at_start = not self._thinking
        self._strip = False
        self._tools = tools or {}
        self._reader = ToolCallReader() if self._tools else None
        self._name = name
        self.reasoning = ""
        self.content = ""
        self.calls: list[ToolCall] = []
        self.reasoning_tokens = 0

    def push(self, ids: Sequence[int], text_cut: int = 0) -> Said:
        """What these ids add; incomplete characters, and text that may belong to a call, wait for the next ones.

        `text_cut`: that many characters at the end do not count, and nothing comes after them.
        """
        if ids and self._at_start:
            self._at_start = False
            if self._close is not None and ids[0] == self._open:
                self._thinking, self._strip = True, True
                self.reasoning_tokens += 1
                ids = ids[1:]
        reasoning = ""
        close = self._close
        if self._thinking and close is not None and close in ids:
            end = list(ids).index(close)
            self.reasoning_tokens += end + 1
            reasoning = self._stripped(self._detokenizer.push(ids[:end]) + self._detokenizer.flush())
            self._detokenizer = Detokenizer(self._tokenizer)
            self._thinking, self._strip = False, True
            ids = ids[end + 1 :]
        elif self._thinking:
            self.reasoning_tokens += len(ids)
        text = self._detokenizer.push(ids)
        if text_cut:
            text = (text + self._detokenizer.flush())[:-text_cut]
        return self._add(reasoning, self._stripped(text), ended=False)

    def flush(self) -> Said:
        """What was held back, when the turn is over."""
        return self._add("", self._stripped(self._detokenizer.flush()), ended=True)

    def _stripped(self, text: str) -> str:
        """Blank lines around the ends of a think block belong to the template, not to what was said."""
        if self._strip:
            text = text.lstrip("\n")
            self._strip = not text
        return text

    def _add(self, reasoning: str, text: str, ended: bool) -> Said:
        parts: list[Part] = []
        if self._thinking:
            reasoning += text
        elif self._reader is None:
            parts = [text]
        else:
            parts = self._reader.push(text) + (self._reader.flush() if ended else [])
        content, before = "", len(self.calls)
        for part in parts:
            if isinstance(part, str):
                content += part
            else:
                self.calls.append(self._call(part, len(content)))
        self.reasoning += reasoning
        self.content += content
        return Said(reasoning, content, tuple(self.calls[before:]))

    def _call(self, call: WrittenCall, at: int) -> ToolCall:
        index = len(self.calls)
        name = f"call_{hashlib.sha256(f'{self._name}.{index}'.encode()).hexdigest()[:24]}"
        return ToolCall(name, index, call.function, arguments_of(call, self._tools.get(call.function)), at)

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message as the client saw it."""
        return assistant_message(self.reasoning, self.content, self.calls)


def assistant_message(reasoning: str, content: str, calls: Iterable[ToolCall]) -> dict[str, Any]:
    """In the OpenAI interface's form."""
    called = [call.object for call in calls]
    message: dict[str, Any] = {"role": "assistant", "content": content or None if called else content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if called:
        message["tool_calls"] = called
    return message
