"""The directory: when others may take over, and what it says of ids that it does not know (yet)."""

from __future__ import annotations

import pytest

from deployment.ownership.liveness import LEASE_SECONDS, LEASE_SLACK
from deployment.ownership.messages import Grant, Lost, Placed, Taken, Wait
from deployment.ownership.owner import State
from deployment.ownership.words import Epoch, Order
from state.errors import StateError
from tests.ownership.by_hand import KEY, Hand, a_round, began


def owned() -> Hand:
    hand = Hand("a", "b")
    hand.take(hand.owner("r1"), "a")
    return hand


def test_exit_or_death_of_the_node_frees_a_session_at_once():
    for happens in ("exit", "death"):
        hand = owned()
        assert isinstance(hand.claim(hand.owner("r2"), "b"), Taken)
        if happens == "exit":
            hand.directory.replica_exited("r1")
        else:
            hand.directory.node_died("a", hand.now)
        assert isinstance(hand.claim(hand.owner("r3"), "b"), Grant)


def test_silent_owner_is_waited_for_until_its_lease_is_over_also_by_a_new_directory():
    for restarted in (False, True):
        hand = owned()
        hand.renew(hand.owners[0])
        if restarted:
            hand.owners.clear()
            hand.start_directory()
        hand.now += LEASE_SECONDS + LEASE_SLACK - 0.1
        assert isinstance(hand.claim(hand.owner("r2"), "b"), Taken)
        hand.now += 0.2
        assert isinstance(hand.claim(hand.owner("r3"), "b"), Grant)


def test_grant_is_for_the_machine_that_claimed_and_is_acted_upon_once():
    hand = Hand("a", "b")
    first, other = hand.owner("r1"), hand.owner("r1")
    grant = hand.claim(first, "a")
    assert isinstance(grant, Grant)
    assert other.granted(grant, hand.now) == [] and other.grant is None
    assert first.granted(grant, hand.now) and not first.granted(grant, hand.now)


def test_offer_leaves_the_source_the_owner_until_the_destination_has_named_its_set():
    hand = owned()
    source = hand.owners[0]
    hand.append(source, began())
    source.offer("r2", hand.now)
    assert isinstance(hand.claim(hand.owner("r3"), "b"), Taken)
    destination = hand.owner("r2")
    grant = hand.claim(destination, "b", given=source.epoch)
    assert isinstance(grant, Grant)
    placed = hand.directory.locate(KEY, hand.now)
    assert isinstance(placed, Placed) and placed.owner == "r1"
    hand.carry(destination, destination.granted(grant, hand.now))
    placed = hand.directory.locate(KEY, hand.now)
    assert isinstance(placed, Placed) and placed.owner == "r2"


def test_session_is_not_granted_before_each_store_of_its_set_has_answered():
    hand = owned()
    hand.owners.clear()
    hand.away.add("b")
    hand.start_directory()
    hand.now += LEASE_SECONDS + LEASE_SLACK + 1
    assert isinstance(hand.claim(hand.owner("r2"), "a"), Wait)
    hand.away.clear()
    hand.tell("b")
    assert isinstance(hand.claim(hand.owner("r3"), "a"), Grant)


def test_id_that_only_the_durable_tier_knows_is_lost_and_may_begin_anew():
    hand = Hand("a")
    hand.directory.durable_ids([(KEY, Order(Epoch(5, 1), 9))])
    assert isinstance(hand.claim(hand.owner("r1"), "a"), Lost)
    grant = hand.claim(hand.owner("r2"), "a", anew=True)
    assert isinstance(grant, Grant) and grant.anew and grant.previous == ()


def test_nothing_can_be_appended_without_a_session_or_after_an_offer():
    hand = Hand("a")
    owner = hand.owner("r1")
    with pytest.raises(StateError, match="its state is taking over"):
        owner.append([began()], hand.now)
    hand.take(owner, "a")
    hand.append(owner, began())
    owner.offer("r2", hand.now)
    assert owner.state is State.OFFERED
    with pytest.raises(StateError, match="its state is offered"):
        owner.append([a_round(3, 1)], hand.now)
    with pytest.raises(StateError, match="all copies hold records 1 to 1"):
        owner.publish(1, (3,), b"", keep=1, at=0.0, now=hand.now)
