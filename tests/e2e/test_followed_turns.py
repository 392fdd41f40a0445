"""Turns that are retried, followed and left, on a real cluster: nothing is run twice, lost, repeated or mixed up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest

from deployment.client import Client, Conflict, InvalidRequest, NotFound
from deployment.client.outage import Patience
from deployment.settings import AppArgs
from tests.e2e.cluster import COUNT, FACT, GREEDY, QUESTION, chat, keyed, text, turn, two_replicas
from tests.pages.reading import tried

SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 11,
    "max_tokens": 40,
    "ignore_eos": True,
}
LONG: dict[str, Any] = {**GREEDY, "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with two_replicas(AppArgs(detach_seconds=2, durable=None)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with keyed(url) as client:
        yield client


@dataclass
class Read:
    """What a reader has of a stream."""

    ids: list[str] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    @property
    def text(self) -> str:
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in self.chunks if chunk["choices"])

    @property
    def turn(self) -> str:
        return self.ids[0].partition(".")[0]


def read(lines: Iterator[str], events: int | None = None) -> Read:
    """Reads a stream to its end, or so many events; the connection stays open as long as `lines` are held."""
    got = Read()
    for line in lines:
        if line.startswith("id: "):
            got.ids.append(line.removeprefix("id: "))
        elif line == "data: [DONE]":
            got.done = True
        elif line.startswith("data: "):
            got.chunks.append(json.loads(line.removeprefix("data: ")))
            if len(got.chunks) == events:
                break
    return got


@contextmanager
def streaming(client: httpx.Client, method: str, path: str, **how: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream."""
    with client.stream(method, path, **how) as response:
        if response.status_code != 200:
            response.read()
        assert response.status_code == 200, response.text
        yield response.iter_lines()


@contextmanager
def asking(client: httpx.Client, session: str | None, **how: Any) -> Iterator[Iterator[str]]:
    headers = {**({"x-session-id": session} if session else {}), **how.pop("headers", {})}
    body = {"messages": [COUNT], "stream": True, **how}
    with streaming(client, "POST", "/v1/chat/completions", json=body, headers=headers) as lines:
        yield lines


def following(client: httpx.Client, session: str, turn: str, **how: Any) -> Read:
    with streaming(client, "GET", f"/v1/sessions/{session}/turns/{turn}/events", **how) as lines:
        return read(lines)


def alone(client: httpx.Client, **how: Any) -> str:
    """The answer that nobody disturbs."""
    with keyed(client.base_url) as other:
        return text(chat(other, [COUNT], **how))


def until_idle(client: httpx.Client, session: str) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        known = client.get(f"/v1/sessions/{session}").json()
        if known.get("turns") and known["running"] is None:
            return known
        time.sleep(0.1)
    raise TimeoutError(f"session {session} still runs after 20 s")


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


# ------------------------------------------------------------------------------------------------ sessions, completions


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


def test_openai_client_completes_text_and_token_ids_whole_and_streamed(url: str):
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="completes", max_retries=0)
    ask: Any = {"model": "demo", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = api.completions.create(prompt="3, 5, 7,", logprobs=2, **ask)
    (choice,) = whole.choices
    assert whole.object == "text_completion" and choice.finish_reason == "length" and choice.text
    assert choice.logprobs is not None and choice.logprobs.tokens is not None and len(choice.logprobs.tokens) == 12
    assert "".join(choice.logprobs.tokens) == choice.text and choice.logprobs.top_logprobs is not None
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)
    chunks = list(api.completions.create(prompt=["3, 5, 7,"], stream=True, **ask))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    ids = [5, 6, 7, 8]
    assert api.completions.create(prompt=ids, n=2, **ask).choices[1].text
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(prompt=[99_999_999], **ask)
    assert caught.value.param == "prompt" and "99999999" in caught.value.message


def test_openai_client_knows_every_refusal_as_one_of_its_own_errors(client: httpx.Client, url: str):
    key = client.headers["authorization"].removeprefix("Bearer ")
    api = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    messages: Any = [{"role": "user", "content": "Hello"}]
    ask: Any = {"model": "demo", "messages": messages, "max_tokens": 4}

    def refused(kind: type[openai.APIStatusError], **how: Any) -> openai.APIStatusError:
        with pytest.raises(kind) as caught:
            api.chat.completions.create(**{**ask, **how})
        assert isinstance(caught.value.body, dict) and {"message", "type", "param", "code"} <= set(caught.value.body)
        return caught.value

    assert refused(openai.BadRequestError, temperature=-1).param == "temperature"
    assert refused(openai.NotFoundError, model="other").code == "model_not_found"
    headers = {"x-session-id": "nobody", "x-session-require": "existing"}
    assert refused(openai.NotFoundError, extra_headers=headers).code == "session_not_found"
    api.chat.completions.create(**ask, extra_headers={"Idempotency-Key": "once"})
    again = refused(openai.UnprocessableEntityError, seed=1, extra_headers={"Idempotency-Key": "once"})
    assert again.code == "idempotency_mismatch"
    with asking(client, "busy", **LONG) as lines:
        read(lines, 1)
        assert refused(openai.ConflictError, extra_headers={"x-session-id": "busy"}).code == "session_busy"


