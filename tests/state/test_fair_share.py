"""Whose state goes first: nobody's who holds no more than a share of what all hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from state.durable import DurableTier
from state.fair_share import first_to_go
from state.names import SessionKey
from tests.state.stores import Clock, MemoryStore, data_of, open_tier, publish, segment

SIZE = 1000
ALICE, BOB, CAROL = (name * 64 for name in "abc")


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9)))
def test_who_goes_first_holds_more_than_the_share_or_all_hold_the_same(used: dict[str, int]) -> None:
    first = first_to_go(used)
    held = {tenant: amount for tenant, amount in used.items() if amount}
    assert first <= held.keys() and bool(first) == bool(held)
    share = sum(held.values()) / max(1, len(held))
    assert all(used[tenant] > share for tenant in first) or len(set(held.values())) == 1
    assert all(amount <= share for tenant, amount in held.items() if tenant not in first)


@settings(max_examples=40)
@given(st.lists(st.sampled_from("abc"), min_size=30, max_size=60))
def test_a_full_place_is_shared_alike_by_all_who_ask_for_more_than_their_part(asked: list[str]) -> None:
    """A piece a request, in a place for twelve. Whoever asked for a third of it or more has that, less a piece."""
    used = {"a": 0, "b": 0, "c": 0}
    for tenant in asked:
        if sum(used.values()) == 12:
            used[min(first_to_go(used))] -= 1
        used[tenant] += 1
    parts = [asked.count(tenant) for tenant in used]
    assert all(used[tenant] >= min(part, 3) for tenant, part in zip(used, parts, strict=True)), used


class Full:
    """A durable tier of which every byte is taken: each tenant's sessions have a segment of SIZE bytes each."""

    def __init__(self, **sessions: int) -> None:
        self.store, self.clock = MemoryStore(), Clock()
        self.tier = self.within(1 << 30)
        for tenant, count in sessions.items():
            for number in range(count):
                self.publish(tenant, number)
        self.tier = self.within(self.tier.size())

    def within(self, budget: int) -> DurableTier:
        return open_tier(self.store, self.clock, budget=budget)

    def publish(self, tenant: str, number: int, seconds: float = 1.0, *, state: bool = True) -> bool:
        self.clock.now += 1
        content = [content_of(tenant, number)] if state else []
        return publish(self.tier, f"{tenant}{number}", content, key=key(tenant, number), seconds=seconds)

    def state_of(self, tenant: str) -> list[int]:
        return [n for n in range(20) if self.tier.segment(segment(content_of(tenant, n)).sha256) is not None]

    def known(self, tenant: str) -> list[str]:
        return sorted(found.key.session for found in self.tier.sessions(tenant * 64))


def content_of(tenant: str, number: int) -> bytes:
    return data_of(f"{tenant} {number} ", SIZE)


def key(tenant: str, number: int) -> SessionKey:
    return SessionKey(tenant * 64, f"chat {number:02}")


def test_one_tenants_many_sessions_push_out_its_own_and_not_anothers_few() -> None:
    full = Full(a=1, b=6)
    for number in range(6, 12):
        assert full.publish("b", number, seconds=100.0), "worth more than all that is there"
    assert full.state_of("a") == [0]
    assert len(full.state_of("b")) < 7


def test_a_newcomer_gets_room_from_those_who_hold_more_than_their_share() -> None:
    full = Full(a=2, b=6)
    for number in range(2):
        assert full.publish("c", number, seconds=0.001), "worth less than all that is there"
    assert full.state_of("a") == [0, 1] and full.state_of("c") == [0, 1]


def test_documents_go_of_whoever_holds_more_than_his_share_though_others_are_older() -> None:
    full = Full(a=1, b=8)
    full.tier = full.within(full.tier.size() - 8 * SIZE)
    for number in range(8, 14):
        full.publish("b", number, state=False)
    assert full.known("a") == ["chat 00"] and full.state_of("a") == [0]
    assert full.state_of("b") == [] and full.known("b")[0] > "chat 00", "of its own the oldest"


def test_a_segment_that_two_tenants_need_counts_for_both_and_stays_while_one_needs_it() -> None:
    full = Full(a=1)
    full.tier = full.within(1 << 30)
    shared = content_of("a", 0)
    for number in range(3):
        publish(full.tier, f"b{number}", [shared, content_of("b", number)], key=key("b", number))
    full.tier = full.within(full.tier.size())
    for number in range(3, 8):
        full.publish("b", number, seconds=50.0)
    assert full.state_of("a") == [0]
