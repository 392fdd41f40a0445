"""Media from http(s) URLs, for servers whose operator names the hosts.

The server stands where its clients do not: inside a network, beside other machines' metadata. So a URL leads only to
listed hosts, each step of a redirect again; their names must resolve to public addresses only, and the connection is
made to one of the addresses that were checked, whatever the name resolves to a moment later.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import httpx

from model.errors import MediaError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]

MAX_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True)
class Fetched:
    """`media_type`: as the host says it; None if it says nothing."""

    data: bytes
    media_type: str | None


class TooLarge(MediaError):
    """More bytes than were asked for."""


async def resolved(host: str, port: int) -> Sequence[Address]:
    """OSError where the name is not known, UnicodeError where it is none."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [ipaddress.ip_address(entry[4][0]) for entry in found]


def is_public(address: Address) -> bool:
    """Whether it is one of the whole Internet's, also behind every way in which IPv6 carries an IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        carried = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if carried is None and address in _NAT64:
            carried = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if carried is not None:
            return is_public(carried)
        if address.is_site_local:  # no longer in use, which Python takes for global
            return False
    return address.is_global and not address.is_multicast


class Fetcher:
    """`hosts`: as in `MediaLimits`. `resolve` and `allowed`, which say where a name leads and whether one may go there,
    and `transport` are for tests."""

    def __init__(
        self,
        hosts: Sequence[str],
        resolve: Resolve = resolved,
        allowed: Callable[[Address], bool] = is_public,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._hosts = tuple(host.lower() for host in hosts)
        self._resolve = resolve
        self._allowed = allowed
        self._transport = transport

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return httpx.create_ssl_context()

    async def fetch(self, url: str, limit: int) -> Fetched:
        """At most `limit` bytes. Raises MediaError for a URL that is not followed or brings nothing, `TooLarge`. Its
        caller limits the time."""
        place = self._checked(url)
        for _ in range(1 + MAX_REDIRECTS):
            # A client for each step: a kept connection would be found again by its address, not by its name.
            async with httpx.AsyncClient(
                transport=self._transport, verify=self._tls, trust_env=False, follow_redirects=False, timeout=None
            ) as client:
                found = await self._asked(client, place, limit)
            if isinstance(found, Fetched):
                return found
            place = found
        raise MediaError(f"leads to more than {MAX_REDIRECTS} redirects")

    def _checked(self, url: str) -> httpx.URL:
        """The URL, if it may be asked for."""
        if not self._hosts:
            raise MediaError("is a URL, but this server fetches none; send the bytes as a data URL")
        try:
            place = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise MediaError(f"is no URL: {str(error)[:200]}") from None
        if place.scheme not in PORTS:
            raise MediaError(f"leads to a {place.scheme[:20]!r} URL; it must be http or https")
        if place.userinfo:
            raise MediaError("holds a user name or password; a URL must have none")
        host = place.raw_host.decode("ascii").lower().rstrip(".")
        if not any(_matches(listed, host, place) for listed in self._hosts):
            raise MediaError(
                f"leads to host {place.netloc.decode('ascii')[:200]!r}, which is not on this server's list"
            )
        return place

    async def _asked(self, client: httpx.AsyncClient, place: httpx.URL, limit: int) -> Fetched | httpx.URL:
        """What is there, or where else it is."""
        host = place.raw_host.decode("ascii")
        headers = {"host": place.netloc.decode("ascii"), "accept-encoding": "identity", "user-agent": "dflash-serve"}
        refused: Exception | None = None
        for address in await self._addresses(host, place.port or PORTS[place.scheme]):
            request = client.build_request(
                "GET", place.copy_with(host=str(address)), headers=headers, extensions={"sni_hostname": host}
            )
            try:
                answer = await client.send(request, stream=True)
            except httpx.ConnectError as error:
                refused = error
                continue
            except httpx.HTTPError as error:
                raise MediaError(f"cannot be fetched: {error or type(error).__name__}") from None
            try:
                return await self._read(answer, place, limit)
            except httpx.HTTPError as error:
                raise MediaError(f"cannot be fetched: {error or type(error).__name__}") from None
            finally:
                await answer.aclose()
        raise MediaError(f"cannot be fetched: {refused}")

    async def _addresses(self, host: str, port: int) -> Sequence[Address]:
        try:
            addresses = [ipaddress.ip_address(host.strip("[]"))]
        except ValueError:
            try:
                addresses = await self._resolve(host, port)
            except UnicodeError:  # a name that no host can have is not even looked up
                raise MediaError(
                    f"leads to host {host[:200]!r}, which is no name: each part has 1 to 63 letters"
                ) from None
            except OSError as error:
                raise MediaError(f"cannot be fetched: {host!r} is not known ({error.strerror})") from None
        if not addresses or not all(map(self._allowed, addresses)):
            raise MediaError(f"leads to host {host!r}, which has an address that is not public")
        return list(dict.fromkeys(addresses))

    async def _read(self, answer: httpx.Response, place: httpx.URL, limit: int) -> Fetched | httpx.URL:
        if answer.status_code in _REDIRECTS:
            return self._redirected(answer, place)
        if answer.status_code != 200:
            raise MediaError(f"cannot be fetched: its host answers with status {answer.status_code}")
        if answer.headers.get("content-encoding", "identity").lower() != "identity":
            raise MediaError("cannot be fetched: its host sends it compressed, without being asked to")
        stated = answer.headers.get("content-length", "")
        data = bytearray()
        if not (stated.isdecimal() and int(stated) > limit):
            async for part in answer.aiter_raw():
                data += part
                if len(data) > limit:
                    break
            else:
                media_type = answer.headers.get("content-type", "").partition(";")[0].strip()
                return Fetched(bytes(data), media_type or None)
        raise TooLarge(f"has more than {limit} bytes")

    def _redirected(self, answer: httpx.Response, place: httpx.URL) -> httpx.URL:
        location = answer.headers.get("location")
        if not location:
            raise MediaError("cannot be fetched: its host redirects to nowhere")
        try:
            further = self._checked(str(place.join(location)))
        except (MediaError, httpx.InvalidURL) as error:
            raise MediaError(f"is redirected to where it may not lead: it {error}") from None
        if place.scheme == "https" and further.scheme != "https":
            raise MediaError("is redirected from https to http")
        return further


def _matches(listed: str, host: str, place: httpx.URL) -> bool:
    name, colon, port = listed.partition(":")
    wanted = int(port) if colon else PORTS[place.scheme]
    if (place.port or PORTS[place.scheme]) != wanted:
        return False
    return host.endswith(name[1:]) and len(host) > len(name) - 1 if name.startswith("*.") else host == name
