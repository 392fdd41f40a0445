"""A rolling upgrade to another drafter: state does not cross it, sessions and turns that run do (decision 23); and what
goes on under other weights, or another tokenizer."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from deployment.engine.commands import Foreign
from deployment.engine.service import EngineService
from deployment.errors import RequestError
from deployment.ownership.words import Epoch
from deployment.prompting import Prompter
from deployment.session import Session
from deployment.wire import TurnRequest
from state.fingerprint import Mismatch
from tests.deployment.places import KEY, asked, ids_of, opened, places, run, told, undisturbed
from tests.engine.driving import models, options

GREEDY = {"temperature": 0.0, "seed": None}


def engines() -> EngineService:
    """The old replica's, then the new one's."""
    backend = next(_backends)
    return EngineService(models(backend), options(backend, lanes=2, images=8))


_backends = itertools.cycle(("dflash2", "dflash"))


def following(request: TurnRequest) -> TurnRequest:
    messages = ({"role": "user", "content": "And from there?"},)
    return replace(request, turn=f"{8:032x}", mode="append", messages=messages, max_tokens=16)


def test_a_turn_and_its_session_go_on_under_another_drafter_as_under_the_old_one():
    request = asked(40, **GREEDY)

    async def undrained() -> tuple[int, ...]:
        async with places() as (_, (a, _)):
            await told(await a.begin(request))
            return ids_of(await told(await a.begin(following(request))))

    async def steps() -> None:
        async with places(service=engines) as (_, (old, new)):
            reading = asyncio.create_task(told(await old.begin(request), tokens=8))
            await reading
            assert await old.move(new) is not None
            assert ids_of(await told(await new.turn())) == undisturbed(request)
            after = await told(await new.begin(following(request)))
            facts = opened(after).session
            assert facts is not None and facts.reused > 0, "the new replica has made state of its own"
            assert ids_of(after) == expected

    expected = asyncio.run(undrained())
    run(steps)


def test_a_session_at_rest_is_prefilled_once_by_the_new_drafters_replica():
    request = asked(8, **GREEDY)

    async def steps() -> None:
        async with places(service=engines) as (_, (old, new)):
            await told(await old.begin(request))
            assert await old.move(new) is not None
            begun = opened(await told(await new.begin(following(request)))).session
            assert begun is not None and (begun.hit, begun.reused) == ("none", 0)
            again = replace(following(request), turn=f"{9:032x}")
            begun = opened(await told(await new.begin(again))).session
            assert begun is not None and begun.hit == "device" and begun.reused > 0

    run(steps)


@pytest.mark.parametrize("matter", ["weights", "text"])
@pytest.mark.parametrize("accept", [False, True])
def test_an_append_turn_goes_on_from_another_models_tokens_only_where_that_is_accepted(
    matter: Literal["weights", "text"], accept: bool
):
    loaded = models("dflash2")
    service: Any = SimpleNamespace(
        vision=None, context_limit=4096, tokenizer=loaded.tokenizer, chat_template=loaded.chat_template
    )
    prompter = Prompter(service, accept_new_weights=accept)
    mismatch = Mismatch("tokenizer" if matter == "text" else "weights", matter, "theirs", "ours")
    session = Session(KEY, Epoch(1, 1), ledger=tuple(loaded.tokenizer.encode("Hello")), foreign=Foreign(mismatch, {}))
    whole, following_on = asked(8), following(asked(8))
    assert asyncio.run(prompter.alone(whole)).ids, "a full history is prefilled"
    if matter == "weights" and accept:
        prompt = asyncio.run(prompter.appended(following_on, session))
        assert prompt.ids[: len(session.ledger)] == session.ledger
        return
    with pytest.raises(RequestError, match=f"{mismatch.field} 'theirs'.* send the full history") as caught:
        asyncio.run(prompter.appended(following_on, session))
    assert (caught.value.refused.status, caught.value.refused.param) == (409, mismatch.field)
