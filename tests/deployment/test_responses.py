"""The Responses interface, with the `openai` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest

from deployment.answer import Choices
from deployment.errors import unknown_session
from deployment.openai_responses.api import ResponsesApi, _later_than_others
from deployment.openai_responses.format import ResponseFormat, response_id, session_name, session_of
from deployment.openai_responses.stored import Note
from deployment.parsing.turn_text import ToolCall
from deployment.session_api import located
from deployment.wire import Closed, Delta, Opened, Told
from tests.deployment.serving import serving

COUNT = "Count from 3 in steps of 2, 12 numbers."
NUMBERS = "3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25"
TOOL: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]},
    "strict": True,
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture
def api(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="mine", max_retries=0)


def ask(api: openai.OpenAI, said: Any = COUNT, **body: Any) -> Any:
    return api.responses.create(
        **{"model": "demo", "input": said, "temperature": 0, "max_output_tokens": 60, "store": False, **body}
    )


def test_a_response_says_what_was_asked_and_what_came(api: openai.OpenAI):
    response = ask(api, metadata={"a": "b"}, instructions="Count.")
    assert (response.output_text, response.status, response.object) == (NUMBERS, "completed", "response")
    (item,) = response.output
    assert item.type == "message" and item.id.startswith("msg_") and response.id.startswith("resp_")
    assert (response.instructions, response.metadata, response.temperature) == ("Count.", {"a": "b"}, 0)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert type(response.top_p) is float and response.tools == [] and response.text.format.type == "text"
    short = ask(api, max_output_tokens=4)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_events_of_a_stream_are_numbered_and_build_the_response(api: openai.OpenAI):
    with api.responses.stream(model="demo", input=COUNT, temperature=0, max_output_tokens=60, store=False) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"} and kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == NUMBERS


def test_thinking_and_calls_are_items_the_same_whole_and_streamed(api: openai.OpenAI):
    def shape(response: Any) -> list[Any]:
        dumped = [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in response.output]
        return json.loads(json.dumps(dumped).replace('"parsed": null, ', ""))

    thinking: Any = {"input": "What is my locker code?", "reasoning": {"effort": "high"}, "max_output_tokens": 120}
    calling: Any = {"input": "Add.", "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 120}
    for body, kinds in ((thinking, ["reasoning", "message"]), (calling, ["function_call"])):
        whole = ask(api, **{"said": body["input"], **{k: v for k, v in body.items() if k != "input"}})
        with api.responses.stream(model="demo", temperature=0, store=False, **body) as stream:
            final = stream.get_final_response()
        assert [item.type for item in whole.output][: len(kinds)] == kinds
        assert [item.type for item in final.output] == [item.type for item in whole.output]
        assert [getattr(i, "arguments", None) for i in final.output] == [
            getattr(i, "arguments", None) for i in whole.output
        ]
        assert final.output_text == whole.output_text
        assert (whole.usage.output_tokens_details.reasoning_tokens > 0) == ("reasoning" in kinds)
        assert shape(whole)
    assert type(json.loads(whole.output[0].arguments)["a"]) is int


def test_a_stored_response_is_gone_on_from_and_its_state_is_reused(api: openai.OpenAI):
    first = ask(api, "My locker code is 4172.", store=True)
    second = ask(api, "What is my locker code?", store=True, previous_response_id=first.id)
    alone = ask(api, [
        {"role": "user", "content": "My locker code is 4172."}, *first.output,
        {"role": "user", "content": "What is my locker code?"},
    ])  # fmt: skip
    assert second.output_text == alone.output_text and second.previous_response_id == first.id
    spent = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens >= spent - 2, "the first turn's end was reused"
    assert second.id[:37] == first.id[:37], "one session"


def test_who_goes_on_from_an_older_response_has_its_past_alone(api: openai.OpenAI):
    first = ask(api, COUNT, store=True)
    texts = [ask(api, said, store=True, previous_response_id=first.id) for said in ("One.", "Two.")]
    again = ask(api, "One.", store=True, previous_response_id=first.id)
    assert again.output_text == texts[0].output_text and len({one.id[:37] for one in (first, texts[1], again)}) == 3
    items = [item.content[0].text for item in api.responses.input_items.list(texts[1].id)]  # pyright: ignore
    assert items == ["Two."]


def test_a_stored_response_is_shown_as_it_was_until_it_is_deleted(api: openai.OpenAI):
    made = ask(
        api, [{"role": "user", "content": [{"type": "input_text", "text": COUNT}]}], store=True, metadata={"k": "v"}
    )
    shown = api.responses.retrieve(made.id)
    assert shown == made
    assert [item.type for item in api.responses.input_items.list(made.id)] == ["message"]
    api.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        api.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        ask(api, previous_response_id=made.id)


def test_instructions_do_not_carry_over_and_tools_may_change(api: openai.OpenAI):
    first = ask(api, COUNT, store=True, instructions="Be brief.", tools=[TOOL], tool_choice="none")
    second = ask(api, "And then?", store=True, previous_response_id=first.id)
    third = ask(api, "And then?", store=True, previous_response_id=second.id, instructions="Be kind.")
    assert second.instructions is None and second.tools == [] and third.instructions == "Be kind."
    plain = api.responses.input_tokens.count(model="demo", input="x", previous_response_id=third.id)
    told = api.responses.input_tokens.count(model="demo", input="x", previous_response_id=third.id, instructions="y z")
    assert third.usage.input_tokens < plain.input_tokens < told.input_tokens


def test_results_of_calls_are_taken(api: openai.OpenAI):
    first = ask(api, "Add.", tools=[TOOL], tool_choice="required", store=True, max_output_tokens=120)
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "7"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = ask(api, results, tools=[TOOL], tool_choice="none", previous_response_id=first.id, store=True)
    assert second.status in ("completed", "incomplete") and all(item.type == "message" for item in second.output)


def turn_in(url: str, response: Any, said: str) -> str:
    """The response id that a turn of another kind in a response's session would have."""
    answer = httpx.post(
        f"{url}/v1/sessions/resp-{response.id[5:37]}/turns",
        json={"messages": [{"role": "user", "content": said}], "max_tokens": 4},
        headers={"authorization": "Bearer mine"},
    )
    return response.id[:37] + answer.raise_for_status().headers["x-turn-id"]


