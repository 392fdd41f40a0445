"""A response in the background outlives its replica, though nobody reads it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from deployment.openai_responses.format import session_name
from deployment.openai_responses.stored import Note, note_of, stored_in
from deployment.ownership.words import SessionKey
from deployment.replica import EngineReplica
from deployment.wire import Route, SessionInfo
from tests.deployment.places import KEY, Place, asked, ids_of, places, run, told, undisturbed

SESSION = SessionKey(KEY.tenant, session_name("5" * 32))
NOTE = Note.of({"created_at": 1, "tools": [], "instructions": None, "background": True}, begin=0, end=2)


async def shown(place: Place) -> SessionInfo:
    """What a replica answers to who asks for the response by its id."""
    replica = EngineReplica.__new__(EngineReplica)
    replica._id, replica._keeper, replica._service = place.replica.name, place.keeper, place.service
    return await replica._session_info(Route("x"), SESSION)


@pytest.mark.parametrize("background", [True, False])
def test_a_response_whose_replica_dies_goes_on_when_it_is_asked_for_and_is_whole_if_it_is_in_the_background(
    background: bool,
):
    async def steps() -> None:
        async with places() as (_, (a, b)):
            b.desk._detach_seconds = 0.01
            request = replace(asked(64, "Count from 3."), key=SESSION, note=NOTE.text, unattended=background)
            before = ids_of(await told(await a.begin(request), tokens=5))
            a.die()
            assert len(before) < 64
            seen = await shown(b)
            assert seen.running == request.turn and note_of(seen.running_note) == NOTE
            while seen.running is not None:
                await asyncio.sleep(0.02)
                seen = await shown(b)
            stored = stored_in(seen, SESSION.session, request.turn)
            assert stored is not None and stored.facts["background"] and stored.answer["content"]
            assert (stored.record["finish_reason"], stored.record["completion_tokens"] == 64) == (
                ("length", True) if background else ("cancelled", False)
            )
            session = b.keeper.held(SESSION)
            assert session is not None
            drawn = tuple(session.ledger)[stored.record["prompt_tokens"] :]
            assert drawn == undisturbed(request)[: len(drawn)] and drawn[: len(before)] == before

    run(steps)
