"""URLs of media: where they may lead, whatever names, redirects and hosts say."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from ipaddress import ip_address
from typing import Any

import httpx
import pytest

from deployment.media_fetch import Address, Fetched, Fetcher, TooLarge, is_public, resolved
from model.errors import MediaError

PUBLIC = "93.184.215.14"
HOSTS = ("example.org", "*.images.org", "odd.org:8443")


class Site:
    """Names, and what is answered under URLs. `asked`: every request that was made."""

    def __init__(self, names: dict[str, Sequence[str]] | None = None, **answers: httpx.Response) -> None:
        self.asked: list[httpx.Request] = []
        self._names = names or {}
        self._answers = answers

    async def resolve(self, host: str, port: int) -> list[Address]:
        if host == "unknown.images.org":
            raise socket.gaierror(-2, "Name or service not known")
        return [ip_address(address) for address in self._names.get(host, (PUBLIC,))]

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return self._answers[request.url.path.strip("/") or "root"]

    def fetch(self, url: str, limit: int = 100, hosts: Sequence[str] = HOSTS) -> Fetched:
        fetcher = Fetcher(hosts, self.resolve, transport=httpx.MockTransport(self.answer))
        return asyncio.run(fetcher.fetch(url, limit))


class Body(httpx.AsyncByteStream):
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._data


def sent(data: bytes, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(200, headers=named, stream=Body(data))


def to(location: str, status: int = 302) -> httpx.Response:
    return httpx.Response(status, headers={"location": location})


def test_a_listed_host_is_asked_at_the_address_that_was_checked_under_its_own_name() -> None:
    site = Site(a=sent(b"x" * 100, content_type="image/png; charset=x"))
    assert site.fetch("https://Example.org/a?b=c#d") == Fetched(b"x" * 100, "image/png")
    (request,) = site.asked
    assert request.url == f"https://{PUBLIC}/a?b=c#d" and request.headers["host"] == "example.org"
    assert request.extensions["sni_hostname"] == "example.org"
    assert request.headers["accept-encoding"] == "identity" and "cookie" not in request.headers


@pytest.mark.parametrize("url", ["http://example.org/a", "https://a.b.images.org/a", "https://odd.org:8443/a"])
def test_what_the_list_names_is_fetched(url: str) -> None:
    assert Site(a=sent(b"x")).fetch(url) == Fetched(b"x", None)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a",
        "https://example.org.evil.net/a",
        "https://evilexample.org/a",
        "https://images.org/a",
        "https://example.org:444/a",
        "https://odd.org/a",
        "https://user:pass@example.org/a",
        "https://example.org@evil.net/a",
        "https://127.0.0.1/a",
        "https://[::1]/a",
        "https:///a",
        "https://exämple.org/a",
        "file:///etc/passwd",
    ],
)
def test_what_the_list_does_not_name_is_never_asked_for(url: str) -> None:
    site = Site(a=sent(b"x"))
    with pytest.raises(MediaError):
        site.fetch(url)
    assert site.asked == []


def test_without_a_list_nothing_is_fetched() -> None:
    with pytest.raises(MediaError, match="this server fetches none; send the bytes as a data URL"):
        Site().fetch("https://example.org/a", hosts=())


PRIVATE = """127.0.0.1 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 255.255.255.255 224.0.0.1
    ::1 :: fe80::1 fec0::1 fc00::1 ff02::1 ::ffff:10.0.0.1 64:ff9b::a00:1 2002:a00:1:: 2001:db8::1"""


@pytest.mark.parametrize("address", PRIVATE.split())
def test_a_name_with_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert not is_public(ip_address(address))
    for addresses in ([address], [PUBLIC, address]):
        site = Site({"example.org": addresses}, a=sent(b"x"))
        with pytest.raises(MediaError, match=r"host 'example\.org', which has an address that is not public") as caught:
            site.fetch("https://example.org/a")
        assert site.asked == [] and address not in str(caught.value)


def test_a_listed_literal_address_must_be_public_too() -> None:
    with pytest.raises(MediaError, match="not public"):
        Site().fetch("http://10.0.0.1/a", hosts=("10.0.0.1",))
    assert Site(a=sent(b"x")).fetch(f"http://{PUBLIC}/a", hosts=(PUBLIC,)).data == b"x"


@pytest.mark.parametrize("label", ["a" * 64, "a."])
def test_a_name_that_no_host_can_have_is_refused_as_one(label: str) -> None:
    fetcher = Fetcher(("*.images.org",))
    with pytest.raises(MediaError, match=r"leads to host 'a+\.+images\.org', which is no name"):
        asyncio.run(fetcher.fetch(f"http://{label}.images.org/", 100))


def test_a_redirect_is_checked_as_the_url_was() -> None:
    site = Site(a=to("/b", 301), b=to("https://c.images.org/c", 307), c=sent(b"x"))
    assert site.fetch("https://example.org/a").data == b"x"
    assert [request.headers["host"] for request in site.asked] == ["example.org", "example.org", "c.images.org"]


@pytest.mark.parametrize(
    "location, nature",
    [
        ("http://169.254.169.254/latest/meta-data", "redirected to where it may not lead: it leads to host '169"),
        ("https://evil.net/x", "redirected to where it may not lead: it leads to host 'evil.net'"),
        ("https://local.images.org/x", "'local.images.org', which has an address that is not public"),
        ("file:///etc/passwd", "redirected to where it may not lead: it leads to a 'file' URL"),
        ("http://example.org/x", "redirected from https to http"),
        ("https://example.org/a", "more than 3 redirects"),
    ],
)
def test_a_redirect_off_the_list_is_not_followed(location: str, nature: str) -> None:
    site = Site({"local.images.org": ["192.168.1.1"]}, a=to(location), x=sent(b"secret"))
    with pytest.raises(MediaError, match=nature):
        site.fetch("https://example.org/a")
    assert all(request.url.path == "/a" for request in site.asked)


@pytest.mark.parametrize(
    "answer, nature",
    [
        (httpx.Response(404), "its host answers with status 404"),
        (httpx.Response(302), "redirects to nowhere"),
        (sent(b"x", content_encoding="gzip"), "sends it compressed"),
    ],
)
def test_what_brings_nothing_is_refused(answer: httpx.Response, nature: str) -> None:
    with pytest.raises(MediaError, match=nature):
        Site(a=answer).fetch("https://example.org/a")


def test_a_name_that_is_unknown_is_refused() -> None:
    with pytest.raises(MediaError, match=r"'unknown\.images\.org' is not known"):
        Site().fetch("https://unknown.images.org/a")


# ------------------------------------------------------------------------------------------------ a real host


def told_by(answer: Callable[[asyncio.StreamWriter], Any], limit: int = 100) -> tuple[Fetched, list[bytes]]:
    """What a server on this machine gives, which the fetcher is let to for once, and what it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        await answer(writer)
        writer.close()

    async def run() -> Fetched:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            fetcher = Fetcher((f"localhost:{port}",), resolved, allowed=lambda address: True)
            return await asyncio.wait_for(fetcher.fetch(f"http://localhost:{port}/a", limit), 5)

    return asyncio.run(run()), asked


def test_bytes_come_over_a_connection() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/gif\r\ncontent-length: 3\r\n\r\nabc")

    found, (asked,) = told_by(answer)
    assert found == Fetched(b"abc", "image/gif")
    assert asked.startswith(b"GET /a HTTP/1.1\r\n") and b"host: localhost:" in asked.lower()


def test_a_host_that_sends_more_than_it_may_is_cut_off() -> None:
    sent = 0

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while sent < 64 << 20:
                writer.write(bytes(1 << 16))
                await writer.drain()
                sent += 1 << 16
        except ConnectionError:
            pass

    with pytest.raises(TooLarge):
        told_by(answer)
    assert sent < 32 << 20


def test_a_host_that_says_it_sends_too_much_is_not_listened_to() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 101\r\n\r\n")
        await asyncio.sleep(4)

    with pytest.raises(TooLarge):
        told_by(answer)