def test_turns_of_another_kind_are_no_responses_and_leave_those_that_were_there(api: openai.OpenAI, url: str):
    first = ask(api, "One.", store=True, instructions="Be brief.", max_output_tokens=8)
    other = turn_in(url, first, "Two.")
    assert api.responses.retrieve(first.id) == first
    assert [item.content[0].text for item in api.responses.input_items.list(first.id)] == ["One."]  # pyright: ignore
    for name in (other, first.id):
        if name == first.id:  # a conversation that is told anew does not have the response
            told: Any = {"messages": [{"role": "user", "content": "Three."}], "max_tokens": 4}
            headers = {"authorization": "Bearer mine", "x-session-id": f"resp-{first.id[5:37]}"}
            httpx.post(f"{url}/v1/chat/completions", json=told, headers=headers).raise_for_status()
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            api.responses.retrieve(name)


@pytest.mark.parametrize(
    ("mark", "older"),
    [
        ("idempotency-key", False),
        ("idempotency-key", True),
        ("x-stainless-retry-count", False),
        ("x-stainless-retry-count", True),
    ],
)
def test_a_response_that_is_asked_for_again_is_the_same(api: openai.OpenAI, mark: str, older: bool):
    first = ask(api, "One.", store=True, max_output_tokens=8)
    if older:
        ask(api, "Two.", store=True, max_output_tokens=8, previous_response_id=first.id)
    marks = [f"{first.id}-k"] * 2 if mark == "idempotency-key" else ["0", "1"]
    made, again = (
        ask(api, "Go on.", store=True, max_output_tokens=8, previous_response_id=first.id, extra_headers={mark: value})
        for value in marks
    )
    assert again.id == made.id and again.output == made.output
    if older and mark != "idempotency-key":
        other = ask(api, "Go on.", store=True, max_output_tokens=8, previous_response_id=first.id)
        assert other.id[:37] not in (made.id[:37], first.id[:37]), "one that does not say so is another one"


