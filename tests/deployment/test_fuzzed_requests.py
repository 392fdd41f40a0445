"""Requests that nobody meant: whatever comes, the answer is a refusal in one sentence, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from deployment.engine.commands import Inspect
from deployment.engine.events import Facts
from deployment.openapi.operations import OPERATIONS
from deployment.turn_table import KEPT_SECONDS
from state.session_manifest import SESSION_FIELDS
from tests.deployment.serving import Served, served
from tests.state.altering import altered
from tests.state.blobs import Parts, put_together, take_apart

CASES = 6
"""Of each route that has a body."""

DESCRIBED = [name for name, operation in OPERATIONS.items() if not isinstance(operation.body, str)]
"""Documents have tests of their own."""

KNOWN = {"model": "demo", "previous_response_id": None}

CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")

REFUSED = {400, 404, 405, 409, 410, 413, 422, 429}


def cases(number: int) -> Callable[[Any], Any]:
    """The same ones each time, however long one takes."""
    return settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """All that these tests leave behind are sessions, by whatever name: without them everything is as it was."""
    with served() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        before = held(server)
        yield client
        leave(server, client)
        seen = eventually(lambda: held(server), before)
        assert seen == before


def held(server: Served) -> dict[str, Any]:
    """What requests may take hold of."""
    facts = asyncio.run(server.replica._service.call(Inspect("held")))
    assert isinstance(facts, Facts)
    metrics = {
        sample.name: sample.value
        for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
        for sample in family.samples
        if sample.name in ("dflash_sessions", "dflash_turns_open")
    }
    return metrics | facts.facts | {"turns": server.replica._turns.running, "arrivals": len(server.replica._arrivals)}


def leave(server: Served, client: httpx.Client) -> None:
    """What clients can delete; then what goes by itself once enough time has passed, or enough else has come."""
    for session in client.get("/v1/sessions").json()["data"]:
        client.delete(f"/v1/sessions/{quote(session['id'], safe='')}").raise_for_status()
    hinted = server.replica._desk._hinted
    hinted._kept = 0
    asyncio.run(hinted.engine_id("", "the last one"))
    server.replica._keyed._unix = lambda: time.time() + KEPT_SECONDS


def eventually(now: Callable[[], Any], wanted: Any) -> Any:
    """What there is by then, or after a while."""
    deadline = time.monotonic() + 20
    while (seen := now()) != wanted and time.monotonic() < deadline:
        time.sleep(0.2)
    return seen


def answered(client: httpx.Client, method: str, path: str, **asked: Any) -> httpx.Response:
    """An answer, or a refusal that says what is wrong and nothing of the server's inside."""
    answer = client.request(method, path, **asked)
    if answer.status_code != 200:
        assert answer.status_code in REFUSED, (method, path, answer.status_code, answer.text)
        message = answer.json()["error"]["message"]
        assert 0 < len(message) < 1500 and "Traceback" not in message and 'File "' not in message
    return answer


# ------------------------------------------------------------------------------------------------ whatever is described


def _soon(body: dict[str, Any]) -> None:
    """A few tokens at most."""
    for asked, limit in (("messages", "max_tokens"), ("prompt", "max_tokens"), ("input", "max_output_tokens")):
        if asked in body and body.get(limit) is None:
            body[limit] = 2
    for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if type(body.get(limit)) is int:
            body[limit] = min(2, body[limit])


@pytest.fixture(scope="module")
def described(client: httpx.Client) -> Any:
    schemathesis = pytest.importorskip("schemathesis", reason="pip install -e '.[dev]'")
    schemathesis.checks.load_all_checks()
    return schemathesis.openapi.from_dict(client.get("/openapi.json").json())


