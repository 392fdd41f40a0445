"""What a turn's end takes from the engine for the copies of its session: what the turn added."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from deployment.durable_copies import DurableCopies
from deployment.engine.commands import Call
from deployment.engine.events import Event, Exported
from deployment.engine.service import EngineService
from deployment.metrics.transfers import Transfers
from deployment.ownership.words import Epoch, Order
from deployment.session import Session
from deployment.session_copies import SessionCopies
from state.document import open_document
from state.geometry import PAGE_TOKENS
from tests.deployment.growing import KEY, grown
from tests.engine.tiny import tiny_models, tiny_options


class Engine:
    """A tiny engine, and the bytes of segments that each export has brought."""

    def __init__(self) -> None:
        options = tiny_options("none", images=8, pages=24)
        self.service = EngineService(tiny_models("none"), options)
        self.brought: list[int] = []

    async def call(self, command: Call) -> Event:
        answer = await self.service.call(command)
        assert isinstance(answer, Exported)
        piece = answer.piece.data if answer.piece is not None else b""
        self.brought.append(sum(len(segment.data) for segment in answer.segments) + len(piece))
        return answer


def test_copies_of_a_session_are_made_of_the_copy_before_and_what_the_turn_added() -> None:
    published: list[Any] = []
    owned: Any = SimpleNamespace(
        end=lambda key: Order(Epoch(1, 1), len(published) + 1),
        publish=lambda key, sequence, frontiers, document, keep: published.append(bytes(document)),
    )

    async def steps() -> None:
        engine, session = Engine(), Session(KEY, Epoch(1, 1))
        durable = DurableCopies("app", engine.service, None, 0)
        sessions = {KEY: session}
        service: Any = engine
        unused: Any = None
        copies = SessionCopies(
            "node", service, owned, durable, Transfers(), sessions, sessions.get, write=unused, end=unused, spawn=unused
        )
        try:
            for asked in (150, 10):
                engine.brought.clear()
                await grown(engine.service, session, asked)
                await copies.copy(session)
        finally:
            engine.service.close()
        document = open_document(published[-1])
        document.check_payload()
        assert document.record().ledger == session.ledger and session.newest.document.nbytes == len(published[-1])
        old, full = open_document(published[0]).manifest, 150 // PAGE_TOKENS
        pages = sorted(segment.size for segment in old.segments)[-full:]
        assert sum(engine.brought) <= len(published[-1]) - sum(pages), "pages that were there were brought again"

    asyncio.run(steps())
