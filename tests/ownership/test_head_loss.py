"""The head is gone, and another comes, with the key-value store of the old one, as Ray's Redis keeps it, or without.

Replicas ended with it; host stores were started again with their arenas, or were not.
"""

from __future__ import annotations

from deployment.ownership.liveness import LEASE_SECONDS, LEASE_SLACK
from deployment.ownership.log import Deleted, Round
from deployment.ownership.log_format import decode
from deployment.ownership.messages import Placed, Wait
from deployment.ownership.registry import Registry
from deployment.ownership.standing import UNBELIEVED_SECONDS
from deployment.ownership.words import NOTHING, SessionKey
from tests.ownership.by_hand import KEY, UNIX, Hand, a_round, began
from tests.ownership.fake_storage import FakeValues

KEYS = {SessionKey(KEY.tenant, f"session-{number}"): number for number in range(6)}
DELETED = SessionKey(KEY.tenant, "deleted")


def with_sessions() -> Hand:
    """Each has said a number of its own and has two copies, somewhere on three nodes."""
    hand = Hand("a", "b", "c")
    for key, number in KEYS.items():
        owner = hand.owner(f"r{number}", key=key)
        hand.take(owner, "abc"[number % 3])
        assert hand.append(owner, began(), a_round(3, number))
    owner = hand.owner("last", key=DELETED)
    hand.take(owner, "a")
    hand.append(owner, began(), Deleted(NOTHING, UNIX))
    return hand


def new_head(hand: Hand) -> None:
    """A machine that has been up for a moment only."""
    hand.owners.clear()
    hand.now = 5.0
    for node in hand.stores:
        hand.restart_store(node)
    hand.start_directory()


def test_with_the_old_key_value_store_it_takes_up_every_session_where_it_ended():
    hand = with_sessions()
    before = hand.directory.incarnation
    new_head(hand)
    assert hand.directory.incarnation > before and not hand.directory.is_first
    assert hand.directory.locate(DELETED, hand.now) is None
    assert all(isinstance(hand.directory.locate(key, hand.now), Placed) for key in KEYS)
    hand.pass_by(LEASE_SECONDS + LEASE_SLACK + 0.1)  # their owners may live, for all that it knows
    for key, number in KEYS.items():
        owner = hand.owner(f"new{number}", key=key)
        opened = hand.take(owner, "a")
        rounds = [one for one in map(decode, opened.records) if isinstance(one, Round)]
        assert [one.token_ids for one in rounds] == [(number,)] and opened.epoch.incarnation > before
        assert hand.append(owner, a_round(4, 99)) > opened.end.sequence


def test_it_waits_for_stores_that_have_not_come_back_before_it_calls_a_session_unknown():
    hand = with_sessions()
    hand.away.update("ab")
    new_head(hand)
    found = {key: hand.directory.locate(key, hand.now) for key in KEYS}
    assert {type(one) for one in found.values()} == {Placed, Wait}, "some have no copy on the node that is there"
    hand.away.clear()
    assert hand.tell("a") and hand.tell("b")
    assert all(isinstance(hand.directory.locate(key, hand.now), Placed) for key in KEYS)


def test_what_was_void_before_stays_void():
    hand = with_sessions()
    void = hand.member("c")
    hand.directory.node_died("c", hand.now)
    hand.away.add("c")
    new_head(hand)
    assert void in hand.registry.void()
    hand.away.clear()
    assert not hand.tell("c"), "its arena misses what was published without it"
    hand.pass_by(UNBELIEVED_SECONDS)
    assert all(isinstance(hand.directory.locate(key, hand.now), Placed) for key in KEYS), "the other copies count"


def test_without_it_the_cluster_is_new_and_no_arena_counts():
    hand = with_sessions()
    hand.registry = Registry(FakeValues(), "app")
    new_head(hand)
    assert hand.directory.is_first
    assert not any(hand.tell(node) for node in hand.stores)
    assert all(hand.directory.locate(key, hand.now) is None for key in (*KEYS, DELETED))
