"""Tools over HTTP, with the `openai` client: called, streamed, answered, gone on with, and refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.deployment.serving import serving

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99}, "unit": {"enum": ["m", "km"]}},
            "required": ["a", "unit"],
        },
    },
}
ODD: dict[str, Any] = {"type": "function", "function": {"name": "odd", "parameters": {"anyOf": [{"type": "object"}]}}}
ASK: Any = [{"role": "user", "content": "What is 3 plus 4?"}]
ONE = {"tools": [ADD], "tool_choice": "required", "temperature": 0, "max_tokens": 90, "parallel_tool_calls": False}


CALL_TOKEN = 8185
"""`<tool_call>` of the demo model."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture
def api(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(api: openai.OpenAI, **body: Any) -> Any:
    return api.chat.completions.create(**{"model": "demo", "messages": ASK, **ONE, **body})


def checked(call: Any) -> dict[str, Any]:
    arguments = json.loads(call.function.arguments)
    assert list(arguments) == ["a", "unit"] and type(arguments["a"]) is int and arguments["unit"] in ("m", "km")
    return arguments


def test_a_required_call_comes_typed_by_its_schema_whole_and_streamed(api: openai.OpenAI):
    whole = ask(api)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    for call in choice.message.tool_calls:
        checked(call)
    with api.chat.completions.stream(model="demo", messages=ASK, **ONE) as stream:  # pyright: ignore
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert [(c.function.name, c.function.arguments) for c in final.message.tool_calls or ()] == [
        (c.function.name, c.function.arguments) for c in choice.message.tool_calls
    ]


def test_a_named_function_is_called_once_and_none_is_called_where_none_may_be(api: openai.OpenAI):
    named = ask(api, tools=[ODD, ADD], tool_choice={"type": "function", "function": {"name": "add"}}, temperature=1)
    (call,) = named.choices[0].message.tool_calls
    assert call.function.name == "add" and checked(call)
    eager = {"logit_bias": {str(CALL_TOKEN): 100}, "max_tokens": 30}
    nothing = ask(api, tool_choice="none", **eager).choices[0]
    assert nothing.message.tool_calls is None and "<tool_call>" not in nothing.message.content


def test_choices_have_calls_of_their_own(api: openai.OpenAI):
    choices = ask(api, n=2).choices
    (one,), (two,) = (choice.message.tool_calls for choice in choices)
    assert one.id != two.id and one.function == two.function


def test_calls_in_parallel_are_told_apart(api: openai.OpenAI):
    """The model would end after one: its end token is forbidden until there must be several."""
    end = ask(api, max_tokens=60).usage.completion_tokens
    several = ask(api, parallel_tool_calls=True, max_tokens=120, extra_body={"min_tokens": end + 20})
    calls = several.choices[0].message.tool_calls
    assert len(calls) >= 2 and len({call.id for call in calls}) == len(calls) and all(map(checked, calls))


def test_an_agent_answers_its_calls_until_the_model_has_nothing_to_call(api: openai.OpenAI):
    messages = list(ASK)
    for turn in range(3):
        how: Any = {"tool_choice": "required"} if turn < 2 else {"tool_choice": "none", "max_tokens": 12}
        choice = ask(api, messages=messages, **how).choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(checked(call)["a"])})
    assert choice.message.tool_calls is None and len(messages) == 6


def test_tools_that_no_grammar_expresses_are_offered_all_the_same_unless_somebody_insists(api: openai.OpenAI):
    assert ask(api, tools=[ODD], tool_choice="auto", max_tokens=8).choices[0].finish_reason == "length"
    strict = {**ODD, "function": {**ODD["function"], "strict": True}}
    for tools, choice in (([ODD], "required"), ([strict], "auto")):
        with pytest.raises(openai.BadRequestError, match="anyOf is not supported"):
            ask(api, tools=tools, tool_choice=choice)


def test_a_session_keeps_what_its_client_saw_and_tells_it_again_from_any_event(url: str):
    body = {"messages": ASK, **ONE, "stream": True}
    with httpx.Client(base_url=url, timeout=60) as client:
        written = client.post("/v1/chat/completions", json=body, headers={"x-session-id": "s"}).text
        events = parsed(written)
        turn = events[0][0].partition(".")[0]
        message = joined(events)
        assert message["tool_calls"]
        for index, (place, _) in enumerate(events[:-1]):
            rest = parsed(client.get(f"/v1/sessions/s/turns/{turn}/events", params={"after": place}).text)
            had = [event for event in events[: index + 1] if event[0] != place or event in events[: index + 1]]
            assert joined([*had, *rest]) == message
        assert parsed(client.get(f"/v1/sessions/s/turns/{turn}/events").text) == events
        *_, answer = client.get("/v1/sessions/s").json()["transcript"]
        assert (answer["role"], answer["tool_calls"]) == ("assistant", message["tool_calls"])

        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7"}
        more = {"messages": [result], "tools": [ADD], "tool_choice": "required", "max_tokens": 120}
        after = client.post("/v1/sessions/s/turns", json=more).json()
        assert after["session"]["prefilled"] < 60 and after["choices"][0]["message"]["tool_calls"]
        other = client.post("/v1/sessions/s/turns", json={**more, "tools": [ODD]})
        assert (other.status_code, other.json()["error"]["param"]) == (400, "tools")


def parsed(stream: str) -> list[tuple[str, Any]]:
    events = []
    for part in stream.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in part.split("\n") if line)
        if lines.get("data", "[DONE]") != "[DONE]":
            events.append((lines["id"], json.loads(lines["data"])))
    return events


def joined(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """The message that chunks are of."""
    content, calls, reason = "", [], None
    for _, chunk in events:
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content") or ""
        calls += [{k: v for k, v in call.items() if k != "index"} for call in choice["delta"].get("tool_calls", ())]
        reason = choice["finish_reason"] or reason
    return {"content": content, "tool_calls": calls, "finish_reason": reason}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": None}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "subtract"}}}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
         "messages[1].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_of_tools_is_refused_by_name(url: str, change: dict[str, Any], param: str):
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": ASK, **ONE, **change}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(param)
