"""Answers of the demo model on a real Ray cluster, and refusals of what is no request."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import anthropic
import httpx
import openai
import pytest

from deployment.replica_watch import SILENT_SECONDS
from tests.e2e.cluster import COUNT, FACT, QUESTION, chat, text


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


def test_prompts_of_one_request_reach_replicas_side_by_side(client: httpx.Client):
    """Through Serve, to whose router they all have the id of their request. One that is not heard of is asked for
    again only after a time that no slow machine takes thrice."""
    took: list[float] = []
    for _ in range(3):
        began = time.monotonic()
        choices = client.post("/v1/completions", json={"prompt": ["3, 5, 7,"] * 8, "max_tokens": 2}).json()["choices"]
        took.append(time.monotonic() - began)
        assert [choice["index"] for choice in choices] == list(range(8))
    assert min(took) < SILENT_SECONDS, took


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


# ------------------------------------------------------------------------------------------------ bad input


REQUIRED = {"x-session-id": "never-seen", "x-session-require": "existing"}


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
