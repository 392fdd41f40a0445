"""Where in a growing text are calls of tools? Qwen's form of them, read as it comes.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

A value that begins on a line of its own ends at the first line that begins with `</parameter>`, so that it may hold
anything else, calls too; one that does not, at the first `</parameter>`. Blanks between the parts mean nothing, nor do
those around a call. A call is told once it is whole: until then it may turn out to be none, and stays text. Each
character is looked at once, so that a hostile text costs no more than another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from deployment.engine.tool_grammar import CLOSE, NAME, OPEN

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_OF_FUNCTION, _END_OF_VALUE = "</function>", "</parameter>"
_END_OF_NAME = re.compile(r"[<>\x00-\x1f]")
_LONGEST_NAME = 128
_PIECE = 4096
"""Characters at a time: each step copies what comes after it."""


@dataclass(frozen=True)
class WrittenCall:
    """A call as it was written: every value is text."""

    function: str
    parameters: tuple[tuple[str, str], ...]


Part = str | WrittenCall


class ToolCallReader:
    """What `push` has told after any number of characters depends on them alone, not on how they were split."""

    def __init__(self) -> None:
        self._rest = ""  # not understood yet
        self._call: list[str] = []  # what was understood of the call that is being read, as it came
        self._value = 0  # where its value begins in that list
        self._function = self._key = ""
        self._parameters: dict[str, str] = {}
        self._end_of_value = _END_OF_VALUE
        self._after_call = False
        self._told: list[Part] = []
        self._step: Callable[[], bool] = self._read_text

    def push(self, text: str) -> list[Part]:
        """What can be told now: text that is none of a call, and whole calls, in their order."""
        for begin in range(0, len(text), _PIECE):
            self._rest += text[begin : begin + _PIECE]
            while self._step():
                pass
        return self._taken()

    def flush(self) -> list[Part]:
        """What is left when nothing more comes. A call that has not ended is text."""
        self._tell("".join(self._call) + self._rest)
        self._call, self._rest, self._step = [], "", self._read_text
        return self._taken()

    def _taken(self) -> list[Part]:
        told, self._told = self._told, []
        return told

    def _tell(self, text: str) -> None:
        text = text.lstrip() if self._after_call else text
        if text:
            self._after_call = False
            self._told.append(text)

    # ------------------------------------------------------------------------------------------------ steps

    # Each returns whether there may be something to do for the next one.

    def _read_text(self) -> bool:
        before, opened, after = self._rest.partition(OPEN)
        if not opened:
            before = before[: len(before) - _begun(before, OPEN)]
        sure = before.rstrip()
        self._tell(sure)
        if not opened:
            self._rest = self._rest[len(sure) :]
            return False
        self._call, self._parameters = [before[len(sure) :], OPEN], {}
        self._rest, self._step = after, self._read_function
        return True

    def _read_function(self) -> bool:
        return self._expect({_FUNCTION: self._read_function_name})

    def _read_function_name(self) -> bool:
        name = self._name()
        if name:
            self._function, self._step = name, self._read_part
        return name is not None

    def _read_part(self) -> bool:
        return self._expect({_PARAMETER: self._read_key, _END_OF_FUNCTION: self._read_end})

    def _read_key(self) -> bool:
        key = self._name()
        if key in self._parameters:
            return self._give_up()
        if key:
            self._key, self._value, self._step = key, len(self._call), self._read_value_begin
        return key is not None

    def _read_value_begin(self) -> bool:
        if not self._rest:
            return False
        self._end_of_value = f"\n{_END_OF_VALUE}" if self._rest[0] == "\n" else _END_OF_VALUE
        self._step = self._read_value
        return True

    def _read_value(self) -> bool:
        at = self._rest.find(self._end_of_value)
        if at < 0:
            self._take(len(self._rest) - _begun(self._rest, self._end_of_value))
            return False
        self._take(at)
        self._parameters[self._key] = "".join(self._call[self._value :]).removeprefix("\n")
        self._take(len(self._end_of_value))
        self._step = self._read_part
        return True

    def _read_end(self) -> bool:
        return self._expect({CLOSE: self._end_call})

    def _end_call(self) -> bool:
        self._told.append(WrittenCall(self._function, tuple(self._parameters.items())))
        self._call, self._after_call, self._step = [], True, self._read_text
        return True

    # ------------------------------------------------------------------------------------------------ means

    def _take(self, characters: int) -> None:
        self._call.append(self._rest[:characters])
        self._rest = self._rest[characters:]

    def _expect(self, next_steps: dict[str, Callable[[], bool]]) -> bool:
        """Takes one of these texts, and blanks before it."""
        text = self._rest.lstrip()
        for literal, step in next_steps.items():
            if text.startswith(literal):
                self._take(len(self._rest) - len(text) + len(literal))
                self._step = step
                return True
        return False if any(literal.startswith(text) for literal in next_steps) else self._give_up()

    def _name(self) -> str | None:
        """A name that has come to its `>`; None: it has not. Empty if there is none, and the call was given up."""
        end = _END_OF_NAME.search(self._rest, 0, _LONGEST_NAME + 1)
        if end is None and len(self._rest) <= _LONGEST_NAME:
            return None
        if end is None or end[0] != ">" or not NAME.fullmatch(self._rest[: end.start()]):
            self._give_up()
            return ""
        name = self._rest[: end.start()]
        self._take(end.end())
        return name

    def _give_up(self) -> bool:
        """It is no call. What was not understood of it may begin another one."""
        self._tell("".join(self._call))
        self._call, self._step = [], self._read_text
        return True


def _begun(text: str, literal: str) -> int:
    """How many characters at the end of `text` may begin `literal`."""
    longest = min(len(text), len(literal) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(literal[:size])), 0)
