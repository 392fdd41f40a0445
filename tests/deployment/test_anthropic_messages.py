"""The Anthropic Messages interface, with the `anthropic` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import anthropic
import httpx
import pytest

from deployment.answer import Choices
from deployment.anthropic_messages.format import MessageFormat
from deployment.errors import RequestError
from deployment.last_call import Departing
from deployment.wire import Closed, Delta, Opened, Told
from tests.deployment.serving import serving

COUNT: Any = [{"role": "user", "content": "Count from 3 in steps of 2, 12 numbers."}]
NUMBERS = "3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25"
TOOL: Any = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"days": {"type": "integer", "maximum": 9}, "city": {"enum": ["Rome", "Oslo"]}},
        "required": ["days", "city"],
    },
    "cache_control": {"type": "ephemeral"},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture
def api(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="mine", max_retries=0)


def ask(api: anthropic.Anthropic, messages: Any = COUNT, **body: Any) -> Any:
    """The client knows no temperature any more."""
    asked = {"model": "demo", "max_tokens": 60, "messages": messages, "extra_body": {"temperature": 0}, **body}
    return api.messages.create(**asked)


def test_a_message_is_the_same_whole_and_streamed(api: anthropic.Anthropic):
    whole = ask(api)
    assert [(block.type, block.text) for block in whole.content] == [("text", NUMBERS)]
    assert (whole.stop_reason, whole.role, whole.model) == ("end_turn", "assistant", "demo")
    with api.messages.stream(model="demo", max_tokens=60, extra_body={"temperature": 0}, messages=COUNT) as stream:
        assert "".join(stream.text_stream) == NUMBERS
        final: Any = stream.get_final_message()
    assert [(block.type, block.text) for block in final.content] == [("text", NUMBERS)]
    assert final.usage.output_tokens == whole.usage.output_tokens
    used = final.usage
    read = used.cache_read_input_tokens or 0
    assert used.input_tokens + read == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert whole._request_id.startswith("req_")


def test_events_of_a_stream_come_in_the_order_that_clients_know(url: str):
    body = {"model": "demo", "max_tokens": 60, "temperature": 0, "messages": COUNT, "stream": True}
    lines = httpx.post(f"{url}/v1/messages", json=body, timeout=60).text.split("\n\n")
    events = [
        (part.split("\n")[0].removeprefix("event: "), json.loads(part.partition("data: ")[2])) for part in lines if part
    ]
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"] and set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert all(data["type"] == name for name, data in events)
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_an_answer_that_was_cut_off_is_an_error_and_no_whole_one(url: str):
    """Its session is deleted while it comes."""
    headers = {"x-session-id": "cut"}
    body = {"model": "demo", "max_tokens": 2000, "temperature": 1, "messages": COUNT, "stream": True}
    said = ""
    with httpx.Client(base_url=url, timeout=60) as client:
        for _ in range(12):  # the turn may end before its session does
            with client.stream("POST", "/v1/messages", json=body, headers=headers) as stream:
                parts = stream.iter_text()
                said = next(parts)
                client.delete("/v1/sessions/cut").raise_for_status()
                said += "".join(parts)
            if "event: message_stop" not in said:
                break
    *_, last = said.strip().split("\n\n")
    name, data = last.split("\n")
    assert name == "event: error" and "cancelled" in json.loads(data.removeprefix("data: "))["error"]["message"]
    assert "end_turn" not in said


@pytest.mark.parametrize(("reason", "told"), [("stop", "end_turn"), ("length", "max_tokens"), ("cancelled", None)])
def test_only_an_answer_that_is_whole_says_why_it_stopped(reason: str, told: str | None):
    opened = Opened("r", "m", 7, 10, 4, None, "f" * 32, created=3)
    events = [Delta("", "Hel", 0, (), (1,), 11), Closed(reason, 1, (), 0.0, 0.1, None)]
    choices = Choices(1)
    for event in events:
        choices.take(event)
    shown = MessageFormat(opened, "req_1")

    async def streamed() -> list[str]:
        async def coming() -> AsyncGenerator[Told | Departing, None]:
            for event in events:
                yield Told("id", event)

        return [part async for part in shown.events(coming())]

    parts = asyncio.run(streamed())
    if told is None:
        with pytest.raises(RequestError, match="cancelled"):
            shown.whole(choices)
        assert parts[-1].startswith("event: error") and not any('stop_reason":"' in part for part in parts)
    else:
        assert shown.whole(choices)["stop_reason"] == told and f'"stop_reason":"{told}"' in parts[-2]


def test_thinking_is_a_block_of_its_own_and_comes_only_where_it_was_asked_for(api: anthropic.Anthropic):
    question: Any = [{"role": "user", "content": "What is my locker code?"}]
    with api.messages.stream(
        model="demo", max_tokens=1100, extra_body={"temperature": 0}, messages=question,
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:  # fmt: skip
        final = stream.get_final_message()
    thought, said = final.content
    assert thought.type == "thinking" and thought.thinking and thought.signature and said.type == "text"
    assert all(block.type == "text" for block in ask(api, question).content)
    again: Any = [*question, {"role": "assistant", "content": final.content}, {"role": "user", "content": "Sure?"}]
    assert ask(api, again).content


def test_tools_are_called_and_their_results_taken(api: anthropic.Anthropic):
    question: Any = [{"role": "user", "content": "How is the weather?"}]
    whole = ask(api, question, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=200)
    assert whole.stop_reason == "tool_use"
    calls = [block for block in whole.content if block.type == "tool_use"]
    for call in calls:
        assert call.name == "get_weather" and type(call.input["days"]) is int and call.input["city"] in ("Rome", "Oslo")
    with api.messages.stream(
        model="demo",
        max_tokens=200,
        extra_body={"temperature": 0},
        messages=question,
        tools=[TOOL],
        tool_choice={"type": "any"},
    ) as stream:
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [call.input for call in calls]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain."}]}
        for call in calls
    ]
    more: Any = [
        *question, {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]},
    ]  # fmt: skip
    once = ask(
        api, more, tools=[TOOL], max_tokens=100,
        tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    )  # fmt: skip
    assert [block.type for block in once.content] == ["tool_use"]


def test_an_answer_that_was_begun_goes_on_in_place(api: anthropic.Anthropic):
    begun: Any = [*COUNT, {"role": "assistant", "content": "3, 5, 7,"}]
    (block,) = ask(api, begun).content
    assert "3, 5, 7," + block.text == NUMBERS


def test_stop_sequences_end_an_answer_and_are_named(api: anthropic.Anthropic):
    cut = ask(api, stop_sequences=["11", "a", "b", "c", "d"])
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("stop_sequence", "11", "3, 5, 7, 9, ")
    assert ask(api, max_tokens=5).stop_reason == "max_tokens"


def test_system_text_may_come_in_blocks_and_in_mid_conversation(api: anthropic.Anthropic):
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    late: Any = [*COUNT, {"role": "assistant", "content": "3"}, {"role": "system", "content": "Be kind."}, *COUNT]
    assert ask(api, late, system=system).content


def test_tokens_are_counted_as_a_message_counts_them(api: anthropic.Anthropic):
    counted = api.messages.count_tokens(model="demo", messages=COUNT, system="Be brief.", tools=[TOOL])
    used = ask(api, system="Be brief.", tools=[TOOL], max_tokens=1).usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_the_key_that_names_a_tenant_may_stand_in_either_header(url: str):
    body = {"model": "demo", "max_tokens": 2, "messages": COUNT}
    with httpx.Client(base_url=url, timeout=60) as client:
        named = {"x-api-key": "k", "x-session-id": "mine"}
        assert client.post("/v1/messages", json=body, headers=named).headers["x-session-id"] == "mine"
        assert client.get("/v1/sessions/mine", headers={"authorization": "Bearer k"}).status_code == 200
        assert client.get("/v1/sessions/mine", headers={"authorization": "Bearer other"}).status_code == 404


@pytest.mark.parametrize(
    ("change", "status", "kind", "said"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400, "invalid_request_error", "document"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "invalid_request_error", "tools[0]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, 400, "invalid_request_error", "budget_tokens"),
        (
            {"messages": [*COUNT, {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c", "name": "f", "input": {}}]}]},
            400, "invalid_request_error", "messages: the last one has tool_use blocks",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image", "source": {
                "type": "url", "url": "https://a.example/b"}}]}, *COUNT]},
            400, "invalid_request_error", "messages[0].content: block 0",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            400, "invalid_request_error", "messages[0].content[0].text: ",
        ),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"stop_sequences": [" "]}, 400, "invalid_request_error", "stop_sequences"),
        ({"model": "claude"}, 404, "not_found_error", "claude"),
    ],
)  # fmt: skip
def test_refusals_have_this_interfaces_form(url: str, change: dict[str, Any], status: int, kind: str, said: str):
    body = {"model": "demo", "max_tokens": 5, "messages": COUNT, **change}
    answer = httpx.post(f"{url}/v1/messages", json=body, timeout=60)
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind), error
    assert said in error["error"]["message"] and error["request_id"] == answer.headers["request-id"]
