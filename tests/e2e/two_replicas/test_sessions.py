"""Sessions on a real cluster: made, moved, forked, deleted, taken elsewhere, and nobody else's."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import COUNT, FACT, GREEDY, QUESTION, chat, epoch, keyed, replicas, text, turn


def test_a_session_can_be_made_before_its_first_turn_and_tells_its_turns_and_checkpoints(client: httpx.Client):
    made = client.post("/v1/sessions", json={"id": "fresh"})
    assert made.status_code == 200 and made.json()["id"] == "fresh" and made.json()["frontier"] == 0
    assert client.post("/v1/sessions", json={"id": "fresh"}).json()["error"]["code"] == "session_exists"
    assert len(client.post("/v1/sessions").json()["id"]) == 32
    assert client.get("/v1/sessions/fresh/export").json()["error"]["code"] == "session_empty"
    refused = client.post("/v1/sessions/fresh/turns", json={"messages": [FACT], "logit_bias": {"99999999": 1}})
    assert refused.status_code == 400 and client.get("/v1/sessions/fresh/turns").json()["data"] == []
    turn(client, "fresh", FACT)
    assert "4172" in text(turn(client, "fresh", QUESTION))
    turns = client.get("/v1/sessions/fresh/turns").json()["data"]
    assert [(entry["status"], entry["finish_reason"]) for entry in turns] == [("over", "stop")] * 2
    checkpoints = client.get("/v1/sessions/fresh/checkpoints").json()["data"]
    assert checkpoints[-1]["frontier"] <= client.get("/v1/sessions/fresh").json()["frontier"]


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


def test_a_name_with_a_slash_and_a_routes_word_reaches_its_session_through_the_proxy(client: httpx.Client):
    assert client.post("/v1/sessions", json={"id": "50%/export"}).status_code == 200
    assert client.get("/v1/sessions/50%25%2Fexport").json()["id"] == "50%/export"
    assert client.delete("/v1/sessions/50%25%2Fexport").json()["deleted"]


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
