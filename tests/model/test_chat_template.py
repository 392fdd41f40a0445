"""Rendering equals transformers', and a template's refusal is a sentence for the client."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from model import DEMO
from model.chat_template import ChatTemplate
from model.errors import ChatTemplateError, ModelError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather of a <city> & "region" in °C',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2, "detail": {"wind": True}}},
}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [user("Hello")],
    "system": [{"role": "system", "content": "  Be brief.\n"}, user("Hello")],
    "developer": [{"role": "developer", "content": "Be brief."}, user("Hello")],
    "late system": [user("a"), assistant("b"), {"role": "system", "content": "c"}, user("d")],
    "parts": [user([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}, "three"])],
    "two turns": [user("a"), assistant("b"), user("c")],
    "think block in content": [user("a"), assistant("<think>\nwhy\n</think>\n\nb"), user("c"), assistant("d")],
    "reasoning_content": [user("a"), assistant("b", reasoning_content=" why\n"), user("c")],
    "reasoning last": [user("a"), assistant("b", reasoning="because")],
    "thinking": [user("a"), assistant("b", thinking="because")],
    "tool call": [user("w?"), assistant(None, tool_calls=[CALL]), {"role": "tool", "content": "21 <b>&</b>"}],
    "two calls": [user("w?"), assistant("Wait.", tool_calls=[CALL, CALL]), *[{"role": "tool", "content": "x"}] * 2],
    "after tools": [user("w?"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "x"}, assistant("y")],
    "tool response as user": [user("q"), assistant("a"), user("<tool_response>\nz\n</tool_response>")],
    "nulls": [user("a"), assistant("b", tool_calls=None, reasoning_content=None, name=None), user("c")],
    "unicode and markup": [user("😀 <b>&amp;</b> \u2028 {{ 7 * 7 }} {% raw %} <|im_end|>")],
    "empty strings": [user(""), assistant(""), user("")],
}
SWITCHES: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"enable_thinking": True},
    {"enable_thinking": False, "preserve_thinking": True},
    {"preserve_thinking": False, "tools": TOOLS},
    {"tools": []},
]

HELPERS = """{% for m in messages %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
    {%- if m.role == 'stop' %}{% break %}{% endif %}
    {% generation %}{{ m.content | tojson(indent=2) }}{% endgeneration %}
{% endfor %}
{{ eos_token }}|{{ bos_token is defined }}|{{ strftime_now('%Y') | length }}|{{ tools is none }}
{{ dict(a=1) | tojson }}
"""


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(DEMO / "target")


def directory_with(tmp_path: Path, template: str, **config: Any) -> Path:
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_every_conversation_renders_as_in_transformers(oracle: Any) -> None:
    template = ChatTemplate.load(DEMO / "target")
    for name, messages in CONVERSATIONS.items():
        for switches in SWITCHES:
            arguments: dict[str, Any] = {"add_generation_prompt": True} | switches
            expected = oracle.apply_chat_template(messages, tokenize=False, **arguments)
            assert template.render(messages, **arguments) == expected, (name, switches)


def test_helpers_of_templates_behave_as_in_transformers(tmp_path: Path, oracle: Any) -> None:
    template = ChatTemplate.load(directory_with(tmp_path, HELPERS, eos_token="<|im_end|>"))
    content = {"b": ["<&>'\"é"], "a": None}
    messages = [{"role": r, "content": content} for r in ("user", "skip", "user", "stop", "user")]
    expected = oracle.apply_chat_template(messages, chat_template=HELPERS, tokenize=False)
    assert template.render(messages, add_generation_prompt=False) == expected


def test_rendering_leaves_the_messages_alone() -> None:
    messages = [user("a"), assistant("b", reasoning="c", tool_calls=None), user("d")]
    before = json.dumps(messages)
    ChatTemplate.load(DEMO / "target").render(messages, tools=TOOLS)
    assert json.dumps(messages) == before


def test_switches_that_are_none_stay_undefined(tmp_path: Path) -> None:
    source = "{{ enable_thinking is defined }} {{ preserve_thinking is defined }}"
    template = ChatTemplate.load(directory_with(tmp_path, source))
    assert template.render([]) == "False False"
    assert template.render([], enable_thinking=False, preserve_thinking=True) == "True True"


def test_a_templates_own_refusal_reaches_the_client(tmp_path: Path) -> None:
    source = "{% if not messages %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    template = ChatTemplate.load(directory_with(tmp_path, source))
    with pytest.raises(ChatTemplateError, match=r"refuses these messages: No user query found in messages\."):
        template.render([])


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{{ nothing.at.all }}"])
def test_a_template_that_fails_on_the_messages_is_a_clear_error(tmp_path: Path, source: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot render these messages"):
        ChatTemplate.load(directory_with(tmp_path, source)).render([user("a")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__ }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(tmp_path: Path, source: str) -> None:
    template = ChatTemplate.load(directory_with(tmp_path, source + "{{ 1 }}"))
    with contextlib.suppress(ChatTemplateError):
        assert template.render([user("a")]) == "1"  # an unsafe attribute may also just be undefined


def test_templates_in_the_tokenizer_config_are_found(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": "plain {{ pad_token }}", "pad_token": {"content": "<pad>"}}))
    assert ChatTemplate.load(tmp_path).render([]) == "plain <pad>"
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "the default"}]
    path.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).render([]) == "the default"


def test_missing_and_broken_templates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no chat template"):
        ChatTemplate.load(tmp_path)
    with pytest.raises(ModelError, match=r"chat_template\.jinja: the chat template is not valid at line 2"):
        ChatTemplate.load(directory_with(tmp_path, "a\n{% if %}"))


def test_sha256_changes_with_the_template(tmp_path: Path) -> None:
    one = ChatTemplate.load(directory_with(tmp_path, "one")).sha256
    assert one != ChatTemplate.load(directory_with(tmp_path, "two")).sha256


STRICT = """{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('System message must come first.') }}{%- endif -%}
{%- if m.role not in ('system', 'user', 'assistant') -%}{{ raise_exception('Unexpected role.') }}{%- endif -%}
[{{ m.role }}] {{ m.content }}
{% endfor -%}"""


def test_a_template_gets_instructions_in_roles_that_it_takes(tmp_path: Path) -> None:
    template = ChatTemplate.load(directory_with(tmp_path, STRICT))
    instructions = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": [{"type": "text", "text": "b"}]},
    ]
    said = template.render([*instructions, user("c"), {"role": "system", "content": "d"}, assistant("e")])
    assert said == "[system] a\n\nb\n[user] c\n[user] d\n[assistant] e\n"


def test_arguments_of_calls_are_walked_through_as_objects_whichever_form_a_client_sends() -> None:
    template = ChatTemplate.load(DEMO / "target")

    def shown(arguments: Any) -> str:
        call = {"function": {"name": "f", "arguments": arguments}}
        return template.render([user("w?"), assistant("", tool_calls=[call])])

    assert shown('{"a": [1], "b": "x"}') == shown({"a": [1], "b": "x"}) and "<parameter=b>\nx\n" in shown('{"b": "x"}')
    assert shown("") == shown({})