def test_the_last_of_many_requests_alike_is_found_and_the_others_look_for_nothing(
    api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
):
    looked_for: list[str] = []

    async def watched(cluster: Any, key: Any) -> Any:
        looked_for.append(key.session)
        return await located(cluster, key)

    monkeypatch.setattr("deployment.session_api.located", watched)
    first = ask(api, "One.", store=True, max_output_tokens=2)
    ask(api, "Two.", store=True, max_output_tokens=2, previous_response_id=first.id)
    how: Any = {"store": True, "max_output_tokens": 2, "previous_response_id": first.id}
    many = [ask(api, "Go on.", **how) for _ in range(9)]
    assert len({one.id[:37] for one in many}) == 9 and len(set(looked_for)) == 1, "that which they go on from"
    again = ask(api, "Go on.", **how, extra_headers={"x-stainless-retry-count": "1"})
    assert again.id == many[-1].id


def test_what_begins_from_an_older_response_has_an_id_that_nobody_can_guess(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.openai_responses.api.time.time", lambda: 1_790_000_000.0)
    names = [session_name(_later_than_others("a" * 16)) for _ in range(16)]
    alike = next(length for length, digits in enumerate(zip(*names, strict=True)) if len(set(digits)) > 1)
    assert 4 * (len(names[0]) - alike) >= 120, "of bits that are drawn"
    assert [session_of(response_id(name, "b" * 32)) for name in names] == [(name, "b" * 32) for name in names]


def test_tools_are_kept_of_the_newest_response_alone(api: openai.OpenAI):
    first = ask(api, store=True, tools=[TOOL], tool_choice="none", max_output_tokens=4)
    assert api.responses.retrieve(first.id) == first and first.tools
    second = ask(api, "Two.", store=True, previous_response_id=first.id, tools=[TOOL], max_output_tokens=4)
    assert api.responses.retrieve(second.id).tools == second.tools == first.tools
    assert api.responses.retrieve(first.id).tools == []


def test_instructions_are_kept_once_and_told_of_each_response_that_had_them(api: openai.OpenAI, url: str):
    told = "Be brief, and of good cheer."
    first = ask(api, store=True, instructions=told, max_output_tokens=4)
    second = ask(api, "Two.", store=True, previous_response_id=first.id, instructions=told, max_output_tokens=4)
    assert [api.responses.retrieve(one.id).instructions for one in (first, second)] == [told, told]
    session = f"{url}/v1/sessions/resp-{first.id[5:37]}"
    kept = httpx.get(session, headers={"authorization": "Bearer mine"}).json()
    assert json.dumps(kept).count(told) == 2, "in the transcript, and in the newest response's note"
    third = ask(api, "Three.", store=True, previous_response_id=second.id, max_output_tokens=4)
    assert [api.responses.retrieve(one.id).instructions for one in (second, third)] == [None, None]


def test_a_response_that_is_cancelled_before_its_first_token_is_told_though_nothing_is_kept():
    name = f"resp_{'a' * 32}{'b' * 32}"
    placed = [SimpleNamespace(key="k", owner="r")]

    async def placement(request: Any, session: str) -> Any:
        if not placed:
            raise unknown_session(session)
        return placed.pop()

    async def ask(method: str, *_: Any) -> str:
        assert method == "cancel_turn"
        facts = {"metadata": {"a": "b"}, "created_at": 1, "tools": [], "instructions": "Be brief."}
        return Note.of(facts, begin=0, end=2).text

    none: Any = None
    api = ResponsesApi(
        none, none, cast(Any, SimpleNamespace(placement=placement)), cast(Any, SimpleNamespace(ask=ask)), "m"
    )
    shown = asyncio.run(api.cancel(cast(Any, SimpleNamespace(query_params={})), name))
    assert (shown["id"], shown["status"], shown["output"], shown["metadata"]) == (name, "cancelled", [], {"a": "b"})
    assert shown["instructions"] == "Be brief."


def test_text_behind_a_call_is_the_same_item_whole_and_streamed():
    call = ToolCall("c0", 0, "add", "{}", at=3)
    delta = Delta("Hm.", "AndSo", 0, (), (1,), 1, 0, (), (call,))
    closed = Closed("stop", 3, (), 1.0, 0.1, None, content=" it is.", calls=1)
    shown = ResponseFormat(Opened("r", "m", 1, 4, 0, None, "b" * 32), {})
    choices = Choices(1)
    choices.take(delta)
    choices.take(closed)

    async def streamed() -> list[str]:
        async def told() -> AsyncGenerator[Told, None]:
            for event in (delta, closed):
                yield Told("", event)

        return [part async for part in shown.events(told())]

    last = json.loads(asyncio.run(streamed())[-1].partition("data: ")[2])
    whole = shown.whole(choices)
    assert whole == last["response"]
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "message"]


