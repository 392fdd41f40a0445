"""Clients that people have, and ours, on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from deployment.client import Client, Conflict, InvalidRequest, NotFound
from deployment.client.outage import Patience
from tests.e2e.cluster import COUNT, FACT, GREEDY, QUESTION, chat, text
from tests.e2e.two_replicas.streams import LONG, SAMPLED, asking, read


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
