"""What the durable tier has of a session after its turns and after its rest, written by a real engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deployment import durable_copies
from deployment.durable_copies import DurableCopies
from deployment.engine.commands import Drop, Publish
from deployment.engine.durability import open_tier
from deployment.engine.events import Publishing
from deployment.engine.service import EngineService
from deployment.ownership.words import Epoch, Order, SessionKey
from deployment.publication_orders import PUBLICATIONS, logged_at, published_as
from deployment.session import Session
from deployment.whole_documents import SLICE_BYTES
from state.document import open_document
from state.durable import DurableTier
from state.publication_policy import IDLE_SECONDS
from tests.deployment.growing import KEY, grown
from tests.engine.tiny import tiny_models, tiny_options

BUDGET = 1 << 30


@pytest.mark.parametrize("slice_bytes", [SLICE_BYTES, 500])
def test_a_session_that_rests_has_its_state_there_after_every_turn_not_after_the_first_alone(
    tmp_path: Path, serve_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, slice_bytes: int
):
    """The log stands still between a turn's end and the session's rest: both are written, one after the other."""
    monkeypatch.setattr(durable_copies, "SLICE_BYTES", slice_bytes)
    now = [0.0]

    async def steps() -> None:
        service, copies = durable_engine(tmp_path, now, images=8)
        session = Session(KEY, Epoch(1, 2))
        tier = open_tier(str(tmp_path), BUDGET)
        try:
            for turn in range(3):
                await ended_turn(service, copies, tier, session)
                now[0] += IDLE_SECONDS
                await copies.publish_idle(lambda key: session)
                await until(lambda: frontier(tier)[1] == session.frontier, f"the state of turn {turn}")
        finally:
            service.close()
        publication = open_tier(str(tmp_path), BUDGET).latest(KEY)
        assert publication is not None and logged_at(publication[0]) == Order(session.epoch, session.order)

    with serve_log.at_level(logging.WARNING):
        asyncio.run(steps())
    assert not [
        record for record in serve_log.records if record.name == "ray.serve" and record.levelno >= logging.WARNING
    ]


def test_a_session_that_others_evict_before_it_rests_keeps_its_state_there_and_is_not_written_again_and_again(
    tmp_path: Path,
):
    now = [0.0]

    async def steps() -> None:
        service, copies = durable_engine(tmp_path, now, images=2)
        session = Session(KEY, Epoch(1, 2))
        tier = open_tier(str(tmp_path), BUDGET)
        try:
            for _ in range(2):
                await ended_turn(service, copies, tier, session)
            (_, state), evicted = frontier(tier), service.was_evicted
            for number in range(12):
                other = Session(SessionKey("a" * 64, f"other {number}"), Epoch(1, 2), (number % 7, 1 + number // 7))
                await grown(service, other, 60)
            assert evicted(session.engine_id) and 0 < state < session.frontier
            for _ in range(3):
                now[0] += IDLE_SECONDS
                await copies.publish_idle(lambda key: session)
                await until(lambda: not copies._on_the_way, "an outcome")
        finally:
            service.close()
        publication = tier.latest(KEY)
        assert publication is not None and frontier(tier) == (len(session.ledger), state)
        assert max(at for _, at in copies.checkpoints(KEY)) == state
        assert publication[0] == published_as(Order(session.epoch, session.order), 1)

    asyncio.run(steps())


def test_a_session_that_leaves_while_its_state_is_read_keeps_what_was_written_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(durable_copies, "SLICE_BYTES", 1)
    now = [0.0]

    async def steps() -> None:
        service, copies = durable_engine(tmp_path, now, images=8)
        session = Session(KEY, Epoch(1, 2))
        tier, asked, left = open_tier(str(tmp_path), BUDGET), copies._asked, False

        async def leaves(publish: Publish) -> Publishing:
            nonlocal left
            answer = await asked(publish)
            if not publish.record_alone and not answer.whole:
                copies.forget(KEY)
                await service.call(Drop("drop", session.engine_id))
                left = True
            return answer

        try:
            for _ in range(2):
                await ended_turn(service, copies, tier, session)
            (_, state), before = frontier(tier), tier.latest(KEY)
            assert state > 0 and before is not None
            monkeypatch.setattr(copies, "_asked", leaves)
            now[0] += IDLE_SECONDS
            await copies.publish_idle(lambda key: session)
            assert left and not copies._on_the_way
        finally:
            service.close()
        after = tier.latest(KEY)
        assert after is not None and after[0] == before[0] and frontier(tier)[1] == state

    asyncio.run(steps())


def durable_engine(place: Path, now: list[float], images: int) -> tuple[EngineService, DurableCopies]:
    """`now`: the seconds that its copies read, in its only place."""
    options = replace(tiny_options("none", images=images, pages=24), durable=str(place), durable_bytes=BUDGET)
    service = EngineService(tiny_models("none"), options)
    copies = DurableCopies("app", service, str(place), BUDGET, clock=lambda: now[0])
    copies.start()
    return service, copies


async def ended_turn(service: EngineService, copies: DurableCopies, tier: DurableTier, session: Session) -> None:
    """A turn of 20 tokens, whose record is in the tier."""
    await grown(service, session, 20)
    session.order += 3
    await copies.turn_ended(session)
    await until(lambda: frontier(tier)[0] == len(session.ledger), f"the record up to {len(session.ledger)}")


def frontier(tier: DurableTier) -> tuple[int, int]:
    """Tokens of the newest publication's ledger, and of its furthest state."""
    found = tier.latest(KEY)
    if found is None:
        return 0, 0
    document = open_document(found[1])
    return len(document.record().ledger), max((entry.frontier for entry in document.manifest.checkpoints), default=0)


async def until(true: Callable[[], bool], what: str) -> None:
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(what)


def test_publications_of_one_time_follow_each_other_and_come_before_all_later_ones():
    first, later = Order(Epoch(1, 2), 7), Order(Epoch(1, 2), 8)
    orders = [published_as(first, 0), published_as(first, 1), published_as(later, 0)]
    assert orders == sorted(orders) and [logged_at(order) for order in orders] == [first, first, later]
    assert logged_at(published_as(first, 2 * PUBLICATIONS)) == first
