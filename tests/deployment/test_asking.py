"""What a request says beside its text: who asks, for which session, under which key, and for which work."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request

from deployment.body_reading import parse
from deployment.completion_schema import CompletionBody
from deployment.errors import RequestError
from deployment.hints import hint_of
from deployment.ownership import SessionKey
from deployment.request_reading import MAX_KEY, Asking, asking_of, completion_requests, turn_request
from deployment.schemas import TurnBody
from deployment.turn_records import canonical_request, request_sha256
from state.fields import Fields
from state.session_manifest import parse_session, session_fields
from state.session_record import SessionRecord
from tests.state.samples import TURN

ANYBODY = hashlib.sha256(b"").hexdigest()
UUID = "0a1b2c3d-1111-2222-3333-445566778899"
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


def request(headers: dict[str, str]) -> Request:
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw, "state": {"tenant": ANYBODY}})


def asking(headers: dict[str, str], body: Any = None, key: SessionKey | None = None) -> Asking:
    return asking_of(request(headers), body or {}, key)


# ------------------------------------------------------------------------------------------------ hints


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, {"prompt_cache_key": UUID}),
        ({"X-Claude-Code-Session-Id": UUID}, {}),
        ({"session_id": UUID}, {}),
        ({"x-opencode-session": UUID}, {"metadata": {"user_id": "u"}}),
        ({}, {"metadata": {"session_id": UUID}}),
        ({}, {"metadata": {"user_id": f"user_{'9' * 64}_account_{UUID[::-1]}_session_{UUID}"}}),
        ({}, {"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": UUID})}}),
        ({"x-claude-code-session-id": "other"}, {"prompt_cache_key": UUID}),
    ],
)
def test_an_agents_own_name_for_its_conversation_is_a_hint(headers: dict[str, str], body: dict[str, Any]):
    asked = asking(headers, {**MESSAGES, **body})
    assert asked.hint == UUID and asked.key is None and asked.idempotency_key is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt_cache_key": ""},
        {"prompt_cache_key": 7},
        {"metadata": "x"},
        {"metadata": {"user_id": "me"}},
        {"metadata": {"user_id": "{"}},
        {"metadata": {"user_id": "[1]"}},
        {"metadata": {"user_id": '{"session_id": 3}'}},
        {"metadata": {"user_id": "user_1_session_not-a-uuid"}},
    ],
)
def test_what_names_no_conversation_is_no_hint_and_no_error(body: dict[str, Any]):
    assert hint_of({}, body) is None
    assert parse(TurnBody, {**MESSAGES, **body}).messages


def test_a_hint_of_more_than_128_characters_is_hashed_and_one_of_128_is_not():
    assert hint_of({}, {"prompt_cache_key": "x" * 128}) == "x" * 128
    assert hint_of({}, {"prompt_cache_key": "ü" * 129}) == hashlib.sha256(("ü" * 129).encode()).hexdigest()


def test_an_explicit_session_needs_no_hint():
    asked = asking({"x-session-id": "mine"}, {"prompt_cache_key": "agent"})
    assert (asked.key, asked.hint) == (SessionKey(ANYBODY, "mine"), None)


# ------------------------------------------------------------------------------------------------ keys, retries


@pytest.mark.parametrize(
    ("headers", "repeated"),
    [
        ({}, False),
        ({"x-stainless-retry-count": "0"}, False),
        ({"x-stainless-retry-count": "2"}, True),
        ({"x-session-retry": "1"}, True),
        ({"x-session-retry": "0", "x-stainless-retry-count": "00"}, False),
    ],
)
def test_a_client_says_that_it_tries_again(headers: dict[str, str], repeated: bool):
    assert asking(headers).repeated is repeated


def test_the_longest_key_that_is_taken_has_room_in_its_sessions_document():
    turn = replace(TURN, idempotency_key=asking({"Idempotency-Key": "x" * MAX_KEY}).idempotency_key)
    kept = parse_session(Fields(session_fields(SessionRecord("s", (), turns=(turn,))), "manifest"))
    assert kept.turns == (turn,)


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"Idempotency-Key": ""}, "Idempotency-Key"),
        ({"Idempotency-Key": "two words"}, "Idempotency-Key"),
        ({"Idempotency-Key": "x" * 256}, "Idempotency-Key"),
        ({"x-session-retry": "yes"}, "x-session-retry"),
        ({"x-stainless-retry-count": "-1"}, "x-stainless-retry-count"),
        ({"x-stainless-retry-count": "²"}, "x-stainless-retry-count"),
        ({"x-session-require": "existing"}, "x-session-require"),
        ({"x-session-require": "new", "x-session-id": "s"}, "x-session-require"),
        ({"x-session-id": "two words"}, "x-session-id"),
    ],
)
def test_a_header_that_cannot_be_meant_is_refused_by_name(headers: dict[str, str], param: str):
    with pytest.raises(RequestError) as caught:
        asking(headers)
    assert (caught.value.refused.status, caught.value.refused.param) == (400, param)


def test_who_asks_and_how_changes_neither_a_turns_digest_nor_its_record():
    body = parse(TurnBody, {**MESSAGES, "temperature": 0.5})
    plain = turn_request(body, "history", Asking("t"))
    marked = turn_request(body, "history", Asking("u", SessionKey("u", "s"), True, "k", True, "h"))
    assert request_sha256(plain) == request_sha256(marked) and canonical_request(marked) == {"temperature": 0.5}
    assert len(plain.turn) == 32 and int(plain.turn, 16) >= 0 and plain.turn != marked.turn


# ------------------------------------------------------------------------------------------------ text completions


@pytest.mark.parametrize(
    ("prompt", "read"), [("Hi", "Hi"), (["Hi"], "Hi"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ("", "")]
)
def test_a_completions_prompt_is_text_or_ids_alone_or_in_a_list(prompt: Any, read: Any):
    body = parse(CompletionBody, {"prompt": prompt, "echo": False, "best_of": 1, "suffix": None, "logprobs": 2})
    (asked,) = completion_requests(body, Asking("t"))
    assert (asked.mode, asked.prompt, asked.max_tokens, asked.logprobs, asked.messages) == ("prompt", read, 16, 2, ())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": "x", "echo": 1}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ],
)
def test_what_a_completion_cannot_be_asked_is_refused_by_name(body: dict[str, Any], param: str):
    with pytest.raises(RequestError) as caught:
        parse(CompletionBody, body)
    assert caught.value.refused.status == 400 and (caught.value.refused.param or "").startswith(param)


def test_a_completion_belongs_to_no_session():
    body = parse(CompletionBody, {"prompt": "x"})
    with pytest.raises(RequestError) as caught:
        completion_requests(body, Asking("t", SessionKey("t", "s")))
    assert caught.value.refused.param == "x-session-id"


def test_each_prompt_of_a_completion_is_a_turn_that_a_retry_finds_again():
    body = parse(CompletionBody, {"prompt": [[1, 2], [3]], "max_tokens": 0})
    first, second = (completion_requests(body, Asking("t", idempotency_key="k")) for _ in range(2))
    assert [(turn.prompt, turn.max_tokens) for turn in first] == [((1, 2), 1), ((3,), 1)]
    assert [turn.idempotency_key for turn in first] == [turn.idempotency_key for turn in second]
    assert len({turn.idempotency_key for turn in first}) == len({turn.turn for turn in first}) == 2


def test_the_key_of_a_further_prompt_is_none_that_a_client_can_choose_and_not_longer():
    body = parse(CompletionBody, {"prompt": ["x"] * 12})
    keys = ["kk", "kk.1", "x" * MAX_KEY, "x" * (MAX_KEY - 1)]
    made = [
        turn.idempotency_key for key in keys for turn in completion_requests(body, Asking("t", idempotency_key=key))
    ]
    assert len(set(made)) == len(made) == 12 * len(keys)
    for key in set(made) - set(keys):
        assert key is not None and len(key) <= MAX_KEY
        with pytest.raises(RequestError):
            asking({"Idempotency-Key": key})


def test_a_score_counts_an_end_token_too_and_nothing_else_does():
    def ignores(**body: Any) -> bool:
        return completion_requests(parse(CompletionBody, {"prompt": "x", **body}), Asking("t"))[0].ignore_eos

    assert ignores(echo=True, logprobs=1, max_tokens=1) and ignores(echo=True, logprobs=0, max_tokens=0)
    assert not ignores(echo=True, logprobs=1, max_tokens=2) and not ignores(logprobs=1, max_tokens=1)
