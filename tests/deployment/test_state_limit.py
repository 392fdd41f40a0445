"""What a tenant's sessions may keep on a node."""

from __future__ import annotations

import asyncio

import pytest

from deployment.errors import RequestError
from deployment.refusal import refusal
from deployment.state_limit import StateLimit


class Store:
    def __init__(self, used: int | None) -> None:
        self.used = used
        self.asked: list[str] = []
        self.asked_for_room: list[str] = []

    async def used_by(self, tenant: str) -> int | None:
        self.asked.append(tenant)
        return self.used

    def check(self, limit: int | None) -> None:
        asyncio.run(StateLimit(limit, self.used_by, self.asked_for_room.append).check("t"))


def test_a_tenant_that_has_reached_its_limit_is_told_to_come_again_and_its_own_state_makes_room():
    store = Store(1000)
    with pytest.raises(RequestError) as refused:
        store.check(1000)
    answer = refusal(refused.value.refused)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert "1000 bytes" in str(refused.value) and "tenant_state_bytes" in str(refused.value)
    assert refused.value.refused.param == "session", "named, so that nobody sends it on to another replica"
    assert store.asked_for_room == ["t"]


@pytest.mark.parametrize("used", [999, None])
def test_below_the_limit_and_while_nobody_can_say_nothing_is_refused(used: int | None):
    store = Store(used)
    store.check(1000)
    assert store.asked == ["t"] and store.asked_for_room == []


def test_without_a_limit_nobody_is_asked():
    store = Store(1000)
    store.check(None)
    assert store.asked == []
