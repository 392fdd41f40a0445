"""Another tenant against every route of the application: what is not his is, to him, as if it never was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai
import pytest
from starlette.routing import BaseRoute, Route

from deployment.authentication import OPEN
from deployment.client import Client, Unauthorized
from deployment.ingress import api
from deployment.path_names import Name
from deployment.settings import AppArgs
from tests.deployment import in_process, serving

ALICE, BOB = "alices-own-key-0001", "bobs-own-key-000001"
ASKED = {"messages": [{"role": "user", "content": "My locker code is 4172."}], "max_tokens": 2, "temperature": 0}
MESSAGE = {"model": "demo", **ASKED}
ID, NOBODY = "diary", "dairy"
MESSAGES = "/v1/messages"

Asked = tuple[str, str]
"""A method and a route's path."""

OF_A_SESSION: dict[Asked, Any] = {
    ("POST", "/v1/sessions/{name}/turns"): ASKED,
    ("GET", "/v1/sessions/{name}/turns/{turn}/events"): None,
    ("GET", "/v1/sessions/{name}/export"): None,
    ("GET", "/v1/sessions/{name}/turns"): None,
    ("GET", "/v1/sessions/{name}/checkpoints"): None,
    ("POST", "/v1/sessions/{name}/checkpoints"): {"name": "mine"},
    ("DELETE", "/v1/sessions/{name}/checkpoints/{checkpoint}"): None,
    ("GET", "/v1/sessions/{name}"): None,
    ("POST", "/v1/sessions/{name}/migrate"): {},
    ("POST", "/v1/sessions/{name}/fork"): {"id": "stolen"},
    ("DELETE", "/v1/sessions/{name}"): None,
}
OF_A_RESPONSE: dict[Asked, Any] = {
    ("GET", "/v1/responses/{name}"): None,
    ("GET", "/v1/responses/{name}/input_items"): None,
    ("POST", "/v1/responses/{name}/cancel"): None,
    ("DELETE", "/v1/responses/{name}"): None,
}
THAT_GO_ON: dict[Asked, Any] = {
    ("POST", "/v1/responses"): {"model": "demo", "input": "And now?", "max_output_tokens": 2},
    ("POST", "/v1/responses/input_tokens"): {"model": "demo", "input": "And now?"},
}
"""With `previous_response_id`."""
TURNS: dict[Asked, Any] = {
    ("POST", "/v1/chat/completions"): ASKED,
    ("POST", "/v1/messages"): MESSAGE,
    ("POST", "/v1/completions"): {"prompt": "My locker", "max_tokens": 2, "temperature": 0},
}
"""Under the owner's name, hint or idempotency key they are turns of the one who asks."""
OF_NOBODY: set[Asked] = {
    ("POST", "/v1/messages/count_tokens"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/version"),
    ("GET", "/v1/models"), ("GET", "/v1/models/{name}"), ("GET", "/v1/replicas"), ("GET", "/health"),
    ("GET", "/openapi.json"), ("GET", "/metrics"), ("GET", "/console"), ("GET", "/console/{name}"),
}  # fmt: skip
"""They tell of a text that comes with the request, or of the server."""
OWN: set[Asked] = {("GET", "/v1/sessions"), ("POST", "/v1/sessions"), ("POST", "/v1/sessions/import")}
"""They tell of the asker's own sessions, or make one; each has a test here."""


def routes() -> set[Asked]:
    """All of the application, those of routers that Serve has put into it included."""
    found: set[Asked] = set()
    routers: list[Any] = [api]
    while routers:
        for route in routers.pop().routes:
            if isinstance(route, BaseRoute) and hasattr(route, "original_router"):
                routers.append(route.original_router)  # pyright: ignore[reportAttributeAccessIssue]
                continue
            assert isinstance(route, Route), f"{route}: what a foreign tenant gets there must be said here"
            assert all(isinstance(one, Name) for one in route.param_convertors.values()), f"{route}: not decoded"
            found |= {(method, route.path_format) for method in (route.methods or ()) if method != "HEAD"}
    return found


class Calls(list[tuple[str, str]]):
    """What the ingress asked of the directory and of replicas, in order."""


@pytest.fixture(scope="module")
def calls() -> Iterator[Calls]:
    made = Calls()
    locate, ask = in_process.InProcess.locate, serving._Replicas.ask

    async def located(self: Any, key: Any) -> Any:
        made.append(("locate", ""))
        return await locate(self, key)

    async def asked(self: Any, method: str, route: Any, *args: Any) -> Any:
        made.append(("ask", method))
        return await ask(self, method, route, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_process.InProcess, "locate", located)
        patch.setattr(serving._Replicas, "ask", asked)
        yield made


@pytest.fixture(scope="module")
def url(calls: Calls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.touch(0o600)
    keys.write_text(f"alice {ALICE}\nbob {BOB}\n")
    with serving.serving(args=AppArgs(api_keys=keys)) as url:
        yield url


@pytest.fixture(scope="module")
def alice(url: str) -> Iterator[httpx.Client]:
    with keyed(url, ALICE) as client:
        yield client


@pytest.fixture(scope="module")
def bob(url: str) -> Iterator[httpx.Client]:
    with keyed(url, BOB) as client:
        yield client


def keyed(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {key}"})


@pytest.fixture(scope="module")
def turn(alice: httpx.Client) -> str:
    """Of a session of hers with a checkpoint."""
    headers = {"x-session-id": ID, "idempotency-key": "order-7"}
    answer = alice.post("/v1/chat/completions", json=ASKED, headers=headers)
    assert answer.status_code == 200, answer.text
    assert alice.post(f"/v1/sessions/{ID}/checkpoints", json={"name": "before"}).status_code == 200
    return answer.headers["x-turn-id"]


@pytest.fixture(scope="module")
def response(alice: httpx.Client) -> str:
    answer = alice.post("/v1/responses", json=THAT_GO_ON["POST", "/v1/responses"])
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def path_of(route: str, name: str, turn: str = "") -> str:
    path = route.replace("{name}", name)
    return path.replace("{turn}", turn).replace("{checkpoint}", "before")


def other(response: str) -> str:
    """An id of the same form, which nobody has."""
    return f"resp_{'0' * 31}1{response[-32:]}"


@dataclass(frozen=True)
class Told:
    """All that an answer tells, with the name that was asked for blotted out, and what the server did for it."""

    status: int
    text: str
    headers: tuple[tuple[str, str], ...]
    calls: tuple[tuple[str, str], ...]


def told(client: httpx.Client, calls: Calls, method: str, path: str, body: Any, name: str) -> Told:
    calls.clear()
    answer = client.request(method, path, json=body)
    headers = tuple(sorted((key, value) for key, value in answer.headers.items() if key != "date"))
    return Told(answer.status_code, answer.text.replace(name, "NAME"), headers, tuple(calls))


def test_every_route_of_the_application_is_in_one_of_the_tables():
    tables = [*OF_A_SESSION, *OF_A_RESPONSE, *THAT_GO_ON, *TURNS, *OF_NOBODY, *OWN]
    assert routes() == set(tables) and len(tables) == len(set(tables))


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer"}, {"x-api-key": f"{ALICE}x"}, {"authorization": f"Basic {ALICE}"}],
    ids=["none", "empty", "another", "another scheme"],
)
def test_without_a_key_of_the_list_every_route_refuses_in_the_form_of_its_interface(
    url: str, calls: Calls, headers: dict[str, str]
):
    calls.clear()
    with httpx.Client(base_url=url, headers=headers) as client:
        for method, route in sorted(routes() | {("GET", "/nothing/here")}):
            if route in OPEN:
                continue
            answer = client.request(method, path_of(route, ID, "0" * 32))
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (401, "authentication_error"), (method, route)
            assert ("request_id" in answer.json()) == ("request-id" in answer.headers) == route.startswith(MESSAGES)
            assert ("www-authenticate" in answer.headers) != route.startswith(MESSAGES)
            assert ALICE not in answer.text
        assert calls == []
        assert client.get("/health").json()["status"] == "ok"
        assert [client.get(f"/console{rest}").status_code for rest in ("", "/main.js", "/none")] == [200, 200, 401]


def test_clients_raise_their_own_error_for_a_wrong_key_and_ours_takes_one_of_the_environment(
    url: str, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="nobody", max_retries=0).models.list()
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=url, api_key="nobody", max_retries=0).messages.create(
            model="demo", max_tokens=2, messages=[{"role": "user", "content": "Hello"}]
        )
    with pytest.raises(Unauthorized, match="401: an API key is needed"), Client(url, patience=0) as client:
        client.models()
    monkeypatch.setenv("DFLASH_API_KEY", BOB)
    with Client(url, patience=0) as client:
        assert client.models()
    with pytest.raises(Unauthorized, match="401: this API key"), Client(url, "nobody", patience=0) as client:
        client.models()


# ------------------------------------------------------------------------------------------------ every route


@pytest.mark.parametrize("asked", OF_A_SESSION, ids=" ".join)
def test_a_foreign_session_is_told_from_none_by_nothing(
    alice: httpx.Client, bob: httpx.Client, calls: Calls, turn: str, asked: Asked
):
    method, route = asked
    before = alice.get(f"/v1/sessions/{ID}").json()
    foreign, unknown = (
        told(bob, calls, method, path_of(route, name, turn), OF_A_SESSION[asked], name) for name in (ID, NOBODY)
    )
    assert foreign.status == 404 and foreign == unknown
    assert alice.get(f"/v1/sessions/{ID}").json() == before
    assert [entry["name"] for entry in alice.get(f"/v1/sessions/{ID}/checkpoints").json()["data"][:1]] == ["before"]


@pytest.mark.parametrize("asked", OF_A_RESPONSE, ids=" ".join)
def test_a_foreign_response_is_told_from_none_by_nothing(
    alice: httpx.Client, bob: httpx.Client, calls: Calls, response: str, asked: Asked
):
    method, route = asked
    foreign, unknown = (
        told(bob, calls, method, path_of(route, name), OF_A_RESPONSE[asked], name)
        for name in (response, other(response))
    )
    assert foreign.status == 404 and foreign == unknown
    assert alice.get(f"/v1/responses/{response}").status_code == 200


@pytest.mark.parametrize("asked", THAT_GO_ON, ids=" ".join)
def test_nobody_goes_on_from_a_foreign_response(bob: httpx.Client, calls: Calls, response: str, asked: Asked):
    method, route = asked
    foreign, unknown = (
        told(bob, calls, method, route, {**THAT_GO_ON[asked], "previous_response_id": name}, name)
        for name in (response, other(response))
    )
    assert foreign.status == 404 and foreign == unknown


@pytest.mark.parametrize("asked", TURNS, ids=" ".join)
def test_a_turn_under_anothers_names_is_a_turn_of_ones_own(bob: httpx.Client, turn: str, asked: Asked):
    method, route = asked
    named = {"idempotency-key": "order-7"} | ({"x-session-id": ID} if route != "/v1/completions" else {})
    body = {**TURNS[asked], "prompt_cache_key": ID}
    answer = bob.request(method, route, json=body, headers=named)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-turn-id"] != turn
    assert "hit=none" in answer.headers.get("x-session-resume", "hit=none")
    assert bob.delete(f"/v1/sessions/{ID}").status_code in (200, 404)


def test_everybody_lists_makes_and_imports_sessions_of_his_own(alice: httpx.Client, bob: httpx.Client, turn: str):
    assert [entry["id"] for entry in alice.get("/v1/sessions").json()["data"]].count(ID) == 1
    assert bob.get("/v1/sessions").json()["data"] == []
    document = alice.get(f"/v1/sessions/{ID}/export").content
    assert bob.post("/v1/sessions", json={"id": ID}).status_code == 200, "the name is free to him"
    assert bob.post("/v1/sessions/import", content=document).status_code == 409
    assert bob.post("/v1/sessions/import?id=other", content=document).status_code == 200
    assert {entry["id"] for entry in bob.get("/v1/sessions").json()["data"]} == {ID, "other"}
    assert "other" not in [entry["id"] for entry in alice.get("/v1/sessions").json()["data"]]
    for name in (ID, "other"):
        assert bob.delete(f"/v1/sessions/{name}").status_code == 200
    assert alice.get(f"/v1/sessions/{ID}").status_code == 200