def test_another_model_is_not_counted_for(api: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served"):
        api.responses.input_tokens.count(model="gpt", input="x")


def test_others_do_not_see_a_response(api: openai.OpenAI, url: str):
    made = ask(api, store=True)
    other = openai.OpenAI(base_url=f"{url}/v1", api_key="other", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(made.id)


def test_a_response_that_streams_is_cancelled_and_keeps_what_it_had_said(api: openai.OpenAI):
    for _ in range(12):  # the turn may end before anybody asks for it
        stream = ask(api, "One day", store=True, stream=True, max_output_tokens=2000, temperature=1, top_p=1)
        created = next(iter(stream)).response
        running = api.responses.retrieve(created.id)
        try:
            ask(api, "And?", previous_response_id=created.id)
        except openai.ConflictError as error:
            refused = error
            break
    else:
        pytest.fail("every turn had ended")
    assert "not complete" in str(refused) and refused.param == "previous_response_id"
    assert (running.status, running.output, running.temperature) == ("in_progress", [], 1)
    api.responses.cancel(created.id)
    last = list(stream)[-1]
    shown = api.responses.retrieve(created.id)
    assert last.type in ("response.failed", "response.completed") and shown.status == last.response.status
    with pytest.raises(openai.ConflictError):
        api.responses.cancel(created.id)


def test_a_response_in_the_background_is_asked_for_until_it_is_complete(api: openai.OpenAI):
    begun = ask(api, store=True, background=True)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    shown = begun
    while shown.status == "in_progress":
        shown = api.responses.retrieve(begun.id)
    assert (shown.status, shown.background, shown.output_text) == ("completed", True, NUMBERS)
    second = ask(api, "One day", store=True, background=True, max_output_tokens=2000, previous_response_id=begun.id)
    assert api.responses.cancel(second.id).status in ("cancelled", "completed")


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"background": True, "store": False}, 400, "background"),
        ({"truncation": "auto"}, 400, "truncation"),
        ({"conversation": "c"}, 400, "conversation"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]},
            400, "input[0].content[0].text",
        ),
        (
            {"input": [{"role": "user", "content": "x"},
                       {"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]},
            400, "input[1].arguments",
        ),
        (
            {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "https://a.example/b"}]}]},
            400, "input[0].content",
        ),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"previous_response_id": "resp_x"}, 404, "previous_response_id"),
        ({"previous_response_id": response_id(session_name("a" * 32), "b" * 32)}, 404, "previous_response_id"),
        ({"model": "gpt"}, 404, "model"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(url: str, change: dict[str, Any], status: int, param: str):
    answer = httpx.post(f"{url}/v1/responses", json={"input": "x", **change}, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == status and error["param"].startswith(param), error
