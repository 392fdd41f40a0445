"""Messages to prompt text, by the model's own Jinja template, with the helpers that such templates expect.

A template comes with a model directory and is foreign code: it runs in Jinja's immutable sandbox and sees plain data.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model.errors import ChatTemplateError, ModelError
from model.fields import read_json

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """`chat_template.jinja`, or `chat_template` of `tokenizer_config.json`."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._special_tokens = special_tokens
        self.sha256 = hashlib.sha256(source.encode("utf-8")).hexdigest()

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """Raises ModelError if there is no template, or it is not valid Jinja."""
        config_path = directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        path = directory / "chat_template.jinja"
        if path.exists():
            try:
                source: Any = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from None
        else:
            path, source = config_path, config.get("chat_template")
            if isinstance(source, list):
                named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
                source = named.get("default")
        if not isinstance(source, str):
            raise ModelError(
                f"{directory} has no chat template: neither chat_template.jinja nor one in {config_path.name}"
            )
        special = {}
        for name in _SPECIAL_TOKENS:
            value = config.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                special[name] = value
        try:
            return cls(source, special)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"{path}: the chat template is not valid at line {error.lineno}: {error.message}"
            ) from None

    @cached_property
    def _roles(self) -> _Roles:
        def takes(*roles: str) -> bool:
            messages = [{"role": role, "content": "x"} for role in roles]
            try:
                self._template.render(
                    **self._special_tokens, messages=messages, tools=None, documents=None, add_generation_prompt=True
                )
            except Exception:  # whatever it fails with
                return False
            return True

        return _Roles(takes("developer", "user"), takes("user", "system", "user") and takes("system", "system", "user"))

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        preserve_thinking: bool | None = None,
    ) -> str:
        """The prompt text of a conversation. A switch that is None stays undefined in the template.

        `messages` hold plain JSON data. Raises ChatTemplateError if the template refuses them or fails on them.
        """
        roles = self._roles
        switches = {"enable_thinking": enable_thinking, "preserve_thinking": preserve_thinking}
        try:
            return self._template.render(
                **self._special_tokens,
                **{name: value for name, value in switches.items() if value is not None},
                messages=[_normalised(message) for message in roles.adapted(messages)],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except _Refusal as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error.message}") from None
        except Exception as error:  # a template can fail in any way on messages that it did not expect
            raise ChatTemplateError(f"the model's chat template cannot render these messages: {error}") from None


@dataclass(frozen=True)
class _Roles:
    """Which messages a template takes beside those of users and assistants: a developer's, and the system's after the
    first one."""

    developer: bool
    late_system: bool

    def adapted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same messages in roles that the template takes. Instructions at the beginning become one message, later
        ones the user's."""
        if not self.developer:
            messages = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
        if self.late_system:
            return messages
        first = list(itertools.takewhile(_instructs, messages))
        if len(first) > 1:
            first = [{**first[0], "content": "\n\n".join(_text(message) for message in first)}]
        rest = itertools.dropwhile(_instructs, messages)
        return [*first, *({**m, "role": "user"} if _instructs(m) else m for m in rest)]


def _instructs(message: dict[str, Any]) -> bool:
    return message.get("role") in ("system", "developer")


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


class _Refusal(jinja2.TemplateError):
    """What `raise_exception` of a template raises."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks text that training counts; for rendering it is its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and &, which a model was not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _normalised(message: dict[str, Any]) -> dict[str, Any]:
    """Drops null fields, which templates would print as None, gives reasoning the name that templates read, and the
    arguments of calls as objects, through which templates walk."""
    kept = {name: value for name, value in message.items() if value is not None}
    if isinstance(calls := kept.get("tool_calls"), list):
        kept["tool_calls"] = [_with_arguments(call) for call in calls]
    reasoning = next((kept[name] for name in _REASONING_NAMES if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