@pytest.mark.parametrize("name", DESCRIBED)
def test_any_request_gets_what_the_description_says(client: httpx.Client, described: Any, name: str):
    schemathesis = pytest.importorskip("schemathesis")

    wanted = schemathesis.checks.CHECKS.get_by_names(CHECKS)
    method, path = name.split()
    operation = described[path][method]
    known = made(client, path)
    right, wrong = (operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode)

    @cases(CASES if OPERATIONS[name].body else 2)
    @given(case=st.one_of(right, wrong) if OPERATIONS[name].body else right, exists=st.booleans())
    def asked(case: Any, exists: bool) -> None:
        if exists:
            case.path_parameters |= known
        if isinstance(case.body, dict):
            _soon(case.body)
            if exists:  # what is unknown is refused before all else
                case.body |= {key: value for key, value in KNOWN.items() if key in case.body}
        answer = case.call(base_url=str(client.base_url), timeout=60)
        case.validate_response(answer, checks=wanted)
        assert b"Traceback" not in answer.content

    asked()


def made(client: httpx.Client, path: str) -> dict[str, str]:
    """Something that a path names."""
    if "/responses/" in path:
        return {"name": client.post("/v1/responses", json={"input": "One.", "max_output_tokens": 1}).json()["id"]}
    if "/sessions/{name}" not in path:
        return {}
    said = {"messages": [{"role": "user", "content": "One."}], "max_tokens": 1}
    client.post("/v1/sessions", json={"id": "known"})
    turn = client.post("/v1/sessions/known/turns", json=said).headers["x-turn-id"]
    point = client.post("/v1/sessions/known/checkpoints").json()["name"]
    return {"name": "known", "turn": turn, "checkpoint": point}


# ------------------------------------------------------------------------------------------------ clients that leave


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/sessions/left/turns", "/v1/messages", "/v1/responses"])
def test_a_client_that_leaves_at_any_moment_leaves_nothing(client: httpx.Client, path: str):
    """What that might be is looked for when all is over."""
    client.post("/v1/sessions", json={"id": "left"})
    said = {"role": "user", "content": "Count from 3 to 99."}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    asked = {"input": [said]} if path == "/v1/responses" else {"messages": [said]}
    body = asked | {"model": "demo", "stream": True, limit: 400}
    for lines in (0, 1, 2, 5, 9):
        deadline = time.monotonic() + 10
        while True:
            with client.stream("POST", path, json=body) as answer:
                if answer.status_code != 409 or time.monotonic() > deadline:
                    assert answer.status_code == 200
                    for _ in zip(answer.iter_lines(), range(lines), strict=False):
                        pass
                    break
            time.sleep(0.02)  # that the one before has left is not known yet


# ------------------------------------------------------------------------------------------------ documents


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> Parts:
    """A session of two responses."""
    first = client.post("/v1/responses", json={"input": "One.", "max_output_tokens": 3}).json()["id"]
    asked = {"input": "Two.", "max_output_tokens": 3, "previous_response_id": first, "instructions": "Be brief."}
    second = client.post("/v1/responses", json=asked).json()["id"]
    session = f"resp-{second[5:37]}"
    exported = client.get(f"/v1/sessions/{session}/export").content
    client.delete(f"/v1/sessions/{session}")
    return take_apart(exported)


def use(client: httpx.Client, document: bytes, turns: list[str], *, goes_on: bool = True) -> int:
    """Brings the document in, does with the session what can be done with one, and removes it again. The status of
    the import."""
    session = f"resp-{'0' * 31}1"
    imported = answered(client, "POST", "/v1/sessions/import", params={"id": session}, content=document)
    if imported.status_code != 200:
        return imported.status_code
    try:
        for path in ("", "/turns", "/checkpoints", "/export"):
            answered(client, "GET", f"/v1/sessions/{session}{path}")
        for turn in turns:
            response = f"/v1/responses/resp_{session[5:]}{turn}"
            answered(client, "GET", response)
            answered(client, "GET", f"{response}/input_items")
            answered(client, "GET", f"/v1/sessions/{session}/turns/{turn}/events")
        if goes_on:
            said = {"messages": [{"role": "user", "content": "Three."}], "max_tokens": 1}
            answered(client, "POST", f"/v1/sessions/{session}/turns", json=said)
    finally:
        answered(client, "DELETE", f"/v1/sessions/{session}")
    return 200


