"""Request bodies: what is refused, and by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployment.anthropic_messages.schema import MessagesBody
from deployment.body_reading import parse
from deployment.completion_schema import CompletionBody
from deployment.engine.commands import Grammar
from deployment.errors import RequestError
from deployment.json_reading import MAX_DEPTH, read_json
from deployment.openai_responses.schema import ResponsesBody
from deployment.request_reading import Asking, completion_requests
from deployment.schemas import TELL_ONLY, AnswerBody, MigrateBody, TurnBody

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "poet", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["Hello"]}]}, "messages[0].content"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs.colour"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"queue_seconds": -0.1}, "queue_seconds"),
        ({"queue_seconds": float("inf")}, "queue_seconds"),
        ({"queue_seconds": "5"}, "queue_seconds"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop": 3}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": "a" * 1025}, "stop[0]"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 20: 1}}, "logit_bias"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(change: dict[str, Any], param: str):
    with pytest.raises(RequestError) as caught:
        parse(TurnBody, HELLO | change)
    refused = caught.value.refused
    assert refused.status == 400 and refused.param == param
    assert refused.message.startswith(param) and "\n" not in refused.message


@pytest.mark.parametrize("document", [None, [], "text", 3, True])
def test_body_that_is_no_object_is_refused(document: Any):
    with pytest.raises(RequestError, match="must be a JSON object"):
        parse(TurnBody, document)


def test_fields_that_change_nothing_are_accepted():
    body = parse(
        TurnBody,
        HELLO
        | {"user": "me", "metadata": {"a": "b"}, "store": True, "n": 1, "logprobs": False, "tools": [], "stop": None}
        | {"presence_penalty": 0.0, "frequency_penalty": 0, "response_format": {"type": "text"}, "tool_choice": "auto"},
    )
    assert body.messages[0].content == "Hello"


def test_a_field_that_nobody_knows_is_ignored_but_not_one_that_would_change_the_answer():
    assert parse(TurnBody, HELLO | {"provider": {"order": []}, "temprature": 1}) == parse(TurnBody, HELLO)
    with pytest.raises(RequestError, match="guided_json"):
        parse(TurnBody, HELLO | {"guided_json": {}})


KINDS: list[tuple[type[AnswerBody], dict[str, Any]]] = [
    (CompletionBody, {"prompt": "3, 5,"}),
    (ResponsesBody, {"input": "Hello"}),
    (MessagesBody, HELLO | {"model": "demo", "max_tokens": 5}),
]
"""The other bodies that ask for an answer, and what each must have."""

LACKING = [
    (kind, needed, name)
    for kind, needed in KINDS
    for name in TurnBody.model_fields
    if name not in kind.model_fields and name not in TELL_ONLY
]


@pytest.mark.parametrize(("kind", "needed", "name"), LACKING)
def test_what_only_a_chat_honours_is_refused_by_name_elsewhere(
    kind: type[AnswerBody], needed: dict[str, Any], name: str
):
    default = TurnBody.model_fields[name].get_default()
    said = default if name != "messages" else None
    assert parse(kind, needed | {name: said}) == parse(kind, needed), "what is left out"
    with pytest.raises(RequestError) as caught:
        parse(kind, needed | {name: "other"})
    assert caught.value.refused.param == name


@pytest.mark.parametrize(
    ("kind", "needed", "asked"),
    [
        (*KINDS[1], {"seed": 7}),
        (*KINDS[1], {"stop": ["x"]}),
        (*KINDS[1], {"top_k": 5}),
        (*KINDS[1], {"n": True}),
        (*KINDS[2], {"response_format": {"type": "json_object"}}),
        (*KINDS[2], {"seed": 0}),
        (*KINDS[2], {"guided_json": {}}),
        (*KINDS[0], {"thinking_budget": 0}),
    ],
)
def test_a_control_of_another_interface_is_refused(
    kind: type[AnswerBody], needed: dict[str, Any], asked: dict[str, Any]
):
    with pytest.raises(RequestError) as caught:
        parse(kind, needed | asked)
    assert [caught.value.refused.param] == list(asked)


@pytest.mark.parametrize(("kind", "needed"), KINDS)
def test_values_that_ask_for_nothing_and_fields_that_nobody_knows_are_accepted_everywhere(
    kind: type[AnswerBody], needed: dict[str, Any]
):
    neutral = {"n": 1, "stop": [], "presence_penalty": 0, "frequency_penalty": 0.0, "response_format": {"type": "text"}}
    if kind is not CompletionBody:  # which counts them
        neutral["logprobs"] = False
    neutral["parallel_tool_calls"] = False
    told = {"stream_options": {"include_usage": True}, "user": "me", "temprature": 1}
    body = parse(kind, needed | neutral | told)
    assert body.model_dump(include={*needed}) == parse(kind, needed).model_dump(include={*needed})


def test_whether_calls_may_be_several_is_refused_by_name_only_where_there_may_be_calls():
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    with pytest.raises(RequestError) as caught:
        parse(KINDS[2][0], KINDS[2][1] | {"tools": tools, "parallel_tool_calls": False})
    assert caught.value.refused.param == "parallel_tool_calls"
    parse(KINDS[2][0], KINDS[2][1] | {"tools": [], "parallel_tool_calls": False})


def test_a_text_completion_has_a_format_and_the_newer_name_of_its_budget():
    body = parse(CompletionBody, {"prompt": "x", "response_format": {"type": "json_object"}})
    assert body.grammar == Grammar("json_object") and body.wanted == 16
    assert parse(CompletionBody, {"prompt": "x", "max_tokens": 5, "max_completion_tokens": 0}).wanted == 0
    (turn,) = completion_requests(body, Asking("t"))
    assert turn.grammar == Grammar("json_object")


@pytest.mark.parametrize(
    ("asked", "thinks"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, True),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_an_effort_is_thinking_or_none(asked: dict[str, Any], thinks: bool | None):
    assert parse(TurnBody, HELLO | asked).thinks is thinks


def test_a_priority_that_counts_is_the_usual_one_or_a_later_one():
    assert [parse(TurnBody, HELLO | {"priority": value}).priority for value in (-1, 0, 5, "background")] == [
        "interactive", "interactive", "background", "background",
    ]  # fmt: skip


def test_a_field_that_is_null_is_one_that_was_left_out():
    nothing: dict[str, None] = {name: None for name in TurnBody.model_fields if name != "messages"}
    assert parse(TurnBody, HELLO | nothing) == parse(TurnBody, HELLO)


def test_stop_is_a_string_or_up_to_four():
    assert parse(TurnBody, HELLO | {"stop": "END"}).stop == ["END"]
    assert parse(TurnBody, HELLO | {"stop": ["a", "b", "\n", "\u20ac"]}).stop == ["a", "b", "\n", "\u20ac"]
    assert not parse(TurnBody, HELLO | {"stop": []}).stop


def test_a_response_format_becomes_a_grammar_that_keeps_the_order_of_its_properties():
    def grammar(response_format: dict[str, Any] | None) -> Grammar | None:
        body = parse(TurnBody, HELLO | {"response_format": response_format})
        return body.response_format.grammar if body.response_format else None

    schema = {"type": "object", "properties": {"z": {"type": "string"}, "ä": {"type": "null"}}}
    wrapped = {"name": "answer", "strict": True, "description": "x", "schema": schema}
    assert grammar({"type": "json_schema", "json_schema": wrapped}) == Grammar(
        "json_schema", '{"type": "object", "properties": {"z": {"type": "string"}, "ä": {"type": "null"}}}'
    )
    assert grammar({"type": "json_object"}) == Grammar("json_object")
    assert grammar({"type": "text"}) is grammar(None) is None


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1) if depth > 1 else 1}


def called(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": [block]}]}


@pytest.mark.parametrize("field", ["response_format", "tools", "text", "output_config"])
def test_a_schema_may_be_nested_deeper_than_the_rest_of_a_body(field: str):
    read_json(json.dumps({field: nested(60)}).encode())
    with pytest.raises(RequestError, match=f"{field}: is nested deeper than 64 levels"):
        read_json(json.dumps({field: nested(70)}).encode())


def test_so_may_be_what_a_tool_was_called_with_and_no_other_block_of_a_message():
    block = {"type": "tool_use", "id": "c", "name": "f", "input": nested(50)}
    read = parse(MessagesBody, {"model": "m", "max_tokens": 1, **read_json(json.dumps(
        {"messages": [*called(block)["messages"], {"role": "user", "content": "x"}]}).encode())})  # fmt: skip
    (call,) = read.chat["messages"][0]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == nested(50)
    for other in (block | {"input": nested(70)}, block | {"type": "text"}, block | {"id": nested(50)}):
        with pytest.raises(RequestError, match="messages: is nested deeper than"):
            read_json(json.dumps(called(other)).encode())


def test_extra_fields_of_a_message_reach_the_template():
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    body = parse(TurnBody, {"messages": [{"role": "user", "content": "x"}, message]})
    assert body.messages[1].model_dump(exclude_none=True)["tool_calls"] == message["tool_calls"]


def test_completion_budget_prefers_the_newer_name():
    assert parse(TurnBody, HELLO | {"max_tokens": 5, "max_completion_tokens": 7}).token_budget == 7
    assert parse(TurnBody, HELLO | {"max_tokens": 5}).token_budget == 5
    assert parse(TurnBody, HELLO).token_budget is None


def test_other_bodies_know_no_chat_fields():
    assert parse(MigrateBody, {}).to is None
    with pytest.raises(RequestError, match="user"):
        parse(MigrateBody, {"user": "me"})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b'{"seed": ' + b"9" * 5000 + b"}", None),
        (b'{"user": NaN}', None),
        (b"[" * 200_000, None),
        (b'{"user": ' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}", "user"),
        (rb'{"\ud800": 1}', "\\ud800"),
        (rb'{"messages": [{"role": "user", "name": "\udfff"}]}', "messages[0].name"),
        (b'{"messages": [{"role": "user", "x": 1e999}]}', "messages[0].x"),
        (b'{"messages": [{"role": "user", "x": 18446744073709551616}]}', "messages[0].x"),
        (b'{"top_k": 1000000000000000000000000000000}', "top_k"),
    ],
)
def test_what_no_session_could_keep_is_refused_before_it_is_one(body: bytes, param: str | None):
    with pytest.raises(RequestError) as caught:
        read_json(body)
    refused = caught.value.refused
    assert (refused.status, refused.param) == (400, param)
    assert len(refused.message.encode()) < 300


def test_body_keeps_its_numbers_and_its_text():
    assert read_json(rb'{"a": [18446744073709551615, -9223372036854775808, 0.5, null, "\ud83d\ude00"]}') == {
        "a": [2**64 - 1, -(2**63), 0.5, None, "\N{GRINNING FACE}"]
    }
