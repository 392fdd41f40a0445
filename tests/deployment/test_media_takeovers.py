"""A session with images goes on elsewhere, with them: its log has what a turn has shown anew, its copies the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

from deployment.engine.service import EngineService
from deployment.ownership.log import TurnBegan
from deployment.prompting import Prompter
from deployment.session import Session
from deployment.turns import Prompt
from deployment.wire import Moved, Route, TurnRequest
from state.media import Placed
from tests.deployment.in_process import World
from tests.deployment.places import KEY, Place, asked, ids_of, opened, places, run, told
from tests.engine.seeing import SeeingDriver, seeing_models, seeing_options, shown
from tests.model.test_vision import image, video, words

FIRST = shown(words(20), image(32, 40), words(50, 1), image(24, 56, 1), words(6, 2))
SECOND = shown(words(4, 3), video(5, 16, 24), words(5, 4))
TOKENS = 16


class Prompts:
    """Of requests that say in their text which of the prompts they mean."""

    async def alone(self, request: TurnRequest) -> Prompt:
        ids, media = FIRST
        return Prompt(ids, len(ids) - 1, media=media)

    async def in_session(self, prompt: Prompt, session: Session) -> Prompt:
        return prompt

    async def appended(self, request: TurnRequest, session: Session) -> Prompt:
        ids, media = longer(session.ledger, session.media)
        return Prompt(ids, len(ids) - 1, media=media)


def longer(ledger: Sequence[int], media: Placed) -> tuple[tuple[int, ...], Placed]:
    """The next turn's prompt: a video more."""
    ids, more = SECOND
    moved = (replace(one, starts=tuple(at + len(ledger) for at in one.starts)) for one in more)
    return (*ledger, *ids), (*media, *moved)


def undisturbed(prompt: tuple[tuple[int, ...], Placed]) -> tuple[int, ...]:
    ids, media = prompt
    return SeeingDriver(lanes=1, images=0).run(ids, media=media, max_tokens=TOKENS, ignore_eos=True).token_ids


def first(**more: Any) -> TurnRequest:
    return asked(TOKENS, temperature=0.0, **more)


def second() -> TurnRequest:
    return replace(first(), turn=f"{8:032x}", mode="append")


@asynccontextmanager
async def seeing_places() -> AsyncIterator[tuple[World, tuple[Place, Place]]]:
    def engine() -> EngineService:
        return EngineService(seeing_models("dflash2"), seeing_options("dflash2", lanes=2, images=8, prefill_chunk=30))

    async with places(service=engine) as (world, both):
        for place in both:
            place.desk._prompter = cast(Prompter, Prompts())
        yield world, both


def test_a_turn_with_images_goes_on_elsewhere_when_its_owner_dies_in_its_middle() -> None:
    async def steps() -> None:
        async with seeing_places() as (_, (a, b)):
            await told(await a.begin(first()), 3)
            a.die()
            events = await told(await b.turn())
            assert ids_of(events) == undisturbed(FIRST)
            facts = opened(events).session
            assert facts is not None
            await free(b)
            assert b.session.media == FIRST[1]

    run(steps)


def test_the_next_turn_logs_the_pixels_that_are_new_and_goes_on_elsewhere_with_all_of_them() -> None:
    async def steps() -> None:
        async with seeing_places() as (_, (a, b)):
            await told(await a.begin(first()))
            await free(a)
            began = logged(a)
            await told(await a.begin(second()), 3)
            assert [bool(one.media.pixels) for one in began[0].media] == [False, False, True]
            prompt = longer(a.session.ledger, a.session.media)
            a.die()
            held = await b.desk.find(Route("x"), KEY, second().turn)
            assert ids_of(await told(cast(Any, held))) == undisturbed(prompt)
            await free(b)
            assert b.session.media == prompt[1], "with all of their pixels"

    run(steps)


def test_a_turn_with_images_moves_while_it_decodes() -> None:
    async def steps() -> None:
        async with seeing_places() as (_, (a, b)):
            held = await a.begin(first())
            await told(held, 3)
            assert await a.move(b)
            assert isinstance((await told(held))[-1], Moved)
            events = await told(await b.turn())
            assert ids_of(events) == undisturbed(FIRST)
            facts = opened(events).session
            assert facts is not None and facts.hit == "peer"
            await free(b)
            ledger = b.session.ledger
            more = await b.begin(second())
            assert ids_of(await told(more)) == undisturbed(longer(ledger, FIRST[1]))

    run(steps)


def test_an_idle_session_with_images_is_continued_after_its_owner_died() -> None:
    async def steps() -> None:
        async with seeing_places() as (_, (a, b)):
            await told(await a.begin(first()))
            await free(a)
            ledger = a.session.ledger
            a.die()
            events = await told(await b.begin(second()))
            assert ids_of(events) == undisturbed(longer(ledger, FIRST[1]))
            facts = opened(events).session
            assert facts is not None and facts.reused > 0

    run(steps)


def logged(place: Place) -> list[TurnBegan]:
    """The beginnings that the place writes from now on."""
    began: list[TurnBegan] = []
    append = place.keeper.append

    def watched(key: Any, records: Any) -> int:
        began.extend(record for record in records if isinstance(record, TurnBegan))
        return append(key, records)

    place.keeper.append = watched
    return began


async def free(place: Place) -> None:
    for _ in range(400):
        if place.keeper.held(KEY) is not None and place.session.running is None:
            return
        await asyncio.sleep(0.02)
    raise TimeoutError("the turn's end")
