"""A session that its client wants in one store, and nowhere else: it stays so, whoever goes on with it."""

from __future__ import annotations

import pytest

from deployment.ownership.log import Deleted
from deployment.ownership.messages import Placed
from deployment.ownership.owner import Owner
from deployment.ownership.words import NOTHING
from tests.ownership.by_hand import KEY, Hand, a_round, began


def placed(hand: Hand) -> Placed:
    found = hand.directory.locate(KEY, hand.now)
    assert isinstance(found, Placed)
    return found


def nodes(hand: Hand) -> list[str]:
    """Whose stores hold anything of the session."""
    return sorted(node for node in hand.stores if hand.storages[node].records(KEY) and hand.stores[node].index())


def holding(hand: Hand) -> list[str]:
    """Whose stores hold turns of it."""
    return sorted(node for node, store in hand.stores.items() if any(ends.history.runs for ends in store.index()))


def alone(*where: str) -> tuple[Hand, Owner]:
    hand = Hand(*where)
    owner = hand.owner("r1")
    hand.take(owner, "a", alone=True)
    hand.append(owner, began(), a_round(3, 1, 2))
    return hand, owner


def ticked(hand: Hand, owner: Owner) -> None:
    for _ in range(5):
        hand.tick(owner)


def test_it_is_in_its_owners_store_and_none_joins():
    hand, owner = alone("a", "b", "c")
    ticked(hand, owner)
    assert nodes(hand) == ["a"] and placed(hand).alone
    hand.fresh_store("d")
    hand.tell("d")
    ticked(hand, owner)
    assert nodes(hand) == ["a"] and placed(hand).members == (hand.member("a"),)


def test_another_one_has_two_copies_as_ever():
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    assert not placed(hand).alone and len(placed(hand).members) == 2


@pytest.mark.parametrize("wanted", [True, False])
def test_whoever_takes_it_over_on_its_node_keeps_it_so_whatever_he_says(wanted: bool):
    hand, _ = alone("a", "b")
    hand.directory.replica_exited("r1")
    heir = hand.owner("r2")
    assert len(hand.take(heir, "a", alone=wanted).records) == 2
    ticked(hand, heir)
    assert nodes(hand) == ["a"] and placed(hand).alone and heir.grant is not None and heir.grant.alone


def test_with_an_owner_on_another_node_it_moves_there_and_leaves_its_first_store():
    hand, source = alone("a", "b", "c")
    source.offer("r2", hand.now)
    heir = hand.owner("r2", offered_by="r1")
    hand.take(heir, "b", given=source.epoch)
    hand.append(heir, a_round(5, 3))
    ticked(hand, heir)
    assert placed(hand).members == (hand.member("b"),) and placed(hand).alone
    assert holding(hand) == ["b"]


def test_a_new_directory_knows_it_from_its_store_and_from_its_owner():
    for keeps_owner in (True, False):
        hand, owner = alone("a", "b")
        if not keeps_owner:
            hand.owners.clear()
        hand.start_directory()
        ticked(hand, owner)
        assert nodes(hand) == ["a"] and placed(hand).alone, keeps_owner


def test_a_store_that_was_started_again_still_knows_it_also_when_its_log_was_trimmed():
    hand, owner = alone("a", "b")
    hand.carry(owner, owner.publish(2, (5,), b"image", keep=3, now=hand.now))
    hand.restart_store("a")
    (ends,) = hand.stores["a"].index()
    assert ends.named is not None and ends.named.alone and ends.history.first == 2


def test_a_deleted_name_is_free_for_either_kind():
    hand, owner = alone("a", "b")
    hand.append(owner, Deleted(NOTHING, 1.0))
    stored = hand.owner("r1")
    hand.take(stored, "a")
    hand.append(stored, began("t2"))
    ticked(hand, stored)
    assert not placed(hand).alone and nodes(hand) == ["a", "b"]
    hand.append(stored, Deleted(NOTHING, 2.0))
    again = hand.owner("r1")
    hand.take(again, "a", alone=True)
    hand.append(again, began("t3"))
    ticked(hand, again)
    assert placed(hand).alone and holding(hand) == ["a"]