# ------------------------------------------------------------------------------------------------ our client


class Cutting(httpx.HTTPTransport):
    """Every stream breaks after so many bytes, each later than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if "event-stream" in response.headers.get("content-type", ""):
            self.streams += 1
            assert isinstance(response.stream, httpx.SyncByteStream)
            response.stream = Cut(response.stream, 400 * self.streams)
        return response


class Cut(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, left: int) -> None:
        self._stream, self._left = stream, left

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            yield part[: self._left]
            self._left -= len(part)
            if self._left < 0:
                raise httpx.ReadError("cut")

    def close(self) -> None:
        self._stream.close()


@pytest.mark.parametrize("session", ["cut", None])
def test_our_client_reads_a_whole_answer_over_many_connections_and_runs_one_turn(url: str, session: str | None):
    options = {**SAMPLED, "logprobs": True}
    with httpx.Client(base_url=url, headers={"authorization": "Bearer alone"}) as undisturbed:
        expected = chat(undisturbed, [COUNT], **options)
    cutting, patience = Cutting(), Patience(30, draw=lambda: 0.1)
    with Client(url, "cutter", patience=patience, transport=cutting) as client:
        answer = client.ask([COUNT], session=session, options=options)
        assert answer.content == text(expected) and answer.interruptions >= 3 and cutting.streams >= 4
        assert answer.usage.completion_tokens == SAMPLED["max_tokens"]
        bytes_of = [entry["bytes"] for entry in answer.choices[0].logprobs]
        assert bytes_of == [entry["bytes"] for entry in expected["choices"][0]["logprobs"]["content"]]
        if session:
            (only,) = client.turns(session)
            assert only["id"] == answer.turn and answer.resume is not None and answer.resume.session == session


def test_our_client_manages_sessions_and_names_what_the_server_refuses(url: str):
    with Client(url, "manager") as client:
        assert client.create("one")["id"] == "one" and client.models()[0]["id"]
        client.ask([FACT], session="one", append=True, options=GREEDY)
        assert client.fork("one", "two")["parent"] == "one" and client.checkpoints("two")
        kept = client.checkpoint("two", "here")
        assert (kept["name"], kept["turn"]) == ("here", client.turns("two")[0]["id"])
        assert client.migrate("two")["to"] in {entry["id"] for entry in client.replicas()}
        assert client.import_(client.export("two"), "three")["id"] == "three"
        assert "4172" in client.ask([QUESTION], session="three", append=True, options=GREEDY).content
        assert client.fork("three", "four", checkpoint="here")["frontier"] == kept["frontier"]
        assert client.delete_checkpoint("three", "here")["deleted"]
        assert {entry["id"] for entry in client.sessions()} == {"one", "two", "three", "four"}
        assert client.delete("one")["deleted"]
        with pytest.raises(NotFound) as caught:
            client.session("one")
        assert (caught.value.code, caught.value.param) == ("session_not_found", "session")
        with pytest.raises(Conflict):
            client.create("two")
        with pytest.raises(InvalidRequest) as wrong:
            client.ask([FACT], options={"temperature": -1})
        assert wrong.value.param == "temperature"


# ------------------------------------------------------------------------------------------------ pages


def test_the_readme_does_what_it_says(url: str, tmp_path: Path):
    asked = next(one for one in tried("README.md", url, tmp_path) if "/migrate" in one.block.text)
    answer, moved = asked.answers
    assert "4172" in text(answer) and moved["from"] != moved["to"]


def test_a_first_conversation_goes_as_the_quickstart_says(url: str, tmp_path: Path):
    _, first, kept, moved = tried("docs/quickstart.md", url, tmp_path)
    began, asked = first.answers
    assert asked["session"]["id"] == "first" and asked["session"]["reused"] == began["session"]["frontier"]
    assert "4172" in text(asked)
    checkpoint, forked, counted, listed = kept.answers
    assert (checkpoint["name"], forked["parent"], forked["frontier"]) == ("told", "first", asked["session"]["frontier"])
    assert counted["session"]["id"] == "second" and {one["id"] for one in listed["data"]} >= {"first", "second"}
    gone, again = moved.answers
    assert gone["from"] != gone["to"] and again["session"]["hit"] == "peer" and "4172" in text(again)


def test_the_clients_page_does_what_it_says(url: str, tmp_path: Path):
    typed, program = tried("docs/client.md", url, tmp_path)
    moved = [line for line in typed.output.splitlines() if "moved from" in line or "state from peer" in line]
    assert len(moved) == 2 and typed.output.count("acceptance length") == 2 and "4172" in typed.output
    assert "4172" in program.output and program.output.endswith("404 session_not_found session\n")


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
