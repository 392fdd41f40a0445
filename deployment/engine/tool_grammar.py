"""Which text is a call of one of these tools? Functions with JSON Schemas to one grammar in llguidance's Lark form.

    <tool_call>          as Qwen3.5's chat templates write a call: a value that is a string stands as it is, every other
    <function=NAME>      one as JSON. Parameters come in the schema's order, each once, those that are not required or
    <parameter=KEY>      not at all. Calls in parallel follow one another after a new line, and nothing follows them
    value
    </parameter>
    </function>
    </tool_call>

    none        any text without `<tool_call>`
    auto        any text until `<tool_call>`, then calls; or no call
    required    calls, at least one, and nothing before them
    a function  one call of that function

A value ends at the first line that begins with `</parameter>`, so that no string may hold such a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployment.engine.commands import Grammar
from deployment.engine.tool_values import ANY, SchemaRefused, Values, lark_string, values_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ANY_TEXT = rf"{ANY}: /\n(?s:.*)/ & ~/(?s:.*)\n<\/parameter>(?s:.*)/"
"""The terminal of a string as a value, with the new line before it."""

_FREE = f"FREE: /(?s:.*)/ & ~/(?s:.*){OPEN}(?s:.*)/"

NAME = re.compile(r"[^\s<>\x00-\x1f]([^<>\x00-\x1f]{0,126}[^\s<>\x00-\x1f])?")
"""Of a function or a parameter."""

_OBJECT_KEYWORDS = frozenset(
    {"type", "properties", "required", "additionalProperties", "unevaluatedProperties", "$defs", "definitions",
     "title", "description", "default", "examples", "$schema", "$id", "$comment"}
)  # fmt: skip


class ToolRefused(ValueError):
    """A tool or a choice that no grammar can be made of; the message names it."""


@dataclass(frozen=True)
class ParameterRule:
    """A parameter's part of the grammar: the rule `name`, and what it is defined by."""

    function: str
    parameter: str
    name: str
    source: str
    schemas: tuple[dict[str, Any], ...]

    @property
    def alone(self) -> str:
        """A grammar of nothing but this parameter."""
        return f"start: {self.name}\n{ANY_TEXT}\n{self.source}"

    @property
    def place(self) -> str:
        return f"parameter {self.parameter!r} of function {self.function!r}"


@dataclass(frozen=True)
class ToolGrammar:
    """`source`: all of it; `rules`: its parts that come from a schema."""

    source: str
    rules: tuple[ParameterRule, ...]


def tools_grammar(
    tools: Sequence[Mapping[str, Any]], choice: Any = "auto", parallel: bool = True, needed: bool = True
) -> Grammar:
    """The grammar of calls of `tools`, in the OpenAI interface's form: `{"type": "function", "function": {"name",
    "parameters", ...}}`. `choice`: none, auto, required, or `{"type": "function", "function": {"name": ...}}`."""
    request = {"tools": list(tools), "choice": choice, "parallel": parallel}
    return Grammar("tools", json.dumps(request, ensure_ascii=False), needed=needed)


def tool_grammar(source: str) -> ToolGrammar:
    """`source`: that of a grammar of the kind `tools`. Raises ToolRefused."""
    try:
        request = json.loads(source)
        tools, choice, parallel = request["tools"], request["choice"], request["parallel"]
    except (ValueError, RecursionError, TypeError, KeyError):
        raise ToolRefused("the source must be JSON, an object with tools, choice and parallel") from None
    functions = functions_of(tools)
    if choice == "none":
        return ToolGrammar(f"start: FREE?\n{_FREE}", ())
    named = _chosen(choice, functions)
    if named is not None:
        functions = {named: functions[named]}
    return _written(functions, choice == "auto", parallel is True and named is None)


def functions_of(tools: Any) -> dict[str, Mapping[str, Any]]:
    """Names and parameters of the functions that tools are, whether or not a grammar can express them. Raises
    ToolRefused."""
    if not isinstance(tools, list) or not tools:
        raise ToolRefused("tools must be a list of at least one function")
    functions: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        name, parameters = _function(tool, index)
        if name in functions:
            raise ToolRefused(f"tools[{index}].function.name is {name!r}, which another tool has already")
        functions[name] = parameters
    return functions


