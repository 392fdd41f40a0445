"""A real Ray cluster with two replicas of the demo model, driven over HTTP. One cluster for the whole module."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
import ray

from deployment.cluster.names import NAMESPACE, directory_name, store_name
from deployment.settings import AppArgs
from tests.e2e.cluster import (
    COUNT,
    FACT,
    GREEDY,
    QUESTION,
    chat,
    epoch,
    keyed,
    replicas,
    text,
    turn,
    two_replicas,
    wait_for_two,
)

REQUIRED = {"x-session-id": "never-seen", "x-session-require": "existing"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with two_replicas(AppArgs(detach_seconds=1, durable=None)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with keyed(url) as client:
        yield client


# ------------------------------------------------------------------------------------------------ answers


def test_drafting_changes_speed_and_not_the_greedy_answer(client: httpx.Client):
    drafted, plain = chat(client, [COUNT]), chat(client, [COUNT], drafting=False)
    assert text(drafted) == text(plain) == "3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25"
    assert drafted["meta_info"]["spec_accept_length"] > 2 > 1 >= plain["meta_info"]["spec_accept_length"]
    assert drafted["meta_info"]["spec_verify_ct"] == len(drafted["meta_info"]["rounds"])


def test_openai_client_streams_the_same_answer_with_usage(client: httpx.Client, url: str):
    whole = chat(client, [COUNT])
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in api.models.list()] == ["demo"]
    assert api.models.retrieve("demo").id == "demo"
    stream = api.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": COUNT["content"]}],
        temperature=0,
        max_tokens=48,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(piece or "" for piece in pieces) == text(whole)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == whole["usage"]["completion_tokens"]
    assert len(pieces) < whole["usage"]["completion_tokens"], "a round of several tokens is one chunk"


def test_seed_repeats_an_answer_and_an_unset_seed_is_reported(client: httpx.Client):
    sampled = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    first = chat(client, [COUNT], **sampled)
    again = chat(client, [COUNT], **sampled, seed=first["meta_info"]["seed"])
    assert text(again) == text(first)
    assert len({text(chat(client, [COUNT], **sampled, seed=seed)) for seed in range(4)}) > 1


def test_length_and_stop_token_end_an_answer(client: httpx.Client):
    short = chat(client, [COUNT], max_tokens=5)
    assert short["choices"][0]["finish_reason"] == "length" and short["usage"]["completion_tokens"] == 5
    assert chat(client, [COUNT], max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    long = chat(client, [COUNT], ignore_eos=True, max_tokens=60)
    assert long["usage"]["completion_tokens"] == 60


def test_openai_client_gets_choices_stop_strings_and_logprobs(client: httpx.Client, url: str):
    """Streamed and whole; each choice is what a request with that choice alone would get."""
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "Count from 3 in steps of 2, 12 numbers."}]
    cut = api.chat.completions.create(model="demo", messages=messages, temperature=0, stop=["11", "never"])
    assert cut.choices[0].message.content == "3, 5, 7, 9, " and cut.choices[0].finish_reason == "stop"

    ask: Any = {"model": "demo", "messages": messages, "temperature": 1.0, "seed": 4, "n": 2, "logprobs": True}
    whole = api.chat.completions.create(**ask, top_logprobs=2, max_tokens=24)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.usage is not None and whole.usage.completion_tokens <= 48
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        assert (
            "".join(entry.token for entry in choice.logprobs.content).strip() == (choice.message.content or "").strip()
        )
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in choice.logprobs.content)
    texts = {0: "", 1: ""}
    for chunk in api.chat.completions.create(**ask, max_tokens=24, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [texts[0], texts[1]] == [choice.message.content for choice in whole.choices]


def test_controls_over_http_reach_the_engine(client: httpx.Client):
    ask = [{"role": "user", "content": "Count from 3 to 7."}]
    plain = chat(client, ask, temperature=0)
    first = plain["choices"][0]["message"]["content"].split(",")[0]
    banned = chat(client, ask, temperature=0, logit_bias={str(token): -100 for token in range(20)})
    assert first not in text(banned).split(",")
    longer = chat(client, ask, temperature=0, min_tokens=40, priority="background")
    assert longer["usage"]["completion_tokens"] >= 40


def test_thinking_is_told_apart_from_the_answer(client: httpx.Client):
    answer = chat(client, [QUESTION], chat_template_kwargs={"enable_thinking": True}, max_tokens=120)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] and "think>" not in message["reasoning_content"] + message["content"]


def test_the_other_interfaces_reach_the_same_turns(client: httpx.Client, url: str):
    """Through Serve, as `tests/deployment` has them without it: called, streamed, and a response that moves."""
    expected = text(chat(client, [COUNT]))
    asked: Any = {"model": "demo", "max_tokens": 60, "messages": [COUNT], "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0).messages.stream(**asked) as message:
        assert "".join(message.text_stream) == expected
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    how: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 60}
    with api.responses.stream(input=FACT["content"], **how) as stream:
        first = stream.get_final_response()
    session = f"resp-{first.id[5:37]}"
    moved = client.post(f"/v1/sessions/{session}/migrate", headers={"authorization": "Bearer k"}).json()
    second = api.responses.create(input=QUESTION["content"], previous_response_id=first.id, **how)
    assert moved["from"] != moved["to"] and "4172" in second.output_text and second.id[5:37] == first.id[5:37]
    assert second.usage is not None and second.usage.input_tokens_details.cached_tokens > 20
    assert api.responses.retrieve(first.id).output_text == first.output_text
    counted = client.post("/tokenize", json={"messages": [COUNT]}).json()["count"]
    assert counted == chat(client, [COUNT])["usage"]["prompt_tokens"]


def test_response_format_binds_the_answer_and_not_the_thinking(client: httpx.Client):
    codes = {"type": "object", "properties": {"code": {"enum": ["4172", "9"]}}, "required": ["code"]}
    schema = {**codes, "additionalProperties": False}
    asked: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "code", "schema": schema}}
    }
    assert json.loads(text(chat(client, [QUESTION], **asked)))["code"] in ("4172", "9")
    thinking = chat(client, [QUESTION], chat_template_kwargs={"enable_thinking": True}, max_tokens=300, **asked)
    message = thinking["choices"][0]["message"]
    assert message["reasoning_content"] and json.loads(message["content"])["code"] in ("4172", "9")
    whole = chat(client, [QUESTION], max_tokens=100, temperature=1.0, response_format={"type": "json_object"})
    assert text(whole).startswith("{")
    bad = {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"type": "integr"}}}}}
    for stream in (False, True):
        body = {"messages": [QUESTION], "response_format": bad, "stream": stream}
        refused = client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "response_format"
        assert "#/properties/a: Invalid type: integr" in refused.json()["error"]["message"]


# ------------------------------------------------------------------------------------------------ sessions


def test_full_history_reuses_the_stable_part_of_the_turn_before(client: httpx.Client):
    first = chat(client, [FACT], "history")
    history = [FACT, first["choices"][0]["message"], QUESTION]
    second = chat(client, history, "history")
    assert "4172" in text(second) and second["session"]["hit"] == "device"
    assert 0 < second["session"]["reused"] <= first["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["session"]["reused"]
    assert text(second) == text(chat(client, history)), "reused state gives the answer of a fresh prefill"


def test_session_tells_its_transcript_turns_and_place(client: httpx.Client):
    chat(client, [FACT], "told")
    turn(client, "told", QUESTION)
    known = client.get("/v1/sessions/told").json()
    assert [message["role"] for message in known["transcript"]] == ["user", "assistant", "user", "assistant"]
    assert "4172" in known["transcript"][-1]["content"]
    assert [entry["mode"] for entry in known["turns"]] == ["history", "append"]
    assert known["replica"] in replicas(client) and len(known["copies"]) == 1
    assert "told" in [entry["id"] for entry in client.get("/v1/sessions").json()["data"]]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "seed": 11}])
def test_moved_session_goes_on_like_one_that_stayed(client: httpx.Client, sampling: dict[str, Any]):
    name = f"move-{len(sampling)}"
    answers: dict[str, list[str]] = {}
    for session, moves in ((f"{name}-stays", False), (f"{name}-goes", True)):
        client = keyed(client.base_url)
        told = chat(client, [FACT], session, **sampling)
        answers[session] = [text(told)]
        for message in (QUESTION, COUNT, QUESTION):
            before = client.get(f"/v1/sessions/{session}").json()
            if moves:
                moved = client.post(f"/v1/sessions/{session}/migrate").json()
                assert moved["from"] == before["replica"] != moved["to"] and moved["hit"] == "peer"
                assert epoch(moved) > epoch(before)
            answer = turn(client, session, message, **sampling)
            answers[session].append(text(answer))
            assert answer["session"]["reused"] >= before["frontier"]
            if moves:
                assert answer["session"]["hit"] == "peer" and answer["meta_info"]["replica"] == moved["to"]
    assert answers[f"{name}-goes"] == answers[f"{name}-stays"]
    if not sampling:
        assert "4172" in answers[f"{name}-goes"][1]


def test_migrate_names_what_is_wrong(client: httpx.Client):
    chat(client, [FACT], "pinned")
    owner = client.get("/v1/sessions/pinned").json()["replica"]
    unknown = client.post("/v1/sessions/pinned/migrate", json={"to": "nobody"})
    assert unknown.status_code == 404 and "nobody" in unknown.json()["error"]["message"]
    same = client.post("/v1/sessions/pinned/migrate", json={"to": owner}).json()
    assert (same["to"], same["hit"]) == (owner, "device")
    assert client.post("/v1/sessions/unheard-of/migrate").status_code == 404


def test_fork_and_its_parent_go_their_own_ways(client: httpx.Client):
    chat(client, [FACT], "parent")
    forked = client.post("/v1/sessions/parent/fork", json={"id": "child"})
    assert forked.status_code == 200, forked.text
    assert client.post("/v1/sessions/parent/fork", json={"id": "child"}).status_code == 409
    turn(client, "child", {"role": "user", "content": "My locker code is 9531."})
    child, parent = turn(client, "child", QUESTION), turn(client, "parent", QUESTION)
    assert "9531" in text(child) and "4172" in text(parent)
    assert parent["session"]["reused"] >= forked.json()["frontier"]


def test_fork_of_the_past_says_what_its_parent_said_then_wherever_the_session_is_now(client: httpx.Client):
    how = {"temperature": 0.9, "seed": 11, "max_tokens": 12, "ignore_eos": True}
    first = chat(client, [FACT], "past")["meta_info"]["turn"]
    made = client.post("/v1/sessions/past/checkpoints", json={"name": "kept"})
    assert made.status_code == 200, made.text
    kept = made.json()
    assert (kept["name"], kept["turn"], kept["session"]) == ("kept", first, "past")
    said = text(turn(client, "past", QUESTION, **how))
    assert client.post("/v1/sessions/past/migrate").status_code == 200
    chat(client, [COUNT], "past")  # its history leaves both turns behind
    for place in ({"checkpoint": "kept"}, {"frontier": kept["frontier"]}):
        forked = client.post("/v1/sessions/past/fork", json=place)
        assert forked.status_code == 200, forked.text
        assert forked.json()["frontier"] == kept["frontier"]
        assert text(turn(client, forked.json()["id"], QUESTION, **how)) == said
    assert "kept" in [entry.get("name") for entry in client.get("/v1/sessions/past/checkpoints").json()["data"]]


def test_checkpoints_and_places_that_are_none_are_refused_by_name(client: httpx.Client):
    chat(client, [FACT], "places")
    asked = "/v1/sessions/places"
    last = turn(client, "places", QUESTION)["meta_info"]["turn"]
    assert client.post(f"{asked}/fork", json={"turn": last}).json()["object"] == "session.forked"
    for path, body, status, param in (
        ("fork", {"checkpoint": "x"}, 404, "checkpoint"),
        ("fork", {"turn": "x"}, 404, "turn"),
        ("fork", {"frontier": 1}, 404, "frontier"),
        ("fork", {"frontier": -1}, 400, "frontier"),
        ("fork", {"turn": last, "frontier": 1}, 400, "frontier"),
        ("fork", {"checkpoint": "x", "turn": last}, 400, "turn"),
        ("checkpoints", {"name": "a b"}, 400, "name"),
        ("checkpoints", {"name": "a/b"}, 400, "name"),
        ("checkpoints", {"title": "x"}, 400, "title"),
    ):
        refused = client.post(f"{asked}/{path}", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text
    made = client.post(f"{asked}/checkpoints").json()
    assert client.delete(f"{asked}/checkpoints/{made['name']}").json()["deleted"] is True
    assert client.delete(f"{asked}/checkpoints/{made['name']}").status_code == 404
    assert client.post("/v1/sessions/unheard-of/checkpoints").status_code == 404


def test_session_deleted_among_its_turns_refuses_them_by_name(url: str):
    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            headers = {"x-session-id": "torn"}
            await client.post("/v1/chat/completions", json={"messages": [FACT], **GREEDY}, headers=headers)
            turns = [client.post("/v1/sessions/torn/turns", json={"messages": [COUNT], **GREEDY}) for _ in range(3)]
            return list(await asyncio.gather(*turns, client.delete("/v1/sessions/torn")))

    *turns, deleted = asyncio.run(all_at_once())
    assert deleted.status_code == 200
    assert {response.status_code for response in turns} <= {200, 404, 409}


def test_deleted_session_is_unknown_and_its_name_is_free_again(client: httpx.Client):
    chat(client, [FACT], "gone")
    assert client.delete("/v1/sessions/gone").json()["deleted"] is True
    assert client.get("/v1/sessions/gone").status_code == 404
    assert client.delete("/v1/sessions/gone").status_code == 404
    assert client.post("/v1/sessions/gone/turns", json={"messages": [QUESTION]}).status_code == 404
    fresh = chat(client, [QUESTION], "gone")
    assert fresh["session"]["hit"] == "none" and "4172" not in text(fresh)


def test_tenants_do_not_see_each_others_sessions(client: httpx.Client):
    mine, theirs = {"authorization": "Bearer mine"}, {"authorization": "Bearer theirs"}
    body = {"messages": [FACT], **GREEDY}
    assert client.post("/v1/chat/completions", json=body, headers={**mine, "x-session-id": "diary"}).status_code == 200
    ask = {"messages": [QUESTION], **GREEDY}
    foreign = client.post("/v1/sessions/diary/turns", json=ask, headers=theirs)
    unknown = client.post("/v1/sessions/diary/turns", json=ask)
    assert foreign.status_code == unknown.status_code == 404 and foreign.json() == unknown.json()
    assert client.get("/v1/sessions/diary", headers=theirs).status_code == 404
    assert client.delete("/v1/sessions/diary", headers=theirs).status_code == 404
    assert client.get("/v1/sessions", headers=theirs).json()["data"] == []
    own = client.post("/v1/sessions/diary/turns", json=ask, headers=mine)
    assert "4172" in text(own.json())


def test_second_turn_while_one_runs_is_refused_and_disturbs_nothing(url: str):
    async def both() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {"messages": [COUNT], **GREEDY, "max_tokens": 200, "ignore_eos": True}
            headers = {"x-session-id": "contended"}
            calls = [client.post("/v1/chat/completions", json=body, headers=headers) for _ in range(2)]
            return list(await asyncio.gather(*calls))

    answers = sorted(asyncio.run(both()), key=lambda response: response.status_code)
    assert [response.status_code for response in answers] == [200, 409]
    assert answers[1].json()["error"]["code"] == "session_busy"
    assert answers[0].json()["usage"]["completion_tokens"] == 200


def test_turn_of_a_client_that_leaves_is_cancelled_and_keeps_what_was_committed(client: httpx.Client, url: str):
    body = {"messages": [COUNT], **GREEDY, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    seen = 0
    with client.stream("POST", "/v1/chat/completions", json=body, headers={"x-session-id": "left"}) as response:
        for line in response.iter_lines():
            seen += line.startswith("data: {")
            if seen == 5:
                break
    deadline = time.monotonic() + 20
    known: dict[str, Any] = {}
    while time.monotonic() < deadline:
        known = client.get("/v1/sessions/left").json()
        if known.get("turns") and known["running"] is None:
            break
        time.sleep(0.1)
    assert known["turns"][0]["finish_reason"] == "cancelled"
    assert 0 < known["turns"][0]["completion_tokens"] < 2900
    answer = turn(client, "left", FACT)
    assert answer["session"]["reused"] >= known["frontier"] and text(answer)


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("body", "headers", "status", "code", "param"),
    [
        ({"messages": []}, {}, 400, "invalid_request", "messages"),
        ({}, {}, 400, "invalid_request", "messages"),
        ({"messages": [FACT], "temperature": -1}, {}, 400, "invalid_request", "temperature"),
        ({"messages": [{"role": "user", "content": "word " * 6000}]}, {}, 400, "context_length_exceeded", "messages"),
        ({"messages": [FACT], "model": "other"}, {}, 404, "model_not_found", "model"),
        ({"messages": [FACT], "n": 9}, {}, 400, "invalid_request", "n"),
        ({"messages": [FACT], "n": 2}, {"x-session-id": "one"}, 400, "invalid_request", "n"),
        ({"messages": [FACT], "stop": [""]}, {}, 400, "invalid_request", "stop[0]"),
        ({"messages": [FACT], "tools": [{"type": "function"}]}, {}, 400, "invalid_request", "tools"),
        ({"messages": [FACT], "priority": "high"}, {}, 400, "invalid_request", "priority"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, {}, 400, "invalid_request", "messages[0].content"),
        ({"messages": [FACT]}, {"x-session-id": "two words"}, 400, "invalid_request", "x-session-id"),
        ({"messages": [FACT]}, REQUIRED, 404, "session_not_found", "session"),
        ({"messages": [FACT], "stream": True, "top_p": 2}, {}, 400, "invalid_request", "top_p"),
        ({"messages": [FACT], "\ud800": 1}, {}, 400, "invalid_request", "\\ud800"),
        ({"messages": [{**FACT, "x": 2**64}]}, {"x-session-id": "odd"}, 400, "invalid_request", "messages[0].x"),
        ({"messages": [FACT], "user": "x" * (9 << 20)}, {}, 413, "body_too_large", None),
    ],
)  # fmt: skip
def test_bad_request_gets_one_sentence_and_its_status(
    client: httpx.Client, body: dict[str, Any], headers: dict[str, str], status: int, code: str, param: str
):
    content = json.dumps(body).encode()
    response = client.post("/v1/chat/completions", content=content, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"]
    assert client.get("/health").json() == {"status": "ok", "replicas": 2}


def test_top_k_beyond_the_vocabulary_keeps_every_token(client: httpx.Client):
    sampling = {"temperature": 0.9, "top_p": 1.0, "seed": 3}
    assert text(chat(client, [COUNT], top_k=2**63, **sampling)) == text(chat(client, [COUNT], top_k=0, **sampling))


def test_too_long_a_prompt_is_told_both_counts_and_makes_no_session(client: httpx.Client):
    body = {"messages": [{"role": "user", "content": "word " * 6000}]}
    response = client.post("/v1/chat/completions", json=body, headers={"x-session-id": "too-long"})
    assert "4096" in response.json()["error"]["message"] and "6" in response.json()["error"]["message"]
    assert client.get("/v1/sessions/too-long").status_code == 404


def test_everything_that_is_no_request_gets_the_openai_error_shape(client: httpx.Client):
    broken = client.post("/v1/chat/completions", content=b"{")
    assert broken.status_code == 400 and "JSON" in broken.json()["error"]["message"]
    assert client.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert client.put("/v1/chat/completions").json()["error"]["code"] == "method_not_allowed"
    assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert client.get("/v1/sessions/unheard-of").json()["error"]["code"] == "session_not_found"


def test_a_scrape_has_both_replicas_their_host_store_and_what_was_refused(client: httpx.Client):
    page = client.get("/metrics").text
    assert "\ndflash_replicas 2.0\n" in page and page.count("\ndflash_replica_info{") == 2
    assert page.count("\ndflash_host_store_bytes{") == 1, "they are on one node"
    client.get("/v1/sessions/unheard-of")
    refused = re.compile(r'dflash_refusals_total{reason="session_not_found",when="before"} (\S+)')
    before, after = (refused.search(text) for text in (page, client.get("/metrics").text))
    assert after is not None and float(after[1]) == 1 + (float(before[1]) if before is not None else 0)


# ------------------------------------------------------------------------------------------------ deaths


def test_session_is_exported_and_goes_on_elsewhere_as_another_tenants_own(client: httpx.Client):
    client = keyed(client.base_url)
    chat(client, [FACT], "travelling")
    exported = client.get("/v1/sessions/travelling/export")
    assert exported.status_code == 200 and exported.content.startswith(b"\x89DFS")
    theirs = {"authorization": "Bearer somebody-else"}
    assert client.get("/v1/sessions/travelling/export", headers=theirs).status_code == 404
    arrived = client.post("/v1/sessions/import", content=exported.content, headers=theirs, params={"id": "arrived"})
    assert arrived.status_code == 200, arrived.text
    body = {"messages": [QUESTION], **GREEDY}
    answers = [
        client.post("/v1/sessions/travelling/turns", json=body).json(),
        client.post("/v1/sessions/arrived/turns", json=body, headers=theirs).json(),
    ]
    assert "4172" in text(answers[1]) and text(answers[0]) == text(answers[1])
    assert answers[1]["session"]["hit"] == "disk" and answers[1]["session"]["reused"] == answers[0]["session"]["reused"]
    assert client.get("/v1/sessions/arrived").status_code == 404, "it belongs to the key that imported it"
    again = client.post("/v1/sessions/import", content=exported.content)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "session_exists")
    damaged = client.post("/v1/sessions/import", content=exported.content[:-1], params={"id": "new"})
    assert (damaged.status_code, damaged.json()["error"]["code"]) == (400, "bad_state")
    assert client.get("/v1/sessions/new").status_code == 404


def test_directory_that_was_killed_is_rebuilt_from_the_host_stores(client: httpx.Client):
    chat(client, [FACT], "remembered")
    before = client.get("/v1/sessions/remembered").json()
    directory = ray.get_actor(directory_name("dflash"), NAMESPACE)
    ray.kill(directory, no_restart=False)
    answer = turn(client, "remembered", QUESTION)
    assert "4172" in text(answer) and answer["session"]["reused"] >= before["frontier"]
    other = client.post("/v1/sessions/remembered/migrate").json()
    assert epoch(other)[0] > epoch(before)[0]


def test_directory_that_dies_with_the_host_store_learns_from_the_owner(client: httpx.Client):
    chat(client, [FACT], "twice-struck")
    before = client.get("/v1/sessions/twice-struck").json()
    node = ray.get_runtime_context().get_node_id()
    for name in (directory_name("dflash"), store_name("dflash", node)):
        ray.kill(ray.get_actor(name, NAMESPACE), no_restart=False)
    answer = turn(client, "twice-struck", QUESTION)
    assert "4172" in text(answer) and answer["session"]["reused"] >= before["frontier"]
    assert answer["meta_info"]["replica"] == before["replica"]
    assert client.get("/v1/sessions/twice-struck").json()["copies"]


def ask_under_key(client: httpx.Client, number: int) -> Any:
    body = {"messages": [FACT], **GREEDY, "max_tokens": 4}
    return client.post("/v1/chat/completions", json=body, headers={"idempotency-key": f"order-{number}"}).json()


def test_killed_replicas_session_goes_on_elsewhere_like_one_that_was_undisturbed(client: httpx.Client):
    sampled = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "seed": 5}
    undisturbed, killed, number, done = [], [], 0, {}
    for session, answers in (("calm", undisturbed), ("struck", killed)):
        client = keyed(client.base_url)
        answers.append(text(chat(client, [FACT], session)))
        answers.append(text(turn(client, session, QUESTION)))
        if session == "struck":
            before = client.get("/v1/sessions/struck").json()
            done = ask_under_key(client, number)
            while done["meta_info"]["replica"] != before["replica"]:
                done = ask_under_key(client, number := number + 1)
            os.kill(replicas(client)[before["replica"]], signal.SIGKILL)
        for message, sampling in ((QUESTION, {}), (COUNT, sampled), (QUESTION, {})):
            answer = turn(client, session, message, **sampling)
            answers.append(text(answer))
            if session == "struck" and len(answers) == 3:
                assert answer["meta_info"]["replica"] != before["replica"]
                assert answer["session"]["hit"] == "host" and answer["session"]["reused"] >= before["frontier"]
                assert epoch(answer["session"]) > epoch(before)
    assert killed == undisturbed and "4172" in killed[2]
    again = ask_under_key(client, number)
    assert (again["id"], text(again)) == (done["id"], text(done)), "a turn without a session is found again by its key"
    wait_for_two(client, without=before["replica"])


# ------------------------------------------------------------------------------------------------ in mid-stream

LONG: dict[str, Any] = {"max_tokens": 160, "ignore_eos": True, "temperature": 0.9, "top_k": 0, "top_p": 1.0, "seed": 5}


def streamed(
    client: httpx.Client, session: str | None, strike: Callable[[str], None], **body: Any
) -> tuple[str, list[str]]:
    """Text and event ids of a turn, in the middle of which `strike` is given its replica."""
    headers = {"x-session-id": session} if session else {}
    body = {"messages": [COUNT], "stream": True, **LONG, **body}
    got, ids, done, seen = [], [], False, 0
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("id: "):
                ids.append(line.removeprefix("id: "))
            elif line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                got.append("".join(choice["delta"].get("content", "") for choice in chunk["choices"]))
                seen += 1
                if seen == 8:
                    strike(chunk["meta_info"]["replica"] if "meta_info" in chunk else replica_of(client, session))
    assert done
    positions = [int(place.split(".")[-2]) for place in ids]
    assert positions == sorted(positions)
    return "".join(got), ids


def replica_of(client: httpx.Client, session: str | None) -> str:
    """The one that runs a turn now."""
    if session is not None:
        return client.get(f"/v1/sessions/{session}").json()["replica"]
    (busy,) = (entry["id"] for entry in client.get("/v1/replicas").json()["data"] if entry["running"])
    return busy


@pytest.fixture(scope="module")
def expected(url: str) -> str:
    """The answer that nobody disturbs."""
    with keyed(url) as other:
        return streamed(other, None, lambda replica: None)[0]


@pytest.mark.parametrize("session", ["cut", None], ids=["session", "no session"])
def test_a_stream_whose_replica_is_killed_goes_on_by_itself_with_the_same_text(
    client: httpx.Client, expected: str, session: str | None
):
    pids, struck = replicas(client), []

    def kill(replica: str) -> None:
        struck.append(replica)
        os.kill(pids[replica], signal.SIGKILL)

    got, ids = streamed(client, session, kill)
    assert got == expected and len({place.split(".")[0] for place in ids}) == 1
    if session is not None:
        known = client.get(f"/v1/sessions/{session}").json()
        assert known["replica"] != struck[0] and known["transcript"][-1]["content"] == expected
    wait_for_two(client, without=struck[0])


def test_a_running_turn_is_migrated_and_its_stream_does_not_break(client: httpx.Client, expected: str):
    moves = []

    def migrate(replica: str) -> None:
        moved = client.post("/v1/sessions/wanders/migrate")
        assert moved.status_code == 200, moved.text
        moves.append((moved.json()["from"], moved.json()["to"]))

    got, _ = streamed(client, "wanders", migrate)
    assert got == expected
    ((source, target),) = moves
    known = client.get("/v1/sessions/wanders").json()
    assert source != target == known["replica"] and known["turns"][-1]["replica"] == target


@pytest.mark.parametrize("what", ["directory", "host store"])
def test_a_stream_goes_on_while_directory_or_host_store_restarts(client: httpx.Client, expected: str, what: str):
    node = ray.get_runtime_context().get_node_id()
    name = directory_name("dflash") if what == "directory" else store_name("dflash", node)
    got, _ = streamed(
        client, what.replace(" ", "-"), lambda replica: ray.kill(ray.get_actor(name, NAMESPACE), no_restart=False)
    )
    assert got == expected


def test_a_session_deleted_in_mid_stream_is_unknown_at_once(client: httpx.Client):
    body = {"messages": [COUNT], "stream": True, **LONG, "max_tokens": 3000}
    with client.stream("POST", "/v1/chat/completions", json=body, headers={"x-session-id": "dropped"}) as response:
        lines = response.iter_lines()
        for _ in range(9):
            next(lines)
        assert client.delete("/v1/sessions/dropped").status_code == 200
        assert client.get("/v1/sessions/dropped").status_code == 404
        assert client.post("/v1/sessions", json={"id": "dropped"}).status_code == 200, "its name is free"
        rest = [line for line in lines if line.startswith("data: {")]
    assert '"finish_reason":"abort"' in rest[-1] or "error" in rest[-1], rest[-1]