def test_documents_that_lie_are_refused_or_harmless(client: httpx.Client, document: Parts):
    turns = [turn["id"] for turn in document.manifest["turns"]]
    assert use(client, put_together(document), turns) == 200, "an honest one is taken"
    random = Random(14)
    told: list[int] = []
    for _ in range(30):
        told.append(use(client, put_together(replace(document, manifest=altered(document.manifest, random))), turns))
        session = {name: document.manifest[name] for name in SESSION_FIELDS}
        told.append(use(client, put_together(document.with_manifest(**altered(session, random))), turns))
    assert set(told) == {200, 400, 409} and told.count(400) > 20


def test_a_note_that_lies_is_of_no_response(client: httpx.Client, document: Parts):
    turns, random = document.manifest["turns"], Random(15)
    for number in range(24):
        turn = turns[number % 2]
        note = altered({"note": json.loads(turn["request"]["note"])}, random).get("note")
        lying = turn | {"request": turn["request"] | {"note": json.dumps(note, default=bytes.hex)}}
        changed = document.with_manifest(turns=[lying if one is turn else one for one in turns])
        assert use(client, put_together(changed), [one["id"] for one in turns], goes_on=False) == 200


# ------------------------------------------------------------------------------------------------ event ids


@pytest.fixture(scope="module")
def followed(client: httpx.Client) -> tuple[str, list[tuple[str, str]]]:
    """Where a turn that is over is followed, and the id and the data of each of its events."""
    said = {"messages": [{"role": "user", "content": "Count from 3 to 9."}], "temperature": 0}
    client.post("/v1/sessions", json={"id": "counted"})
    turn = client.post("/v1/sessions/counted/turns", json=said).headers["x-turn-id"]
    path = f"/v1/sessions/counted/turns/{turn}/events"
    return path, events_of(client.get(path).text)


def events_of(stream: str) -> list[tuple[str, str]]:
    events = (event.split("\n") for event in stream.split("\n\n") if event.startswith("id: "))
    return [(place.removeprefix("id: "), data.removeprefix("data: ")) for place, data in events]


def or_not(*others: str) -> st.SearchStrategy[str | None]:
    """None: as it was."""
    return st.one_of(st.none(), st.none(), st.sampled_from(others))


@cases(150)
@given(
    at=st.integers(0, 1000),
    turn=or_not("f" * 32, "F" * 32, "", "0"),
    choice=or_not(".0", ".1", ".99", ".-1", ".x"),
    position=or_not("0", "1", "40", "9" * 16, "9" * 17, "-1", "1e3", "\xb2", " "),
    digest=or_not("00000000", "0" * 9, ""),
    cut=st.one_of(st.none(), st.none(), st.integers(0, 60)),
    named=st.sampled_from(["after", "Last-Event-Id"]),
)
def test_no_event_id_gets_another_text_than_the_rest(
    client: httpx.Client, followed: tuple[str, list[tuple[str, str]]], at: int, turn: str | None, choice: str | None,
    position: str | None, digest: str | None, cut: int | None, named: str,
):  # fmt: skip
    path, events = followed
    places = [place for place, _ in events]
    parts = zip((turn, position, digest), places[at % len(places)].split("."), strict=True)
    one, other, last = (true if part is None else part for part, true in parts)
    asked = f"{one}{choice or ''}.{other}.{last}"[:cut]
    if named == "after":
        answer = answered(client, "GET", path, params={"after": asked})
    else:
        answer = answered(client, "GET", path, headers={"last-event-id": asked.encode("latin-1")})
    if answer.status_code == 200:
        assert events_of(answer.text) == (events[places.index(asked) + 1 :] if asked else events)
    else:
        assert answer.status_code in (400, 409) and asked not in places
