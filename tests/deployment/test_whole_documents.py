"""What a turn's end takes from the engine for the copies of its session: what the turn added."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from deployment import session_copies
from deployment.durable_copies import DurableCopies
from deployment.engine.commands import Call, Drop
from deployment.engine.errors import INTERNAL_ERROR, EngineError
from deployment.engine.events import Event, Exported
from deployment.engine.service import EngineService
from deployment.errors import RequestError
from deployment.metrics.transfers import Transfers
from deployment.ownership.words import Epoch, Order, SessionKey
from deployment.session import Session
from deployment.session_copies import SessionCopies
from state.document import open_document
from state.geometry import PAGE_TOKENS
from tests.deployment.growing import KEY, grown
from tests.engine.tiny import tiny_models, tiny_options


class Engine:
    """A tiny engine, and the bytes of segments that each export has brought. `pieces` of images: whose, from where on,
    and whether they are the last ones."""

    def __init__(self) -> None:
        options = tiny_options("none", images=8, pages=24)
        self.service = EngineService(tiny_models("none"), options)
        self.brought: list[int] = []
        self.pieces: list[tuple[str, int, bool]] = []
        self.before: Callable[[int], Any] | None = None

    async def call(self, command: Call) -> Event:
        if self.before is not None:
            await self.before(len(self.brought))
        answer = await self.service.call(command)
        assert isinstance(answer, Exported)
        piece = b""
        if answer.piece is not None:
            piece = answer.piece.data
            self.pieces.append((answer.session, answer.piece.offset, answer.piece.sha256 is not None))
        self.brought.append(sum(len(segment.data) for segment in answer.segments) + len(piece))
        return answer


class Place:
    """A replica with one session, which has had a turn: its copies, and as of which records they were published."""

    def __init__(self) -> None:
        self.engine, self.session = Engine(), Session(KEY, Epoch(1, 1))
        self.published: list[tuple[int, bytes]] = []
        self.end = 1
        durable, sessions = DurableCopies("app", self.engine.service, None, 0), {KEY: self.session}
        owned: Any = SimpleNamespace(
            end=lambda key: Order(Epoch(1, 1), self.end),
            publish=lambda key, sequence, *image: self.published.append((sequence, bytes(image[1]))),
        )
        service: Any = self.engine
        unused: Any = None
        self.copies = SessionCopies(
            "node", service, owned, durable, Transfers(), sessions, sessions.get, write=unused, end=unused, spawn=unused
        )

    async def turn(self, asked: int) -> None:
        await grown(self.engine.service, self.session, asked)
        self.end += 1

    def before_slice(self, number: int, action: Callable[[], Any]) -> None:
        async def act(asked: int) -> None:
            if asked == number:
                self.engine.before = None
                await action()

        self.engine.brought.clear()
        self.engine.before = act


@asynccontextmanager
async def place(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Place, None]:
    """With slices so small that an image has several."""
    monkeypatch.setattr(session_copies, "SLICE_BYTES", 200)
    here = Place()
    try:
        await here.turn(40)
        yield here
    finally:
        here.engine.service.close()


def of(document: bytes) -> tuple[tuple[int, ...], list[int]]:
    """The ledger, and where its checkpoints stand."""
    opened = open_document(document)
    opened.check_payload()
    return opened.record().ledger, [entry.frontier for entry in opened.manifest.checkpoints]


def test_an_export_that_its_client_leaves_costs_the_next_copy_nothing(monkeypatch) -> None:
    async def steps() -> None:
        async with place(monkeypatch) as here:
            leaving = asyncio.create_task(here.copies.document(here.session))

            async def leave() -> None:
                leaving.cancel()
                await asyncio.sleep(0)

            here.before_slice(2, leave)
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert not here.engine.pieces[-1][-1], "it stands within the image"
            await here.copies.copy(here.session)
            assert of(here.published[-1][1])[0] == here.session.ledger

    asyncio.run(steps())


def test_a_turn_between_two_slices_of_an_export_does_not_enter_it(monkeypatch) -> None:
    async def steps() -> None:
        async with place(monkeypatch) as here:
            before = (await here.copies.document(here.session)).tobytes()
            here.before_slice(1, lambda: here.turn(20))
            assert (await here.copies.document(here.session)).tobytes() == before
            assert len(here.session.ledger) > len(of(before)[0])
            assert here.session.checkpoints == () and not here.published, "an export is no copy"

    asyncio.run(steps())


def test_a_document_whose_state_goes_meanwhile_is_of_a_later_moment(monkeypatch) -> None:
    async def steps() -> None:
        async with place(monkeypatch) as here:

            async def gone() -> None:
                await here.engine.service.call(Drop("d", here.session.engine_id))
                await here.turn(20)

            here.before_slice(1, gone)
            await here.copies.copy(here.session)
            (sequence, document), end = here.published[-1], here.session.frontier
            assert sequence == here.end and of(document) == (here.session.ledger, [end])

            async def under_a_turn() -> None:
                await gone()
                here.session.moving = True

            await here.turn(20)
            here.before_slice(1, under_a_turn)
            with pytest.raises(RequestError) as caught:
                await here.copies.document(here.session)
            assert caught.value.refused.code == "session_busy", "there is no such moment until the turn ends"

    asyncio.run(steps())


def test_a_small_session_does_not_wait_for_all_of_a_large_one(monkeypatch) -> None:
    async def steps() -> None:
        async with place(monkeypatch) as here:
            await here.turn(150)
            small = Session(SessionKey("b" * 64, "small"), Epoch(1, 1))
            await grown(here.engine.service, small, 20)
            export = asyncio.create_task(here.copies.document(here.session))
            await asyncio.sleep(0)
            document = await here.copies.document(small)
            assert not export.done()
            assert of(document.tobytes())[0] == small.ledger
            assert of((await export).tobytes())[0] == here.session.ledger
            of_each = [(name, offset) for name, offset, _ in here.engine.pieces]
            assert len(set(of_each)) == len(of_each) > 2, "no image began anew since another one came between"
            assert [last for *_, last in here.engine.pieces].count(True) == 2

    asyncio.run(steps())


def test_copies_of_a_session_are_made_of_the_copy_before_and_what_the_turn_added() -> None:
    async def steps() -> None:
        here = Place()
        try:
            for asked in (150, 10):
                await here.turn(asked)
                here.engine.brought.clear()
                await here.copies.copy(here.session)
        finally:
            here.engine.service.close()
        (_, first), (_, last) = here.published
        assert of(last)[0] == here.session.ledger and here.session.newest.document.nbytes == len(last)
        old, full = open_document(first).manifest, 150 // PAGE_TOKENS
        pages = sorted(segment.size for segment in old.segments)[-full:]
        assert sum(here.engine.brought) <= len(last) - sum(pages), "pages that were there were brought again"

    asyncio.run(steps())


def test_a_turn_whose_copy_fails_becomes_durable_all_the_same(monkeypatch) -> None:
    async def steps() -> None:
        async with place(monkeypatch) as here:
            durable: list[Session] = []

            async def noted(session: Session) -> None:
                durable.append(session)

            async def broken() -> None:
                raise EngineError(INTERNAL_ERROR, "the engine failed on it")

            monkeypatch.setattr(here.copies, "make_durable", noted)
            here.before_slice(1, broken)
            with pytest.raises(EngineError, match="failed on it"):
                await here.copies.turn_ended(here.session)
            assert not here.published and durable == [here.session]

    asyncio.run(steps())
