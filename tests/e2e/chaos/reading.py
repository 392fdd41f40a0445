"""A client that gives up nothing: it reads a turn's stream, and where the stream breaks it asks for the rest."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from deployment.event_ids import EventId, parse_event_id

AGAIN_SECONDS = 0.3
GIVE_UP_SECONDS = 90.0

_PASSING = {"session_unavailable", "unavailable", "replica_lost", "turn_lost", "not_moved", "session_busy"}
"""Codes of refusals that say: ask again."""


class Unanswered(Exception):
    """A request was refused, or not answered for `GIVE_UP_SECONDS`. `code`: of the last refusal."""

    def __init__(self, what: str, code: str) -> None:
        super().__init__(what)
        self.code = code


@dataclass(frozen=True)
class Heard:
    """One event. `tokens`: how many it brought, where log-probabilities show that."""

    at: float
    id: EventId
    text: str
    tokens: int | None


@dataclass
class Answer:
    """All that a client heard of a turn. `tries` that broke off or were refused by something that passes; `resumed`:
    connections that brought the rest; `replica`: where the stream began; `refusals`: codes."""

    events: list[Heard] = field(default_factory=list)
    finish: str | None = None
    replica: str = ""
    prefilled: int = 0
    tries: int = 0
    resumed: int = 0
    refusals: list[str] = field(default_factory=list)

    @property
    def turn(self) -> str | None:
        return self.events[0].id.turn if self.events else None

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def start(self) -> int:
        return self.events[0].id.position

    @property
    def end(self) -> EventId:
        return self.events[-1].id

    @property
    def tokens(self) -> int:
        return self.end.position - self.start


def take(client: httpx.Client, path: str, session: str, body: dict[str, Any], key: str | None, answer: Answer) -> None:
    """Takes a turn, whatever it takes. `key`: its idempotency key; without one a retry is marked as one. `answer` is
    filled while it comes."""
    headers = {"idempotency-key": key} if key else {}
    if not path.startswith("/v1/sessions/"):
        headers["x-session-id"] = session

    def request() -> Any:
        if answer.turn is not None:
            return _events(client, session, answer.turn, answer.end)
        retried = {"x-session-retry": "1"} if answer.tries else {}
        return client.stream("POST", path, json={**body, "stream": True}, headers={**headers, **retried})

    _read_all(answer, request)


def follow(client: httpx.Client, session: str, turn: str) -> Answer:
    """Reads a turn from its first event, as somebody who came later."""
    answer = Answer()
    _read_all(answer, lambda: _events(client, session, turn, answer.end if answer.events else None))
    return answer


def _events(client: httpx.Client, session: str, turn: str, after: EventId | None) -> Any:
    params = {"after": str(after)} if after else {}
    return client.stream("GET", f"/v1/sessions/{session}/turns/{turn}/events", params=params)


def _read_all(answer: Answer, request: Any) -> None:
    heard = time.monotonic()
    code = "no_answer"
    while True:
        if answer.tries:
            time.sleep(AGAIN_SECONDS)
        before = len(answer.events)
        with contextlib.suppress(httpx.TransportError), request() as response:
            answer.resumed += bool(answer.events) and response.status_code == 200
            if response.status_code != 200:
                code = _code_of(response)
                answer.refusals.append(code)
                if code not in _PASSING and response.status_code not in (500, 502, 503, 504):
                    raise Unanswered(f"{response.status_code} {response.text}", code)
            else:
                answer.replica = answer.replica or response.headers["x-replica"]
                if _read(answer, response):
                    return
        answer.tries += 1
        if len(answer.events) > before:
            heard = time.monotonic()
        if time.monotonic() - heard > GIVE_UP_SECONDS:
            raise Unanswered(f"turn {answer.turn}: no answer for {GIVE_UP_SECONDS:.0f} s, the last was {code}", code)


def _read(answer: Answer, response: httpx.Response) -> bool:
    """Whether the stream came to its end."""
    place: EventId | None = None
    for line in response.iter_lines():
        if line.startswith("id: "):
            place = parse_event_id(line[4:], "id")
        elif line == "data: [DONE]":
            return True
        elif line.startswith("data: ") and place is not None:
            document = json.loads(line[6:])
            if "error" in document:
                answer.refusals.append(document["error"]["code"])
                return False
            _hear(answer, place, document)
    return False


def _hear(answer: Answer, place: EventId, document: dict[str, Any]) -> None:
    choice = document["choices"][0]
    logprobs = choice["logprobs"]
    tokens = len(logprobs["content"]) if logprobs else None
    answer.events.append(Heard(time.monotonic(), place, choice["delta"].get("content", ""), tokens))
    if choice["finish_reason"] is not None:
        answer.finish = choice["finish_reason"]
        answer.prefilled = document["session"]["prefilled"]


def _code_of(response: httpx.Response) -> str:
    response.read()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return response.json()["error"]["code"]
    return "unreadable"


def asked(client: httpx.Client, method: str, path: str, *, known: tuple[str, ...] = (), **more: Any) -> httpx.Response:
    """A request that may be made again. `known`: codes of refusals that are answers, too."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    what = "no answer"
    while True:
        with contextlib.suppress(httpx.TransportError):
            response = client.request(method, path, **more)
            code = "" if response.status_code == 200 else _code_of(response)
            if not code or code in known:
                return response
            what = f"{response.status_code} {response.text}"
            if code not in _PASSING and response.status_code < 500:
                raise Unanswered(f"{method} {path}: {what}", code)
        if time.monotonic() > deadline:
            raise Unanswered(f"{method} {path}: {what}", "no_answer")
        time.sleep(AGAIN_SECONDS)