def _function(tool: Any, index: int) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise ToolRefused(f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ToolRefused(f"tools[{index}].function.name is {name!r}, {_named_like('a function')}")
    if parameters is not None and not isinstance(parameters, dict):
        raise ToolRefused(f"function {name!r}: parameters must be the JSON Schema of an object")
    return name, parameters or {}


def _named_like(what: str) -> str:
    return f"but {what} is named by 1 to 128 characters without < and >, which neither begin nor end with a blank"


def _chosen(choice: Any, functions: Mapping[str, Any]) -> str | None:
    if choice in ("auto", "required"):
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ToolRefused("tool_choice must be none, auto, required, or a function of tools")
    if name not in functions:
        raise ToolRefused(f"tool_choice names the function {name!r}, but tools has {', '.join(map(repr, functions))}")
    return name


# ------------------------------------------------------------------------------------------------ the grammar


def _written(functions: Mapping[str, Mapping[str, Any]], auto: bool, parallel: bool) -> ToolGrammar:
    rules: list[ParameterRule] = []
    lines: list[str] = []
    for number, (name, schema) in enumerate(functions.items()):
        parts: list[str] = []
        for rule, required in _parameters(name, schema, number):
            rules.append(rule)
            parts.append(rule.name if required else f"{rule.name}?")
        lines.append(f"f{number}: {' '.join([lark_string(f'{name}>' + chr(10)), *parts])}")
    calls = f'{OPEN} call ("\\n" {OPEN} call)*' if parallel else f"{OPEN} call"
    any_function = " | ".join(f"f{number}" for number in range(len(functions)))
    head = [
        f"start: FREE? ({calls})?" if auto else f"start: {calls}",
        f'call: "\\n<function=" ({any_function}) "</function>\\n" {CLOSE}',
        ANY_TEXT,
        _FREE,
    ]
    return ToolGrammar("\n".join([*head, *lines, *(rule.source for rule in rules)]), tuple(rules))


def _parameters(function: str, schema: Mapping[str, Any], number: int) -> Iterator[tuple[ParameterRule, bool]]:
    """The rules of a function's parameters, and whether each must be given."""
    if schema.get("type", "object") != "object":
        raise ToolRefused(f"function {function!r}: parameters has type {schema['type']!r}, must be object")
    unknown = next((key for key in schema if key not in _OBJECT_KEYWORDS), None)
    if unknown is not None:
        raise ToolRefused(f"function {function!r}: {unknown} is not supported directly in parameters")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict):
        raise ToolRefused(f"function {function!r}: properties must be an object")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ToolRefused(f"function {function!r}: required must be a list of names")
    missing = next((name for name in required if name not in properties), None)
    if missing is not None:
        raise ToolRefused(f"function {function!r}: {missing!r} is required, but properties does not have it")
    for index, (name, part) in enumerate(properties.items()):
        if not NAME.fullmatch(name):
            raise ToolRefused(f"function {function!r} has {name!r}, {_named_like('a parameter')}")
        try:
            values = values_of(part, schema)
        except SchemaRefused as error:
            raise ToolRefused(f"parameter {name!r} of function {function!r}: {error}") from None
        yield _rule(function, name, f"p{number}_{index}", values), name in required


def _rule(function: str, parameter: str, name: str, values: Values) -> ParameterRule:
    end = r'"\n</parameter>\n"'
    lines: list[str] = []
    alternatives: list[str] = []
    if values.patterns:
        terminal = name.upper()
        limited = " | ".join(f"({pattern})" for pattern in values.patterns)
        texts = ANY if values.patterns == (ANY,) else f'("\\n" ({limited})) & {ANY}'
        lines += [f"{terminal}: {terminal}_VALUE {end}", f"{terminal}_VALUE: {texts}"]
        alternatives.append(terminal)
    alternatives += [f"{lark_string(chr(10) + word)} {end}" for word in values.words]
    for index, schema in enumerate(values.schemas):
        lines.append(f"{name}_{index}: %json {json.dumps(schema, ensure_ascii=False)}")
        alternatives.append(f'"\\n" {name}_{index} {end}')
    opening = lark_string(f"<parameter={parameter}>")
    source = "\n".join([f"{name}: {opening} ({' | '.join(alternatives)})", *lines])
    return ParameterRule(function, parameter, name, source, values.schemas)
