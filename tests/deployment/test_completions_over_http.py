"""Text completions, tokens and versions over HTTP, as evaluation suites and load generators ask for them."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from deployment.replica import EngineReplica
from deployment.replica_watch import SILENT_SECONDS
from deployment.request_reading import MAX_BODY_BYTES
from model.tokenizer import Tokenizer
from tests.deployment.serving import serving

TEXT = "3, 5, 7, 9, caf\u00e9 \U0001f388, 11"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def complete(client: httpx.Client, prompt: Any, **body: Any) -> Any:
    answer = client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens(client: httpx.Client, text: str) -> list[int]:
    return client.post("/tokenize", json={"prompt": text}).json()["tokens"]


def test_a_prompts_figures_are_those_that_its_tokens_had_when_they_were_drawn(client: httpx.Client):
    prompt = tokens(client, TEXT)
    drawn = complete(client, prompt, max_tokens=12, logprobs=1, ignore_eos=True)["choices"][0]
    text = drawn["logprobs"]["tokens"]
    ids = [*prompt, *drawn_ids(client, prompt, 12)]
    scored = complete(client, ids, echo=True, logprobs=1, max_tokens=1)["choices"][0]["logprobs"]
    assert len(scored["token_logprobs"]) == len(ids) + 1 and scored["token_logprobs"][0] is None
    assert scored["top_logprobs"][0] is None and scored["tokens"][len(prompt) : -1] == text
    assert scored["token_logprobs"][len(prompt) : -1] == pytest.approx(drawn["logprobs"]["token_logprobs"], abs=1e-4)
    # how lm-eval tells a greedy continuation: each token is the best alternative
    continuation = slice(len(prompt), -1)
    pairs = zip(scored["token_logprobs"][continuation], scored["top_logprobs"][continuation], strict=True)
    assert all(logprob == max(top.values()) for logprob, top in pairs)


def test_processed_figures_are_those_of_what_the_filters_leave(client: httpx.Client):
    def told(**how: Any) -> list[dict[str, float]]:
        body = {"temperature": 1.5, "seed": 3, "top_k": 2, "max_tokens": 12, "logprobs": 4, "ignore_eos": True, **how}
        return complete(client, "One day", **body)["choices"][0]["logprobs"]["top_logprobs"]

    raw, processed = told(), told(logprobs_mode="processed_logprobs")
    assert all(len(top) == 4 for top in raw) and all(len(top) == 2 for top in processed)
    assert all(sum(map(math.exp, top.values())) == pytest.approx(1, abs=1e-4) for top in processed)


def drawn_ids(client: httpx.Client, prompt: list[int], count: int) -> list[int]:
    """The greedy continuation one token at a time, by the only alternative that has its text."""
    ids: list[int] = []
    for _ in range(count):
        answer = complete(client, [*prompt, *ids], max_tokens=1, ignore_eos=True)["choices"][0]["text"]
        ids += tokens(client, answer)
    return ids


def test_echo_tells_the_prompt_before_the_answer_whole_and_streamed(client: httpx.Client):
    plain = complete(client, TEXT, max_tokens=6)["choices"][0]["text"]
    assert complete(client, TEXT, max_tokens=6, echo=True)["choices"][0]["text"] == TEXT + plain
    api = openai.OpenAI(base_url=f"{client.base_url}".rstrip("/") + "/v1", api_key="none", max_retries=0)
    chunks = api.completions.create(model="demo", prompt=TEXT, max_tokens=6, echo=True, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == TEXT + plain


def test_no_tokens_are_generated_where_none_are_wanted(client: httpx.Client):
    text = "3, 5, 7, 9"
    answer = complete(client, text, max_tokens=0, echo=True, logprobs=0)
    (choice,) = answer["choices"]
    assert choice["text"] == text and answer["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["token_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert choice["logprobs"]["text_offset"][-1] == len(text) - len(choice["logprobs"]["tokens"][-1])


def test_the_answer_of_a_text_completion_has_the_format_that_was_asked_for(client: httpx.Client):
    asked = {"type": "json_schema", "json_schema": {"schema": {"enum": ["Rome", "Oslo"]}}}
    choice = complete(client, TEXT, response_format=asked, max_completion_tokens=30)["choices"][0]
    assert json.loads(choice["text"]) in ("Rome", "Oslo") and choice["finish_reason"] == "stop"
    assert complete(client, TEXT, max_completion_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_several_prompts_have_their_answers_in_order(client: httpx.Client):
    prompts = [tokens(client, text) for text in ("3, 5, 7,", "One day", "2, 4, 6,", "Once")]
    alone = [complete(client, prompt, max_tokens=5) for prompt in prompts]
    began = time.monotonic()
    together = complete(client, prompts, max_tokens=5)
    assert time.monotonic() - began < SILENT_SECONDS, "one was not heard of, and asked for again"
    assert [choice["text"] for choice in together["choices"]] == [one["choices"][0]["text"] for one in alone]
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    assert together["usage"]["total_tokens"] == sum(one["usage"]["total_tokens"] for one in alone)
    twice = complete(client, ["a", "b"], max_tokens=2, n=2, temperature=1)
    assert [choice["index"] for choice in twice["choices"]] == [0, 1, 2, 3]


def test_one_prompt_that_is_refused_refuses_all(client: httpx.Client):
    answer = client.post("/v1/completions", json={"prompt": ["a", ""], "max_tokens": 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_usage_comes_in_each_chunk_for_who_asks(client: httpx.Client):
    body = {"messages": [{"role": "user", "content": "Count from 3 to 9."}], "stream": True, "temperature": 0}
    options = {"include_usage": True, "continuous_usage_stats": True}
    api = openai.OpenAI(base_url=f"{client.base_url}".rstrip("/") + "/v1", api_key="none", max_retries=0)
    chunks = list(api.chat.completions.create(model="demo", **body, stream_options=options))  # pyright: ignore
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 < counts[-1]


def test_usage_comes_in_each_chunk_for_who_follows_a_turn_too(client: httpx.Client):
    body = {"messages": [{"role": "user", "content": "Count from 3 to 9."}], "temperature": 0}
    turn = client.post("/v1/chat/completions", json=body, headers={"x-session-id": "used"}).headers["x-turn-id"]

    def told(**asked: Any) -> list[Any]:
        stream = client.get(f"/v1/sessions/used/turns/{turn}/events", params=asked).text
        events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
        return [json.loads(event).get("usage") for event in events]

    *each, whole = told(include_usage=True, continuous_usage_stats=True)
    counts = [usage["completion_tokens"] for usage in each]
    assert counts == sorted(counts) and counts[0] == 0 < counts[-1] == whole["completion_tokens"]
    assert told(include_usage=True) == [*[None] * len(each), whole]
    assert told(continuous_usage_stats=True) == [None] * len(each)


def test_thinking_is_counted(client: httpx.Client):
    body = {"messages": [{"role": "user", "content": "What is my locker code?"}], "temperature": 0, "max_tokens": 120}
    used = [
        client.post("/v1/chat/completions", json={**body, "reasoning_effort": effort}).json()["usage"]
        for effort in ("high", "none")
    ]
    thought = [one["completion_tokens_details"]["reasoning_tokens"] for one in used]
    assert 0 < thought[0] < used[0]["completion_tokens"] and thought[1] == 0


def test_the_final_message_goes_on_in_place_inside_its_thinking_too(client: httpx.Client):
    ask = {"role": "user", "content": "Count from 3 in steps of 2, 12 numbers."}

    def answer(*messages: Any, **body: Any) -> Any:
        whole = {"messages": messages, "temperature": 0, **body}
        return client.post("/v1/chat/completions", json=whole).json()["choices"][0]["message"]

    on = {"continue_final_message": True, "add_generation_prompt": False}
    rest = answer(ask, {"role": "assistant", "content": "3, 5, 7, 9,"}, **on)
    assert "3, 5, 7, 9," + rest["content"] == answer(ask)["content"]
    question = {"role": "user", "content": "What is my locker code?"}
    whole = answer(question, reasoning_effort="high")
    begun = whole["reasoning_content"][: len(whole["reasoning_content"]) // 2].rpartition(" ")[0]
    more = answer(question, {"role": "assistant", "content": "", "reasoning_content": begun}, **on)
    assert begun + more["reasoning_content"] == whole["reasoning_content"] and more["content"] == whole["content"]


def test_a_conversation_is_tokenised_as_a_turn_has_it_and_tokens_become_their_text_again(client: httpx.Client):
    messages = [{"role": "user", "content": "Count from 3 to 9."}]
    encoded = client.post("/tokenize", json={"messages": messages, "return_token_strs": True}).json()
    answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert encoded["count"] == len(encoded["tokens"]) == answer["usage"]["prompt_tokens"]
    text = client.post("/detokenize", json={"tokens": encoded["tokens"]}).json()["prompt"]
    assert text == "".join(encoded["token_strs"]) and text.startswith("<|im_start|>user\nCount")
    assert client.post("/detokenize", json={"tokens": tokens(client, TEXT)}).json() == {"prompt": TEXT}
    assert encoded["max_model_len"] == client.get("/v1/models/demo").json()["max_model_len"]
    wrong = client.post("/detokenize", json={"tokens": [1 << 30]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")


def test_a_server_tells_its_version(client: httpx.Client):
    assert client.get("/version").json()["version"]


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("completions", {"prompt": ["a", "b"], "stream": True}, "stream"),
        ("completions", {"prompt": "a", "suffix": "x"}, "suffix"),
        ("completions", {"prompt": "a", "best_of": 2}, "best_of"),
        ("completions", {"prompt": ["a", 3]}, "prompt"),
        ("chat/completions", {"guided_json": {}}, "guided_json"),
        ("chat/completions", {"cache_salt": "x"}, "cache_salt"),
        ("chat/completions", {"continue_final_message": True}, "continue_final_message"),
        ("chat/completions", {"add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client: httpx.Client, path: str, change: Any, param: str):
    body = {"messages": [{"role": "user", "content": "x"}], **change} if path.startswith("chat") else change
    answer = client.post(f"/v1/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_what_nobody_knows_is_ignored(client: httpx.Client):
    assert complete(client, "3, 5,", max_tokens=2, provider={"order": []}, return_meta_info=True)["meta_info"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"prompt": "a", "model": "gpt"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "model": "gpt"}, 404, "model"),
        ("/detokenize", {"tokens": [1], "model": "gpt"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "prompt"),
        (
            "/tokenize", {"messages": [{"role": "user", "content": "a"}], "return_token_strs": "yes"},
            400, "return_token_strs",
        ),
    ],
)  # fmt: skip
def test_what_is_to_be_tokenised_is_one_thing_and_of_the_model_that_is_served(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, param: str
):
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


# ------------------------------------------------------------------------------------------------ what is told at most


def test_a_text_to_tokenise_has_the_limit_of_any_body_without_media(client: httpx.Client):
    answer = client.post("/tokenize", json={"prompt": "a" * MAX_BODY_BYTES})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("body", [{"prompt": "3, 5, 7"}, {"messages": [{"role": "user", "content": "3, 5, 7"}]}])
def test_more_tokens_than_are_told_are_counted_and_refused(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
):
    count = client.post("/tokenize", json=body).json()["count"]
    monkeypatch.setattr("deployment.replica.MOST_TOLD_IDS", count)
    assert client.post("/tokenize", json=body).status_code == 200
    monkeypatch.setattr("deployment.replica.MOST_TOLD_IDS", count - 1)
    answer = client.post("/tokenize", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert f"{count} tokens" in answer.json()["error"]["message"] and answer.json()["error"]["param"] in body


def test_tokens_are_spelled_only_for_who_asks_and_where_no_stream_waits_for_it(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
):
    loops: set[int] = set()
    spelling: set[int] = set()
    encode, spelled = EngineReplica.encode, Tokenizer.spelled

    async def encoded(*asked: Any) -> Any:
        loops.add(threading.get_ident())
        return await encode(*asked)

    def told(tokenizer: Tokenizer, token: int) -> bytes:
        spelling.add(threading.get_ident())
        return spelled(tokenizer, token)

    monkeypatch.setattr(EngineReplica, "encode", encoded)
    monkeypatch.setattr(Tokenizer, "spelled", told)
    ids = tokens(client, TEXT)
    assert not spelling
    assert client.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()["tokens"] == ids
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": TEXT}
    assert spelling and loops and not spelling & loops
