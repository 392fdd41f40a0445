"""Turns that are retried, followed and left, on a real cluster: nothing is run twice, lost, repeated or mixed up."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import httpx2
import openai
import pytest

from tests.e2e.cluster import COUNT, FACT, GREEDY, QUESTION, chat, keyed, text, turn
from tests.e2e.two_replicas.streams import LONG, SAMPLED, alone, asking, following, read, streaming, until_idle

# ------------------------------------------------------------------------------------------------ followed


@pytest.mark.parametrize("events", [1, 7])
def test_a_broken_stream_goes_on_after_its_last_event_token_for_token(client: httpx.Client, events: int):
    expected, name = alone(client, **SAMPLED), f"broken-{events}"
    with asking(client, name, **SAMPLED) as lines:
        seen = read(lines, events)
    assert len(seen.ids) == events and not seen.done
    rest = following(client, name, seen.turn, headers={"last-event-id": seen.ids[-1]})
    assert (
        seen.text + rest.text == expected and rest.done and rest.chunks[-1]["choices"][0]["finish_reason"] == "length"
    )
    assert {chunk["id"] for chunk in (*seen.chunks, *rest.chunks)} == {f"chatcmpl-{seen.turn}"}
    assert not set(rest.ids[:-3]) & set(seen.ids)
    over = following(client, name, seen.turn, params={"after": seen.ids[-1], "include_usage": True})
    assert over.text == rest.text and over.chunks[-1]["usage"]["completion_tokens"] == 40
    assert following(client, name, seen.turn).text == expected
    assert until_idle(client, name)["turns"][0]["finish_reason"] == "length"


def test_two_clients_of_a_session_read_one_turn_and_a_left_turn_makes_way(client: httpx.Client):
    with asking(client, "shared", **LONG) as lines:
        first = read(lines, 3)
        busy = client.post("/v1/sessions/shared/turns", json={"messages": [QUESTION], **GREEDY})
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "session_busy")
        assert f"/v1/sessions/shared/turns/{first.turn}/events" in busy.json()["error"]["message"]
        listed = client.get("/v1/sessions/shared/turns").json()["data"]
        assert listed == [{"id": first.turn, "object": "session.turn", "status": "running"}]
        with streaming(client, "GET", f"/v1/sessions/shared/turns/{first.turn}/events") as others:
            second = read(others, 6)
        assert second.ids[:3] == first.ids and second.text.startswith(first.text)
    answer = turn(client, "shared", FACT)
    known = client.get("/v1/sessions/shared").json()
    assert [entry["finish_reason"] for entry in known["turns"]] == ["cancelled", "stop"]
    assert known["transcript"][1]["content"].startswith(second.text), "what was read stays"
    assert answer["session"]["hit"] == "device" and answer["meta_info"]["turn"] == known["turns"][1]["id"]


def test_a_turn_that_nobody_reads_ends_after_its_time(client: httpx.Client):
    begun = time.monotonic()
    with asking(client, "left", **LONG) as lines:
        seen = read(lines, 2)
    time.sleep(1)
    assert client.get("/v1/sessions/left").json()["running"] == seen.turn
    (record,) = until_idle(client, "left")["turns"]
    assert record["finish_reason"] == "cancelled" and time.monotonic() - begun > 2
    over = following(client, "left", seen.turn, params={"after": seen.ids[-1]})
    assert over.chunks[-1]["choices"][0]["finish_reason"] == "abort"
    told = client.get("/v1/sessions/left").json()["transcript"][-1]["content"]
    assert seen.text + over.text == told


def test_wrong_event_ids_turns_and_sessions_are_refused_by_name(client: httpx.Client):
    with asking(client, "strict", **GREEDY) as lines:
        whole = read(lines)
    path = f"/v1/sessions/strict/turns/{whole.turn}/events"
    head, position, digest = whole.ids[2].split(".")
    wrong = {
        "nonsense": (400, "invalid_request"),
        f"{'0' * 32}.{position}.{digest}": (400, "invalid_request"),
        f"{head}.{position}.00000000": (409, "event_mismatch"),
        f"{head}.{int(position) + 4000}.{digest}": (409, "event_out_of_turn"),
        f"{head}.0.{position}.{digest}": (400, "invalid_request"),
    }
    for after, (status, code) in wrong.items():
        for params, headers in (({"after": after}, {}), ({}, {"last-event-id": after})):
            response = client.get(path, params=params, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code), after
    assert whole.turn in client.get(path, params={"after": f"{'0' * 32}.1.{digest}"}).json()["error"]["message"]
    unknown = client.get(f"/v1/sessions/strict/turns/{'0' * 32}/events")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "turn_not_found")
    with keyed(client.base_url) as stranger:
        assert stranger.get(path).json()["error"]["code"] == "session_not_found"
    moved = client.post("/v1/sessions/strict/migrate").json()
    assert moved["to"] != moved["from"] and following(client, "strict", whole.turn).text == whole.text
    assert client.delete("/v1/sessions/strict").status_code == 200
    for gone in (path, "/v1/sessions/strict/turns", "/v1/sessions/strict/checkpoints"):
        assert client.get(gone).json()["error"]["code"] == "session_not_found"
    assert text(chat(client, [COUNT], "strict")) and client.get(path).json()["error"]["code"] == "turn_not_found"


# ------------------------------------------------------------------------------------------------ retried


@pytest.mark.parametrize("session", ["keyed", None])
def test_a_retry_with_the_same_key_in_mid_answer_gets_the_whole_answer_of_one_turn(
    client: httpx.Client, session: str | None
):
    expected, key = alone(client, **SAMPLED), {"idempotency-key": "order-7"}
    with asking(client, session, **SAMPLED, headers=key) as lines:
        cut = read(lines, 4)
    with asking(client, session, **SAMPLED, headers={**key, "x-stainless-retry-count": "1"}) as lines:
        again = read(lines)
    assert again.ids[:4] == cut.ids and again.text == expected and again.done
    headers = {**key, **({"x-session-id": session} if session else {})}
    whole = client.post("/v1/chat/completions", json={"messages": [COUNT], **SAMPLED}, headers=headers)
    assert text(whole.json()) == expected and whole.headers["x-turn-id"] == cut.turn
    other = {"messages": [QUESTION], **SAMPLED}
    refused = client.post("/v1/chat/completions", json=other, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_mismatch")
    listed = client.get("/v1/sessions").json()["data"]
    assert [entry["id"] for entry in listed] == ([session] if session else []), "the log of a key is nobody's session"
    assert "session" not in whole.json() or session
    if session:
        assert len(client.get(f"/v1/sessions/{session}/turns").json()["data"]) == 1
        client.post(f"/v1/sessions/{session}/migrate")
        with asking(client, session, **SAMPLED, headers=key) as lines:
            assert read(lines).text == expected, "the record leads to the replica that ran the turn"


def test_duplicates_at_once_are_one_turn_with_all_its_choices(url: str):
    async def all_at_once() -> list[httpx.Response]:
        headers = {"authorization": "Bearer twice", "idempotency-key": "same"}
        async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as client:
            body = {"messages": [COUNT], **SAMPLED, "n": 2, "temperature": 2.0}
            return list(await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(4))))

    answers = [response.json() for response in asyncio.run(all_at_once())]
    assert all(answer == answers[0] for answer in answers)
    assert len({choice["message"]["content"] for choice in answers[0]["choices"]}) == 2


class LosesTheFirstAnswer(openai.DefaultHttpxClient):
    """Its first request reaches the server; the answer does not come back."""

    lost = 0

    def send(self, request: Any, **how: Any) -> Any:
        response = super().send(request, **how)
        if not self.lost:
            self.lost += 1
            response.read()
            response.close()
            raise httpx2.ReadError("the answer was lost")
        return response


def test_the_openai_clients_own_retry_is_no_second_turn(client: httpx.Client, url: str):
    key = client.headers["authorization"].removeprefix("Bearer ")
    lossy = LosesTheFirstAnswer()
    api = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=2, http_client=lossy)
    messages: Any = [{"role": "user", "content": "Count from 3 in steps of 2, 12 numbers."}]
    answer = api.chat.completions.with_raw_response.create(
        model="demo", messages=messages, temperature=0, extra_headers={"x-session-id": "retried"}
    )
    assert lossy.lost == 1 and answer.retries_taken == 1
    (only,) = client.get("/v1/sessions/retried/turns").json()["data"]
    assert answer.headers["x-turn-id"] == only["id"]
    assert answer.parse().choices[0].message.content == "3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25"


# ------------------------------------------------------------------------------------------------ hints


def test_a_parallel_agent_runs_side_by_side_where_its_state_is_and_a_left_request_ends_alone(url: str):
    questions = [QUESTION, COUNT, {"role": "user", "content": "Count from 1 to 9."}]
    hint = {"prompt_cache_key": "agent-7"}

    async def agent() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=60, headers={"authorization": "Bearer agent"}) as client:

            async def ask(messages: list[Any], **how: Any) -> httpx.Response:
                body = {"messages": messages, **GREEDY, **hint, **how}
                return await client.post("/v1/chat/completions", json=body)

            async def leave() -> None:
                body = {"messages": [FACT], **LONG, **hint, "stream": True}
                async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    async for line in response.aiter_lines():
                        if line.startswith("id: "):
                            break

            first = await ask([FACT], n=2)
            left = asyncio.create_task(leave())
            histories = ([FACT, {"role": "assistant", "content": "Noted."}, question] for question in questions)
            answers = await asyncio.gather(*(ask(history) for history in histories))
            await left
            return [first, *answers]

    first, *answers = asyncio.run(agent())
    assert [response.status_code for response in (first, *answers)] == [200] * 4
    assert len({response.headers["x-replica"] for response in (first, *answers)}) == 1
    for response, question in zip(answers, questions, strict=True):
        answer = response.json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 and "session" not in answer
        with keyed(url) as other:
            history = [FACT, {"role": "assistant", "content": "Noted."}, question]
            assert text(chat(other, history)) == text(answer)
    with httpx.Client(base_url=url, headers={"authorization": "Bearer agent"}) as client:
        assert client.get("/v1/sessions").json()["data"] == []
        deadline = time.monotonic() + 2
        while any(replica["running"] for replica in client.get("/v1/replicas").json()["data"]):
            assert time.monotonic() < deadline, "the left request still runs"
            time.sleep(0.05)


# ------------------------------------------------------------------------------------------------ moved


def test_a_stream_whose_session_moves_three_times_is_the_one_that_nobody_moved(client: httpx.Client):
    how = {**SAMPLED, "max_tokens": 160}
    expected = alone(client, **how)
    with asking(client, "wanderer", **how) as lines:
        parts = [read(lines, 4)]
        for _ in range(3):
            moved = client.post("/v1/sessions/wanderer/migrate").json()
            assert moved["from"] != moved["to"] and moved["hit"] == "peer" and moved["bytes_in_pause"] > 0, moved
            parts.append(read(lines, 4))
            assert not parts[-1].done, "the turn ended before its last move"
        itself = client.post("/v1/sessions/wanderer/migrate", json={"to": moved["to"]}).json()
        assert (itself["from"], itself["to"], itself["bytes_in_pause"]) == (moved["to"], moved["to"], 0)
        parts.append(read(lines))
    ids = [one for part in parts for one in part.ids]
    assert "".join(part.text for part in parts) == expected and parts[-1].done and len(set(ids[:-3])) == len(ids[:-3])
    known = until_idle(client, "wanderer")
    assert known["replica"] == moved["to"] and [entry["finish_reason"] for entry in known["turns"]] == ["length"]
    client.post("/v1/sessions/wanderer/migrate")
    assert turn(client, "wanderer", FACT)["session"]["hit"] == "peer"
