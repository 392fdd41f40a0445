"""`store: false`: a session that is in the memory of one node, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deployment.keeper import SessionKeeper
from deployment.ownership.words import SessionKey
from deployment.session import Session
from deployment.session_copies import SessionCopies
from tests.deployment.in_process import World
from tests.deployment.serving import serving

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "temperature": 0}
SECRET, KNOWN = SessionKey("t" * 64, "secret"), SessionKey("t" * 64, "known")


class Tier:
    """What a keeper tells the durable tier."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def start(self) -> None: ...

    async def publish_idle(self, held: Any) -> None: ...

    def turn_began(self, key: SessionKey) -> None:
        self.heard.append(("began", key.session))

    async def turn_ended(self, session: Session) -> None:
        self.heard.append(("ended", session.key.session))

    async def delete(self, key: SessionKey, epoch: Any) -> None:
        self.heard.append(("deleted", key.session))

    def forget(self, key: SessionKey) -> None: ...


async def lived(keeper: SessionKeeper, session: Session) -> None:
    keeper.copies.turn_began(session)
    await keeper.copies.turn_ended(session)
    await keeper.copies.recorded(session)
    await keeper.ending.delete(session, 1.0)


def test_the_durable_tier_and_the_second_node_hear_nothing_of_it_its_forks_included():
    async def scenario() -> None:
        world, tier = World(), Tier()
        keeper, creating = world.replicas["a"].keeper, world.replicas["a"].creating
        keeper._durable = keeper.copies._durable = keeper.ending._durable = tier  # pyright: ignore[reportAttributeAccessIssue]
        world.start()
        try:
            secret = await creating.empty(SECRET, alone=True)
            async with creating.of_past(SessionKey("t" * 64, "child"), secret.record(), secret) as child:
                pass
            known = await creating.empty(KNOWN)
            await asyncio.sleep(0.3)  # the directory would have another store join by now
            assert [(session.alone, where(world, session)) for session in (secret, child, known)] == [
                (True, "x"), (True, "x"), (False, "xy"),
            ]  # fmt: skip
            for session in (secret, child, known):
                await lived(keeper, session)
        finally:
            world.close()
        assert tier.heard == [("began", "known"), ("ended", "known"), ("ended", "known"), ("deleted", "known")]

    asyncio.run(scenario())


def where(world: World, session: Session) -> str:
    """On which nodes anything of a session is."""
    return "".join(
        node for node, store in sorted(world.stores.items()) if any(e.key == session.key for e in store.index())
    )


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("made", ["by its first turn", "before"])
def test_a_session_is_made_so_and_says_so_and_no_turn_changes_it(client: httpx.Client, made: str):
    name = made.replace(" ", "-")
    headers = {"x-session-id": name}
    if made == "before":
        assert client.post("/v1/sessions", json={"id": name, "store": False}).status_code == 200
    else:
        assert client.post("/v1/chat/completions", json={**HELLO, "store": False}, headers=headers).status_code == 200
    assert client.get(f"/v1/sessions/{name}").json()["store"] is False
    for store in ({}, {"store": False}, {"store": None}):
        assert client.post(f"/v1/sessions/{name}/turns", json={**HELLO, **store}).status_code == 200
    refused = client.post(f"/v1/sessions/{name}/turns", json={**HELLO, "store": True})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (409, "session_kept_otherwise", "store")
    assert "was made with store: false" in error["message"]


def test_what_is_kept_elsewhere_already_cannot_be_taken_back(client: httpx.Client):
    headers = {"x-session-id": "kept"}
    assert client.post("/v1/chat/completions", json=HELLO, headers=headers).status_code == 200
    assert client.get("/v1/sessions/kept").json()["store"] is True
    refused = client.post("/v1/chat/completions", json={**HELLO, "store": False}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "store")
    assert client.post("/v1/chat/completions", json={**HELLO, "store": True}, headers=headers).status_code == 200


def test_a_turn_with_an_idempotency_key_and_a_response_are_kept_as_they_say(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
):
    kept: dict[bool, int] = {True: 0, False: 0}
    begin = SessionCopies.turn_began

    def began(self: SessionCopies, session: Session) -> None:
        assert session.keyed
        kept[not session.alone] += 1
        begin(self, session)

    monkeypatch.setattr(SessionCopies, "turn_began", began)
    for count, store in enumerate(({"store": False}, {}), 1):
        key = {"idempotency-key": f"order-{count}"}
        assert client.post("/v1/chat/completions", json={**HELLO, **store}, headers=key).status_code == 200
    assert kept == {True: 1, False: 1}
    response = {"input": "Hello", "max_output_tokens": 2, "store": False}
    assert client.post("/v1/responses", json=response, headers={"idempotency-key": "order-3"}).status_code == 200
    assert kept == {True: 1, False: 2}


@pytest.mark.parametrize("store", ["yes", 0])
def test_what_is_neither_true_nor_false_is_refused_by_name(client: httpx.Client, store: Any):
    for path, body in (("/v1/chat/completions", HELLO), ("/v1/sessions", {})):
        refused = client.post(path, json={**body, "store": store})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "store")
