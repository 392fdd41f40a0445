"""A server that is gone, busy or refuses: how long the client tries, how often, and what it raises."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from deployment.client import (
    AsyncClient,
    Client,
    ClientError,
    Conflict,
    Ended,
    Gone,
    Interrupted,
    InvalidRequest,
    NotFound,
    Overloaded,
    Refusal,
    Resumed,
    ServerFault,
    Text,
    Unavailable,
    UnexpectedAnswer,
    Unreachable,
)
from tests.deployment.client.fake_server import MESSAGES, FakeServer, Plan, Time, cut, lost, plain, published, refused

CUTS = [3, 7, 12]


def told(server: FakeServer, time: Time, seconds: float = 60.0, session: str | None = "trip") -> list[Any]:
    how = {"patience": time.patience(seconds), "transport": server.transport, "sleep": time.sleep}
    return list(Client("http://server", "key", **how).stream(MESSAGES, session=session))


def sessions(server: Any, time: Time, seconds: float = 60.0) -> Client:
    transport = httpx.MockTransport(server)
    return Client("http://server", patience=time.patience(seconds), transport=transport, sleep=time.sleep)


# ------------------------------------------------------------------------------------------------ gone


def test_a_server_that_is_gone_for_a_while_is_asked_with_growing_pauses_and_said_so_once():
    time, server = Time(), FakeServer(published(CUTS), [cut(900), *[lost()] * 5])
    events = told(server, time)
    assert time.slept == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert [event for event in events if isinstance(event, Interrupted | Resumed)] == [
        Interrupted("connection reset"), Resumed(15.75, 6),
    ]  # fmt: skip
    at = next(at for at, event in enumerate(events) if isinstance(event, Resumed))
    assert isinstance(events[at - 1], Interrupted) and isinstance(events[at + 1], Text | Ended)


def test_a_server_that_does_not_come_back_is_given_up_in_time_with_the_reason():
    time, server = Time(), FakeServer(published(CUTS), [cut(900), *[lost()] * 100])
    with pytest.raises(Unreachable, match="http://server does not answer: nobody is there"):
        told(server, time)
    assert 60 - 8 <= sum(time.slept) < 60


def test_without_patience_nothing_is_tried_twice():
    server = FakeServer(published(CUTS), [lost()])
    with pytest.raises(Unreachable):
        told(server, Time(), seconds=0)
    assert len(server.asked) == 1


def test_a_server_that_answers_and_breaks_off_without_news_is_given_up_too():
    for session, sent in (("trip", 40), (None, 600)):
        server = FakeServer(published(CUTS), [cut(900), *[cut(sent)] * 100])
        with pytest.raises(Unreachable, match="connection reset"):
            told(server, Time(), session=session)
        assert len(server.asked) < 20


def test_each_news_renews_the_patience():
    """An answer may take longer than an outage may."""
    time = Time()
    server = FakeServer(published(range(1, 29)), [plan for _ in range(9) for plan in (cut(400), *[lost()] * 4)])
    assert [event for event in told(server, time) if isinstance(event, Ended)] and time.now > 160


@pytest.mark.parametrize("error", [httpx.ReadTimeout, httpx.RemoteProtocolError, httpx.ConnectTimeout])
def test_every_kind_of_lost_connection_is_tried_again(error: type[httpx.TransportError]):
    server = FakeServer(published(CUTS), [lost(error)])
    assert isinstance(told(server, Time())[0], Interrupted) and len(server.asked) == 2


# ------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request", InvalidRequest),
        (404, "session_not_found", NotFound),
        (409, "session_busy", Conflict),
        (410, "turn_not_kept", Gone),
        (413, "body_too_large", InvalidRequest),
        (422, "idempotency_mismatch", InvalidRequest),
        (500, "internal_error", ServerFault),
        (503, "queue_timeout", Unavailable),
    ],
)
def test_a_refusal_that_time_does_not_heal_is_raised_at_once(status: int, code: str, kind: type[Refusal]):
    server = FakeServer(published(CUTS), [refused(status, code, "because", "field")])
    with pytest.raises(kind, match=f"the server answers {status}: because") as caught:
        told(server, Time())
    error = caught.value
    assert (error.status, error.code, error.message, error.param) == (status, code, "because", "field")
    assert len(server.asked) == 1


@pytest.mark.parametrize(("status", "code"), [(503, "session_unavailable"), (429, "overloaded")])
def test_a_server_that_says_when_to_ask_again_is_asked_then_and_not_before(status: int, code: str):
    time, server = Time(), FakeServer(published(CUTS), [cut(900), *[refused(status, code)] * 2])
    told(server, time)
    assert time.slept == [0.25, 1 + 0.5, 1 + 1.0]


def test_a_refusal_that_outlasts_the_patience_is_raised_itself():
    with pytest.raises(Overloaded) as caught:
        told(FakeServer(published(CUTS), [refused(429, "overloaded")] * 100), Time())
    assert caught.value.retry_after == 1


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_proxy_without_a_server_behind_it_is_an_outage(status: int):
    assert told(FakeServer(published(CUTS), [plain(status)]), Time())[0] == Interrupted(f"the server answers {status}")


def test_a_route_that_is_missing_is_a_mistake_at_first_and_an_outage_later():
    with pytest.raises(UnexpectedAnswer, match="404"):
        told(FakeServer(published(CUTS), [plain(404)]), Time())
    assert Resumed(0.75, 2) in told(FakeServer(published(CUTS), [cut(900), plain(404)]), Time())


# ------------------------------------------------------------------------------------------------ sessions


def test_every_method_is_its_route():
    asked: list[tuple[str, str, bytes]] = []

    def server(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.raw_path.decode(), request.read()))
        return httpx.Response(200, json={"object": "list", "data": [{"id": "x"}]})

    with sessions(server, Time()) as client:
        assert client.models() == client.replicas() == client.sessions() == [{"id": "x"}]
        assert client.turns("a/b") == client.checkpoints("a/b") == [{"id": "x"}]
        assert client.session("a/b")["object"] == "list"
        acted = [client.create(), client.create("c"), client.fork("a"), client.fork("a", "b"), client.checkpoint("a")]
        acted += [client.checkpoint("a", "c"), client.delete_checkpoint("a", "c/d"), client.fork("a", checkpoint="c")]
        acted += [client.fork("a", "b", turn="t"), client.fork("a", frontier=7)]
        acted += [client.migrate("a"), client.migrate("a", "r2"), client.delete("a")]
        assert all("data" in answer for answer in acted)
        assert client.export("a").startswith(b"{") and client.import_(b"doc", "n") and client.import_(b"doc")
    assert asked == [
        ("GET", "/v1/models", b""),
        ("GET", "/v1/replicas", b""),
        ("GET", "/v1/sessions", b""),
        ("GET", "/v1/sessions/a%2Fb/turns", b""),
        ("GET", "/v1/sessions/a%2Fb/checkpoints", b""),
        ("GET", "/v1/sessions/a%2Fb", b""),
        ("POST", "/v1/sessions", b"{}"),
        ("POST", "/v1/sessions", b'{"id":"c"}'),
        ("POST", "/v1/sessions/a/fork", b"{}"),
        ("POST", "/v1/sessions/a/fork", b'{"id":"b"}'),
        ("POST", "/v1/sessions/a/checkpoints", b"{}"),
        ("POST", "/v1/sessions/a/checkpoints", b'{"name":"c"}'),
        ("DELETE", "/v1/sessions/a/checkpoints/c%2Fd", b""),
        ("POST", "/v1/sessions/a/fork", b'{"checkpoint":"c"}'),
        ("POST", "/v1/sessions/a/fork", b'{"id":"b","turn":"t"}'),
        ("POST", "/v1/sessions/a/fork", b'{"frontier":7}'),
        ("POST", "/v1/sessions/a/migrate", b"{}"),
        ("POST", "/v1/sessions/a/migrate", b'{"to":"r2"}'),
        ("DELETE", "/v1/sessions/a", b""),
        ("GET", "/v1/sessions/a/export", b""),
        ("POST", "/v1/sessions/import?id=n", b"doc"),
        ("POST", "/v1/sessions/import", b"doc"),
    ]


METHODS = ("models", "replicas", "sessions", "session", "create", "fork", "turns", "checkpoints", "checkpoint",
           "migrate", "export", "delete")  # fmt: skip


def test_both_clients_ask_the_same():
    asked: list[tuple[str, str, bytes]] = []

    def server(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.raw_path.decode(), request.read()))
        return httpx.Response(200, json={"data": []})

    def arguments(name: str) -> list[str]:
        return [] if name in ("models", "replicas", "sessions") else ["trip"]

    async def scenario() -> list[Any]:
        async with AsyncClient("http://server", transport=httpx.MockTransport(server)) as client:
            return [
                *[await getattr(client, name)(*arguments(name)) for name in METHODS],
                await client.import_(b"doc"),
            ]  # fmt: skip

    answers = asyncio.run(scenario())
    first, asked[:] = list(asked), []
    with sessions(server, Time()) as client:
        assert [*[getattr(client, name)(*arguments(name)) for name in METHODS], client.import_(b"doc")] == answers
    assert asked == first and len(first) == len(METHODS) + 1


class Scripted:
    """Answers `fork` and other calls with a plan each, and then well."""

    def __init__(self, *plans: Plan) -> None:
        self.plans, self.asked = list(plans), 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        if self.plans:
            answer = self.plans.pop(0)(b"")
            assert isinstance(answer, httpx.Response)
            return answer
        return httpx.Response(200, content=json.dumps({"id": "child"}))


def test_what_only_reads_is_asked_again_and_what_acts_only_if_it_surely_did_not():
    server = Scripted(lost(httpx.ReadError), plain(502), refused(503, "replica_lost"))
    assert sessions(server, Time()).session("trip") == {"id": "child"} and server.asked == 4
    server = Scripted(lost(httpx.ConnectError), refused(503, "unavailable"))
    assert sessions(server, Time()).fork("trip") == {"id": "child"} and server.asked == 3
    for plan, kind, why in (
        (lost(httpx.ReadError), ClientError, "fork: the connection was lost .* not known"),
        (plain(502), UnexpectedAnswer, "502"),
        (refused(503, "replica_lost"), Unavailable, "why"),
    ):
        server = Scripted(plan)
        with pytest.raises(kind, match=why):
            sessions(server, Time()).fork("trip")
        assert server.asked == 1


def test_an_answer_that_is_no_object_is_named():
    for body in (b"<html>", b"[]"):
        with pytest.raises(UnexpectedAnswer, match="JSON object"):
            sessions(lambda request, body=body: httpx.Response(200, content=body), Time()).session("trip")


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", ""])
def test_a_url_that_is_none_is_named(url: str):
    with pytest.raises(ValueError, match="url"):
        Client(url)


def test_what_cannot_stand_in_a_request_is_named_before_anything_is_sent():
    with pytest.raises(ValueError, match="api_key"):
        Client(api_key="schlüssel")
    client = Client("http://127.0.0.1:1", patience=0)
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"session": "a b"}, "session: has visible ASCII"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"append": True}, "append: an append turn needs a session"),
        ({"options": {"stream": False}}, "options: stream"),
    ]
    for how, why in mistakes:
        with pytest.raises(ValueError, match=why):
            client.stream(MESSAGES, **how)
    with pytest.raises(Unreachable, match=r"http://127.0.0.1:1 does not answer: .*refused"):
        client.models()
