"""Names in paths: each session that can be made can be shown and deleted, whatever its name is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from deployment.path_names import PathNames
from tests.deployment.serving import serving

NAMES = (
    "x/checkpoints/y", "x/export", "x/turns", f"x/turns/{'a' * 32}/events", "x/checkpoints", "x/fork", "x/migrate",
    "import", "a/b", "/", "..", "50%", "a%2Fexport", "%", "%zz", "a?b#c", "a+b", "health", "~!@$&'()*,;=:[]",
)  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def at(name: str) -> str:
    path = quote(name, safe="")
    return f"/v1/sessions/{path if path.strip('.') else path.replace('.', '%2E')}"


@pytest.mark.parametrize("name", NAMES)
def test_a_session_is_shown_forked_and_deleted_by_its_name_whatever_words_that_has(client: httpx.Client, name: str):
    others = [client.post("/v1/sessions", json={"id": other}).json()["id"] for other in ("x", "a") if other != name]
    assert client.post("/v1/sessions", json={"id": name}).json()["id"] == name
    try:
        shown = client.get(at(name))
        assert (shown.status_code, shown.json()["id"]) == (200, name), shown.text
        assert client.get(f"{at(name)}/turns").json()["data"] == []
        assert client.post(f"{at(name)}/fork", json={"id": "child"}).json()["parent"] == name
        nothing = client.delete(f"{at(name)}/checkpoints/{quote('50%/c', safe='')}")
        assert (nothing.status_code, nothing.json()["error"]["code"]) == (404, "checkpoint_not_found"), nothing.text
        assert "'50%/c'" in nothing.json()["error"]["message"]
        assert client.delete(at(name)).json() == {"id": name, "object": "session.deleted", "deleted": True}
        assert client.get(at(name)).status_code == 404
    finally:
        left = [client.delete(at(other)).status_code for other in (*others, "child")]
    assert left == [200] * len(left), "another session must not have been deleted for it"


def test_a_name_that_is_written_with_its_slashes_is_the_same(client: httpx.Client):
    client.post("/v1/sessions", json={"id": "my/trip"})
    assert client.get("/v1/sessions/my/trip").json()["id"] == "my/trip"
    assert client.get("/v1/sessions/my/trip/turns").status_code == 200
    assert client.delete("/v1/sessions/my/trip").status_code == 200


@pytest.mark.parametrize("path", ["/health", "/%68ealth", "/console/%63onsole.css", "/v1/models/%64emo"])
def test_other_paths_mean_what_they_meant(client: httpx.Client, path: str):
    assert client.get(path).status_code == 200


@pytest.mark.parametrize(
    ("raw", "path", "kept"),
    [
        (b"/a%2fb/c%25", "/a/b/c%", "/a%2Fb/c%25"),
        (b"/%C3%A9", "/\u00e9", "/\u00e9"),
        (b"/%%32F", "/%2F", "/%252F"),
        (None, "/a/50%", "/a/50%25"),
    ],
)
def test_only_what_came_as_a_slash_parts_a_path(raw: bytes | None, path: str, kept: str):
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])

    scope: dict[str, Any] = {"type": "http", "path": path} | ({} if raw is None else {"raw_path": raw})
    nothing: Any = None
    asyncio.run(PathNames(app)(scope, nothing, nothing))
    assert seen == [kept] and scope["path"] == path
