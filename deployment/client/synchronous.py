"""The client for programs that wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import httpx

from deployment.client import calls
from deployment.client.answers import document_of, pause_after_answer, pause_after_failure
from deployment.client.calls import Call, Message
from deployment.client.connection import Server, has_begun, timeout_of
from deployment.client.events import Answer, AnswerEvent, collected
from deployment.client.outage import Outage, Patience
from deployment.client.reading import TurnReading


class Client:
    """`patience`: seconds that an outage may last before the client gives up. Every method raises ClientError, and
    ValueError for arguments of which no request can be made. What dictionaries hold: docs/http.md."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        *,
        patience: float | Patience = 60.0,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`transport` and `sleep`: for tests."""
        server = Server.of(url, api_key)
        self._url = server.url
        self._patience = patience if isinstance(patience, Patience) else Patience(patience)
        self._http = httpx.Client(base_url=server.url, headers=server.headers, transport=transport)
        self._sleep = sleep

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ turns

    def ask(
        self,
        messages: Sequence[Message],
        *,
        session: str | None = None,
        append: bool = False,
        options: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> Answer:
        """A whole answer; arguments as of `stream`."""
        told = self.stream(messages, session=session, append=append, options=options, idempotency_key=idempotency_key)
        return collected(told)

    def stream(
        self,
        messages: Sequence[Message],
        *,
        session: str | None = None,
        append: bool = False,
        options: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> Generator[AnswerEvent, None, None]:
        """A turn's events, over as many connections as it takes; no text comes twice, and none is left out.

        `session`: the turn belongs to it; with `append`, `messages` holds only what is new. `options`: the request's
        further fields. `idempotency_key`: by default one of its own, so that a turn never runs twice. Whoever leaves
        the loop early should close the iterator; the server cancels the turn when nobody has read it for a while.
        """
        asked = calls.turn(messages, session, append, options, idempotency_key)
        return self._read(TurnReading(asked, Outage(self._url, self._patience)))

    def _read(self, reading: TurnReading) -> Generator[AnswerEvent, None, None]:
        while not reading.over:
            call = reading.connect()
            request = call.request(self._http, timeout_of(call))
            try:
                response = self._http.send(request, stream=True)
                has_begun(request)
                try:
                    if not response.is_success:
                        response.read()
                    yield from reading.answered(response)
                    parts = response.iter_bytes()
                    while not (reading.left or reading.over):
                        part = next(parts, None)
                        yield from reading.ended() if part is None else reading.fed(part)
                finally:
                    response.close()
            except httpx.TransportError as error:
                yield from reading.failed(error)
            if not reading.over:
                self._sleep(reading.pause)

    # ------------------------------------------------------------------------------------------------ sessions, server

    def models(self) -> list[dict[str, Any]]:
        return self._listed(calls.models())

    def replicas(self) -> list[dict[str, Any]]:
        return self._listed(calls.replicas())

    def sessions(self) -> list[dict[str, Any]]:
        return self._listed(calls.sessions())

    def session(self, name: str) -> dict[str, Any]:
        """With transcript and turns."""
        return self._told(calls.session(name))

    def create(self, name: str | None = None) -> dict[str, Any]:
        """A session before its first turn; without a name, under a random one."""
        return self._told(calls.create(name))

    def fork(
        self,
        name: str,
        child: str | None = None,
        *,
        checkpoint: str | None = None,
        turn: str | None = None,
        frontier: int | None = None,
    ) -> dict[str, Any]:
        """A second session with the same past, up to a checkpoint, a turn's end or a frontier if one is named."""
        return self._told(calls.fork(name, child, checkpoint, turn, frontier))

    def turns(self, name: str) -> list[dict[str, Any]]:
        return self._listed(calls.turns(name))

    def checkpoints(self, name: str) -> list[dict[str, Any]]:
        return self._listed(calls.checkpoints(name))

    def checkpoint(self, name: str, called: str | None = None) -> dict[str, Any]:
        """Keeps where the session stands now, under a name that the answer tells."""
        return self._told(calls.checkpoint(name, called))

    def delete_checkpoint(self, name: str, checkpoint: str) -> dict[str, Any]:
        return self._told(calls.delete_checkpoint(name, checkpoint))

    def migrate(self, name: str, to: str | None = None) -> dict[str, Any]:
        """Moves it to a replica, or to any other one than its owner."""
        return self._told(calls.migrate(name, to))

    def export(self, name: str) -> bytes:
        """The session as one document, `.dfs`."""
        return self._answer(calls.export(name)).content

    def import_(self, document: bytes, name: str | None = None) -> dict[str, Any]:
        """A new session out of a document; without a name, under its own."""
        return self._told(calls.import_(document, name))

    def delete(self, name: str) -> dict[str, Any]:
        return self._told(calls.delete(name))

    def _listed(self, call: Call) -> list[dict[str, Any]]:
        return list(self._told(call).get("data") or [])

    def _told(self, call: Call) -> dict[str, Any]:
        return document_of(self._answer(call))

    def _answer(self, call: Call) -> httpx.Response:
        outage = Outage(self._url, self._patience)
        while True:
            try:
                response = self._http.send(call.request(self._http, timeout_of(call)))
            except httpx.TransportError as error:
                pause = pause_after_failure(error, call, outage)
            else:
                pause = pause_after_answer(response, call, outage)
                if pause is None:
                    return response
            self._sleep(pause)
