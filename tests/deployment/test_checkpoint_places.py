"""Where a session's state is said to lie is where it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from deployment.checkpoint_places import placed
from deployment.durable_copies import DurableCopies
from deployment.engine.commands import Publish
from deployment.engine.events import Publishing, Stored
from deployment.ownership.words import Epoch, Member, SessionKey
from deployment.server_objects import checkpoints_object
from deployment.session import Session
from deployment.wire import PlacedCheckpoint, SessionInfo
from state.session_record import ForkPoint
from tests.deployment.serving import serving

HERE, THERE = Member("here", "0" * 32), Member("there", "1" * 32)


def test_the_words_are_those_that_say_where_a_turn_found_its_state():
    start, end, tap = ("turn_start", 4), ("turn_end", 9), ("tap", 2)
    found = placed([end, tap], [start, end], (THERE, HERE), "here", [start])
    assert found == (
        PlacedCheckpoint("tap", 2, ("device",)),
        PlacedCheckpoint("turn_start", 4, ("host", "peer", "disk")),
        PlacedCheckpoint("turn_end", 9, ("device", "host", "peer")),
    )
    assert placed([], [end], (THERE,), "here", []) == (PlacedCheckpoint("turn_end", 9, ("peer",)),)
    assert placed([], [end], (), "here", []) == (PlacedCheckpoint("turn_end", 9, ()),)


def test_a_named_checkpoint_lies_where_the_state_that_it_keeps_does():
    points = (ForkPoint("t", 10, 2, 9, 0, "kept", image=9), ForkPoint("t", 10, 2, 9, 0, "tokens alone"))
    state = (PlacedCheckpoint("explicit", 9, ("device", "disk")), PlacedCheckpoint("turn_end", 9, ("host",)))
    known = SessionInfo("a", Epoch(1, 2), 10, 9, None, (), (), state, points)
    told = checkpoints_object(known)["data"]
    assert [(one.get("name"), one["kind"], one["places"]) for one in told] == [
        ("kept", "explicit", ["device", "disk"]),
        ("tokens alone", "explicit", []),
        (None, "turn_end", ["host"]),
    ]


def test_what_a_device_lets_go_of_lies_elsewhere_and_whoever_looks_does_not_bring_it_back():
    """Three images: a turn takes one while it runs and leaves two."""
    with serving(lanes=1, images=3, image_min_tokens=0) as url, httpx.Client(base_url=url, timeout=60) as client:
        for number, name in enumerate(("first", "second", "third")):
            said = {"messages": [{"role": "user", "content": f"{number}, that is all."}], "max_tokens": 4}
            client.post("/v1/chat/completions", json=said, headers={"x-session-id": name}).raise_for_status()

        def places(name: str) -> list[list[str]]:
            return [one["places"] for one in client.get(f"/v1/sessions/{name}/checkpoints").json()["data"]]

        for _ in range(2):
            assert all("device" in one for one in places("third"))
            assert places("first") and all(one == ["host"] for one in places("first"))


@pytest.mark.parametrize("payload", [True, False])
def test_state_is_on_disk_when_its_write_has_ended_and_its_owner_has_the_session(tmp_path: Path, payload: bool):
    asyncio.run(_written(tmp_path, payload))


async def _written(place: Path, payload: bool) -> None:
    engine, now = _Engine(), [0.0]
    copies = DurableCopies("app", engine, str(place), 1 << 20, clock=lambda: now[0])  # pyright: ignore[reportArgumentType]
    copies.start()
    session = Session(SessionKey("t" * 64, "one"), Epoch(1, 2), frontier=9, checkpoints=(("turn_end", 9),))
    copies.turn_began(session.key)
    await copies.turn_ended(session)
    engine.heard(Stored(session.key, engine.asked[0].order, "published"))
    now[0] += 60
    await copies.publish_idle(lambda key: session)
    assert [one.record_alone for one in engine.asked] == [True, False] and copies.checkpoints(session.key) == ()
    state = session.checkpoints if payload else ()
    engine.heard(Stored(session.key, engine.asked[1].order, "published", payload, state))
    assert copies.checkpoints(session.key) == ((("turn_end", 9),) if payload else ())
    copies.forget(session.key)
    assert copies.checkpoints(session.key) == ()


class _Engine:
    """As far as the durable tier is concerned."""

    def __init__(self) -> None:
        self.asked: list[Publish] = []

    def when_stored(self, listener: Callable[[Stored], None]) -> None:
        self.heard = listener

    async def call(self, command: Publish) -> Publishing:
        self.asked.append(command)
        return Publishing(command.call, command.session, (), 0)
