"""Replicas, directory and host store that are killed, between turns and in mid-stream, and what a client sees of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import ray

from deployment.cluster.names import NAMESPACE, directory_name, store_name
from tests.e2e.cluster import COUNT, FACT, GREEDY, QUESTION, chat, epoch, keyed, replicas, text, turn, wait_for_two


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
