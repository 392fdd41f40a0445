"""A server without API keys, and the pages of others that a browser lets send requests to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployment.settings import AppArgs
from deployment.web_pages import why_not
from tests.deployment.serving import serving

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


def told(server: str | None = "127.0.0.1", names: tuple[str, ...] = (), **headers: str) -> str | None:
    """The refusal's code."""
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "headers": raw, "server": None if server is None else (server, 8000)}
    refused = why_not(scope, names)
    assert refused is None or (refused.status == 403 and "api_keys" in refused.message)
    return refused.code if refused else None


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "http://127.0.0.2:8000", "http://[", "evil"])
@pytest.mark.parametrize("server", ["127.0.0.1", "10.0.0.1"])
def test_a_page_of_another_host_is_refused(origin: str, server: str):
    assert told(server, host="127.0.0.1:8000", origin=origin) == "foreign_page"


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost:8000", "http://localhost:3000"),
        ("LOCALHOST", "https://localhost"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_the_servers_own_pages_are_served(host: str, origin: str):
    assert told(host=host, origin=origin) is None is told("::1", host=host, origin=origin)


@pytest.mark.parametrize("host", ["evil.example:8000", "localhost.evil.example", "evil.example@localhost.x", "["])
def test_a_name_that_somebody_else_gave_this_machine_is_refused(host: str):
    for here in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        assert told(here, host=host) == "foreign_host"
    for outside in ("10.0.0.1", "::ffff:10.0.0.1"):
        assert told(outside, host=host) is None, "who reaches it from outside may know it by any name"
    assert told(None, host=host) is None


def test_names_that_are_configured_are_the_servers_own():
    assert told(host="Chat.Example.org", names=("chat.example.ORG",)) is None
    assert told(host="chat.example.org", origin="https://chat.example.org", names=("chat.example.org",)) is None
    assert told(host="chat.example.org", names=("example.org",)) == "foreign_host"


def test_programs_that_are_no_browser_need_neither_header():
    assert told() is None
    assert told(origin="http://evil.example") == "foreign_page"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(args=AppArgs(host_names=("chat.example.org",))) as url:
        yield url


def test_over_http_a_page_gets_nothing_but_the_console_and_whether_it_is_there(url: str):
    page = {"origin": "http://evil.example"}
    for method, path in (("GET", "/v1/sessions"), ("POST", "/v1/chat/completions"), ("OPTIONS", "/v1/models")):
        answer = httpx.request(method, f"{url}{path}", headers=page)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_page")
        assert answer.json()["error"]["type"] == "permission_error"
    message = httpx.post(f"{url}/v1/messages", headers=page)
    assert (message.status_code, message.json()["error"]["type"]) == (403, "permission_error")
    assert httpx.get(f"{url}/v1/models", headers={"host": "evil.example"}).json()["error"]["param"] == "Host"
    for headers in (page, {"host": "evil.example"}):
        assert [httpx.get(f"{url}{path}", headers=headers).status_code for path in ("/health", "/console")] == [200] * 2
    for host in ("localhost", "chat.example.org", "[::1]:80"):
        own = httpx.get(f"{url}/v1/models", headers={"host": host, "origin": f"https://{host}"})
        assert own.status_code == 200 and not any("access-control" in name for name in own.headers)


def test_where_keys_say_who_asks_a_page_is_asked_for_one_like_anybody(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("alice alices-own-key-0001\n")
    keys.chmod(0o600)
    headers = {"origin": "http://evil.example", "host": "evil.example"}
    with serving(args=AppArgs(api_keys=keys)) as url:
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 401
        allowed = httpx.get(f"{url}/v1/models", headers={**headers, "x-api-key": "alices-own-key-0001"})
        assert allowed.status_code == 200


def test_names_of_the_server_are_a_list_or_text_of_hosts():
    assert AppArgs(host_names="a.example, b").host_names == ("a.example", "b")  # pyright: ignore[reportArgumentType]
    for wrong in ("*.example", "a.example:80", "http://a", "*"):
        with pytest.raises(ValueError, match="host_names"):
            AppArgs(host_names=(wrong,))
