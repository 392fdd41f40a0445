"""The cases that the protocol exists for, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployment.ownership.liveness import LEASE_SECONDS, LEASE_SLACK, SILENT_SECONDS
from deployment.ownership.log import Deleted, Round
from deployment.ownership.log_format import decode
from deployment.ownership.messages import (
    Append,
    Fenced,
    Grant,
    Lost,
    Offer,
    Opened,
    Placed,
    Refused,
    Silent,
    Taken,
    Wait,
)
from deployment.ownership.owner import OFFER_SECONDS, State
from deployment.ownership.standing import UNBELIEVED_SECONDS
from deployment.ownership.words import NOTHING
from tests.ownership.by_hand import KEY, UNIX, Hand, a_round, began


def tokens(opened: Opened) -> list[int]:
    """What the log says was drawn."""
    records = [decode(data) for data in opened.records]
    return [token for record in records if isinstance(record, Round) for token in record.token_ids]


def fall_silent(hand: Hand) -> None:
    hand.pass_by(LEASE_SECONDS + LEASE_SLACK + 0.1)


def test_owner_that_stalls_past_its_lease_and_wakes_after_the_takeover_publishes_nothing_more():
    hand = Hand("a", "b")
    first, second = hand.owner("r1"), hand.owner("r2")
    hand.take(first, "a")
    assert hand.append(first, began(), a_round(3, 10)) == 2
    assert isinstance(hand.claim(second, "b"), Taken)
    fall_silent(hand)
    assert tokens(hand.take(second, "b")) == [10]
    assert hand.append(second, a_round(4, 20)) == 3

    hand.told.clear()
    assert hand.append(first, a_round(4, 11)) == 2
    assert first.state is State.FENCED
    assert [type(message) for message in hand.told] == [Fenced]
    third = hand.owner("r3")
    fall_silent(hand)
    assert tokens(hand.take(third, "a")) == [10, 20]


def test_directory_that_stood_still_gives_up_nobody_whom_it_could_not_hear_and_afterwards_whoever_is_silent():
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    hand.renew(owner)
    hand.now += LEASE_SECONDS + LEASE_SLACK + 4.0
    assert hand.append(owner, began()) == 1
    assert isinstance(hand.claim(hand.owner("r2"), "b"), Taken)  # it hears this before all that was said meanwhile
    assert not hand.registry.void()
    hand.away.add("b")
    for _ in range(int(SILENT_SECONDS) + 1):
        hand.pass_by(1.0)
        hand.directory.reconcile(hand.now)
    assert hand.registry.void() == {hand.member("b")}
    fall_silent(hand)
    assert isinstance(hand.claim(hand.owner("r3"), "a"), Grant)


def test_owner_that_stood_still_calls_no_store_silent_that_it_could_not_hear():
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    owner.append([began()], hand.now)  # what the stores answer is lost, or comes when it is awake
    hand.now += SILENT_SECONDS + 4.0
    sends = owner.tick(hand.now)
    assert not any(isinstance(send.message, Silent) for send in sends)
    hand.carry(owner, sends)
    assert owner.committed.sequence == 1


def test_node_cut_off_from_the_head_goes_on_until_its_copies_refuse_it():
    hand = Hand("a", "b")
    owner, next_owner = hand.owner("r1"), hand.owner("r2")
    hand.take(owner, "a")
    hand.away.add("head")
    assert hand.append(owner, began(), a_round(3, 10)) == 2  # no word from the head for long
    hand.away.remove("head")
    hand.directory.node_died("a", hand.now)
    hand.away.add("a")
    assert tokens(hand.take(next_owner, "b")) == [10]
    assert hand.append(next_owner, a_round(4, 20)) == 3

    hand.away.remove("a")  # the cut ends, and the owner that was given up still has its own store
    assert hand.append(owner, a_round(4, 11)) == 2
    assert owner.state is State.FENCED


def test_peer_store_that_dies_between_append_and_send_holds_nothing_up_and_loses_nothing():
    hand = Hand("a", "b", "c")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    peer = next(member.node for member in owner.grant.members if member.node != "a")  # pyright: ignore
    hand.away.add(peer)
    assert hand.append(owner, began(), a_round(3, 10)) == 0  # one receipt is missing: nothing leaves
    for _ in range(int(SILENT_SECONDS) + 2):
        hand.tick(owner)
    assert owner.committed.sequence == 2
    hand.tick(owner)
    assert hand.append(owner, a_round(4, 11)) == 3
    members = owner.grant.members  # pyright: ignore
    assert len(members) == 2 and peer not in {member.node for member in members}  # the third node has joined


def test_stale_store_that_comes_back_after_its_set_moved_on_is_void_and_begins_again():
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    hand.append(owner, began(), a_round(3, 10))
    hand.away.add("b")
    hand.append(owner, a_round(4, 11))
    for _ in range(int(SILENT_SECONDS) + 2):
        hand.tick(owner)
    assert owner.committed.sequence == 3 and owner.grant.members == (hand.member("a"),)  # pyright: ignore

    hand.away = {"a"}
    hand.directory.node_died("a", hand.now)
    hand.restart_store("b")
    assert not hand.tell("b")  # with its arena it counts for nothing
    hand.fresh_store("b")
    assert hand.tell("b")
    assert isinstance(hand.claim(hand.owner("r2"), "b"), Lost)  # rather than the state of before


def test_copies_with_unequal_ends_become_equal_before_anything_is_appended():
    hand = Hand("a", "b")
    owner, next_owner = hand.owner("r1"), hand.owner("r2")
    hand.take(owner, "a")
    hand.append(owner, began(), a_round(3, 10))
    hand.away.add("b")
    hand.append(owner, a_round(4, 11))  # in one copy only: never published
    hand.away.clear()
    assert hand.stores["a"].index()[0].history.end != hand.stores["b"].index()[0].history.end

    hand.directory.replica_exited("r1")
    assert tokens(hand.take(next_owner, "b")) == [10, 11]
    ends = {store.index()[0].history.end for store in hand.stores.values()}
    assert ends == {next_owner.committed}
    assert hand.append(next_owner, a_round(5, 12)) == 4


@pytest.mark.parametrize("which", [0, 1])
def test_session_is_read_from_a_copy_that_stays_where_the_other_one_is_left_out_of_the_set(which: int):
    """Which forgets its images when it hears so."""
    hand = Hand("a", "b")
    owner, other = hand.owner("r1"), hand.owner("r2")
    hand.take(owner, "a")
    hand.append(owner, began(), a_round(3, 10))
    hand.carry(owner, owner.publish(2, (4,), b"image", 3, hand.now))
    hand.directory.replica_exited("r1")
    grant = hand.claim(other, "b")
    assert isinstance(grant, Grant) and len(grant.previous) == 2
    stays = grant.previous[which]
    hand.told.clear()
    hand.carry(other, other.granted(replace(grant, members=(stays,)), hand.now))
    (opened,) = (told for told in hand.told if isinstance(told, Opened))
    assert opened.images and opened.source == stays


def test_directory_that_restarts_in_mid_migration_lets_the_destination_finish():
    hand = Hand("a", "b")
    source, destination = hand.owner("r1"), hand.owner("r2", offered_by="r1")
    hand.take(source, "a")
    hand.append(source, began(), a_round(3, 10))
    (offered,) = source.offer("r2", hand.now)
    offer = offered.message
    assert isinstance(offer, Offer)
    granted = hand.claim(destination, "b", given=offer.epoch)
    assert isinstance(granted, Grant)

    hand.now += 1
    hand.start_directory()
    hand.carry(destination, destination.granted(granted, hand.now))
    destination.loaded()
    assert hand.append(destination, a_round(4, 11)) == 3
    hand.renew(destination, "b")
    placed = hand.directory.locate(KEY, hand.now)
    assert isinstance(placed, Placed) and placed.owner == "r2"


def test_source_that_never_hears_the_outcome_asks_the_log():
    for destination_opens in (True, False):
        hand = Hand("a", "b")
        source, destination = hand.owner("r1"), hand.owner("r2")
        hand.take(source, "a")
        hand.append(source, began(), a_round(3, 10))
        (offered,) = source.offer("r2", hand.now)
        assert isinstance(offered.message, Offer)
        if destination_opens:
            hand.take(destination, "b", given=offered.message.epoch)
        hand.told.clear()
        hand.tick(source, OFFER_SECONDS + 1)
        if destination_opens:
            assert source.state is State.FENCED
        else:
            assert source.state is State.OPEN and any(isinstance(told, Opened) for told in hand.told)
            assert hand.append(source, a_round(4, 11)) == 3


def test_delete_while_one_store_is_down_then_a_restart_of_everything_is_not_found():
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    hand.append(owner, began(), a_round(3, 10))
    hand.away.add("b")
    hand.append(owner, Deleted(NOTHING, UNIX))
    assert owner.state is not State.DELETED  # the other copy may still come back
    for _ in range(int(SILENT_SECONDS) + 2):
        hand.tick(owner)
    assert owner.state is State.DELETED
    assert hand.directory.locate(KEY, hand.now) is None

    hand.away.clear()
    hand.owners.clear()
    hand.restart_store("a")
    hand.restart_store("b")
    hand.start_directory()
    assert not hand.tell("b")
    hand.fresh_store("b")
    assert hand.tell("b")
    assert hand.directory.locate(KEY, hand.now) is None
    anew = hand.take(hand.owner("r2"), "a")
    assert tokens(anew) == [] and anew.epoch > owner.epoch


def test_unknown_id_is_not_said_to_be_unknown_before_every_store_has_answered():
    hand = Hand("a", "b")
    hand.away.add("b")
    hand.start_directory()
    assert isinstance(hand.directory.locate(KEY, hand.now), Wait)
    assert isinstance(hand.claim(hand.owner("r1"), "a"), Wait)
    hand.directory.node_died("b", hand.now)
    assert isinstance(hand.directory.locate(KEY, hand.now), Wait), "who owned what it held may not know yet"
    assert isinstance(hand.claim(hand.owner("r1"), "a"), Wait)
    hand.pass_by(UNBELIEVED_SECONDS)
    assert hand.directory.locate(KEY, hand.now) is None


def test_store_of_an_older_cluster_is_void_in_a_new_one():
    old, new = Hand("a"), Hand("b")
    owner = old.owner("r1")
    old.take(owner, "a")
    old.append(owner, began())
    assert not new.directory.store_here(old.member("a"), old.stores["a"].index(), new.now)
    assert new.directory.incarnation >= UNIX


def test_incarnations_rise_even_if_the_clock_goes_back():
    hand = Hand("a")
    first = hand.directory.incarnation
    assert hand.registry.next_incarnation(UNIX - 1000) == first + 1


def test_append_of_a_stale_owner_is_refused_by_a_store_that_was_started_again():
    hand = Hand("a")
    first, second = hand.owner("r1"), hand.owner("r2")
    hand.take(first, "a")
    hand.append(first, began())
    hand.directory.replica_exited("r1")
    hand.take(second, "a")
    hand.restart_store("a")
    answer = hand.stores["a"].answer(Append(KEY, first.epoch, first.committed, ()))
    assert isinstance(answer, Refused) and answer.seal == second.epoch


def test_last_copy_is_not_given_up_for_silence():
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    hand.append(owner, began())
    hand.away = {"a", "b"}
    hand.append(owner, a_round(3, 10))
    for _ in range(20):
        hand.tick(owner)
        hand.directory.reconcile(hand.now)
    assert len(hand.registry.void()) == 1
    hand.away.clear()
    for _ in range(3):
        hand.tick(owner)
    assert owner.committed.sequence == 2


def test_who_sleeps_before_it_has_begun_a_session_does_not_begin_it_beside_another_one():
    """Its store is in no set that a new directory knows of, so that only the directory can tell it."""
    hand = Hand("a", "b", "c", "d")
    sleeper, other = hand.owner("r1"), hand.owner("r2")
    first = hand.claim(sleeper, "b")
    assert isinstance(first, Grant)
    mine, gone = (member.node for member in first.members)
    hand.away = {gone}
    hand.carry(sleeper, sleeper.granted(first, hand.now))
    hand.directory.node_died(gone, hand.now)
    (again,) = [word for _, word in hand.directory.reconcile(hand.now) if isinstance(word, Grant)]
    assert [member.node for member in again.members] == [mine]
    hand.owners.remove(sleeper)
    hand.start_directory()
    hand.directory.node_died(gone, hand.now)
    hand.pass_by(UNBELIEVED_SECONDS)
    node = next(node for node in hand.stores if node not in (mine, gone))
    hand.take(other, node)
    assert other.held is not None
    assert mine not in [member.node for member in other.held.members], "the sets must have nothing in common"
    assert hand.append(other, began()) == 1
    hand.told.clear()
    hand.carry(sleeper, sleeper.granted(again, hand.now))
    assert sleeper.state is State.FENCED and not any(isinstance(word, Opened) for word in hand.told)


def test_a_session_that_begins_is_not_open_before_the_directory_knows_that_it_is_there():
    """Else a directory that believes it empty would give it up, with all that was published of it, for its owner's
    death."""
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    grant = hand.claim(owner, "a")
    assert isinstance(grant, Grant)
    hand.away = {"head"}
    hand.carry(owner, owner.granted(grant, hand.now))
    hand.tick(owner)
    assert owner.state is State.TAKING and not hand.told
    hand.away.clear()
    hand.tick(owner)
    assert owner.state is State.OPEN
    placed = hand.directory.locate(KEY, hand.now)
    assert isinstance(placed, Placed) and placed.owner == "r1"


def test_a_deleted_session_that_is_made_anew_is_not_open_before_the_directory_knows_it_either():
    """Else one that has only heard of the tombstone would say for ever that there is no such session."""
    hand = Hand("a")
    first, second = hand.owner("r1"), hand.owner("r2")
    hand.take(first, "a")
    hand.append(first, Deleted(NOTHING, UNIX))
    hand.owners.clear()
    grant = hand.claim(second, "a")
    assert isinstance(grant, Grant)
    hand.start_directory()
    hand.told.clear()
    hand.away = {"head"}
    hand.carry(second, second.granted(grant, hand.now))
    hand.tick(second)
    assert second.state is State.TAKING and not hand.told
    hand.away.clear()
    hand.tick(second)
    assert second.state is State.OPEN and isinstance(hand.directory.locate(KEY, hand.now), Placed)


def test_who_sleeps_over_a_grant_while_two_directories_come_does_not_begin_beside_whom_the_first_granted_it():
    """The second one knows of neither."""
    hand = Hand("a", "b", "c", "d")
    sleeper, other = hand.owner("r1"), hand.owner("r2")
    first = hand.claim(sleeper, "a")
    assert isinstance(first, Grant)
    hand.owners.clear()
    hand.now += 1
    hand.start_directory()
    node = next(node for node in hand.stores if node not in {member.node for member in first.members})
    second = hand.claim(other, node)
    assert isinstance(second, Grant)
    members = tuple(member for member in second.members if member not in first.members)
    second = replace(second, members=members)
    hand.start_directory()
    hand.told.clear()
    hand.carry(sleeper, sleeper.granted(first, hand.now))
    assert sleeper.state is State.FENCED and not any(isinstance(word, Opened) for word in hand.told)
    hand.carry(other, other.granted(second, hand.now))
    assert other.state is State.OPEN, "no directory was between that one and this"


def test_who_begins_under_the_grant_of_the_last_directory_does_not_beside_whom_this_one_granted_it():
    """It has heard of a set that nobody uses, and so granted it over other stores."""
    hand = Hand("a", "b", "c", "d")
    sleeper, other, third = hand.owner("r1"), hand.owner("r2"), hand.owner("r3")
    first = hand.claim(sleeper, "a")
    assert isinstance(first, Grant)
    hand.owners.clear()
    hand.start_directory()
    node = next(node for node in hand.stores if node not in {member.node for member in first.members})
    second = hand.claim(other, node)
    assert isinstance(second, Grant)
    second = replace(second, members=tuple(member for member in second.members if member not in first.members))
    hand.away = {"head"}
    hand.carry(sleeper, sleeper.granted(first, hand.now))
    hand.away.clear()
    hand.start_directory()
    hand.directory.replica_exited("r1")
    grant = hand.claim(third, "a")
    assert isinstance(grant, Grant) and grant.previous == first.members
    hand.carry(other, other.granted(second, hand.now))
    assert other.state is State.FENCED
