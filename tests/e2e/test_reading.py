"""The chaos tests' client: which refusals it asks again after, and which ones nobody may ever meet."""

from __future__ import annotations

import json

import httpx
import pytest

from deployment.event_ids import EventId, digest_of
from tests.e2e.chaos.nodes import ROOT
from tests.e2e.chaos.reading import PASSING, Answer, Refusal, Unanswered, asked, take

TURN = "a" * 32


def answered(status: int, body: object) -> httpx.Response:
    return httpx.Response(status, text=body) if isinstance(body, str) else httpx.Response(status, json=body)


def error(code: str) -> dict[str, object]:
    return {"error": {"code": code, "message": "why"}}


@pytest.mark.parametrize(
    ("response", "code", "passes", "fault"),
    [
        (answered(503, error("session_unavailable")), "session_unavailable", True, False),
        (answered(409, error("session_busy")), "session_busy", True, False),
        (answered(500, "Internal Server Error"), "no_ingress", True, True),
        (answered(503, "Deployment 'Ingress' is unavailable"), "no_ingress", True, True),
        (answered(500, error("internal_error")), "internal_error", False, True),
        (answered(502, "<html>"), "unreadable", False, True),
        (answered(404, error("session_not_found")), "session_not_found", False, False),
        (answered(409, error("turn_cancelled")), "turn_cancelled", False, False),
    ],
)
def test_refusal_is_asked_again_gives_up_or_is_a_flaw(response: httpx.Response, code: str, passes: bool, fault: bool):
    refusals: list[Refusal] = []
    answers = iter((response, httpx.Response(200)))
    with httpx.Client(transport=httpx.MockTransport(lambda _: next(answers)), base_url="http://here") as client:
        if passes:
            assert asked(client, "GET", "/v1/models", refusals=refusals).status_code == 200
        else:
            with pytest.raises(Unanswered):
                asked(client, "GET", "/v1/models", refusals=refusals)
    assert [(refusal.code, refusal.is_fault([])) for refusal in refusals] == [(code, fault)]


def test_only_where_the_ingress_was_killed_may_the_proxy_answer_for_it():
    at = 1000.0
    refusal = Refusal(500, "no_ingress", "Internal Server Error", at)
    assert not refusal.is_fault([0.0, at - 1])
    assert refusal.is_fault([0.0, at + 1]) and refusal.is_fault([at - 60])
    assert Refusal(500, "internal_error", "", at).is_fault([at - 1])


def test_codes_that_say_ask_again_are_ones_that_the_interface_has():
    errors = (ROOT / "docs/http.md").read_text().split("## Errors")[1]
    assert all(f"`{code}`" in errors for code in PASSING - {"no_ingress"})


def test_a_stream_that_ends_with_a_fault_of_the_server_is_no_break_to_resume_after():
    first = EventId(TURN, 3, digest_of(()))
    chunk = {"choices": [{"logprobs": None, "delta": {}, "finish_reason": None}]}
    lines = f"id: {first}\ndata: {json.dumps(chunk)}\n\ndata: {json.dumps(error('internal_error'))}\n\n"
    stream = httpx.Response(200, text=lines, headers={"x-replica": "one"})
    answers, answer = iter((stream, answered(404, error("turn_not_found")))), Answer()
    with (
        httpx.Client(transport=httpx.MockTransport(lambda _: next(answers)), base_url="http://here") as client,
        pytest.raises(Unanswered),
    ):
        take(client, "/v1/chat/completions", "s", {}, None, answer)
    assert [refusal.code for refusal in answer.refusals] == ["internal_error"] and answer.turn == TURN
