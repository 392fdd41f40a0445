"""Which functions may the model call in a turn, and must it?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from deployment.engine.commands import Grammar
from deployment.engine.tool_grammar import functions_of, tools_grammar

Choice = Literal["none", "auto", "required", "function"]


@dataclass(frozen=True)
class ToolUse:
    """`source`: the tools as JSON text, in the OpenAI interface's form; text keeps the order of a schema's properties,
    and any depth. `function`: the one that a choice of that name asks for. `parallel`: several calls in one answer."""

    source: str
    choice: Choice = "auto"
    function: str | None = None
    parallel: bool = True

    @cached_property
    def tools(self) -> list[dict[str, Any]]:
        return json.loads(self.source)

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Parameters of each function that may be called."""
        return {} if self.choice == "none" else functions_of(self.tools)

    @property
    def grammar(self) -> Grammar:
        """Where nobody insists on a call, or on one that its schema allows, the turn does without a grammar rather than
        being refused for a schema that none can express."""
        choice = {"type": "function", "function": {"name": self.function}} if self.choice == "function" else self.choice
        insists = self.choice in ("required", "function") or (self.choice == "auto" and any(map(_strict, self.tools)))
        return tools_grammar(self.tools, choice, self.parallel, needed=insists)


def _strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True
