"""All stores that a session's owner writes to are void at once: it is told, and what it has counts only if nobody can
have published anything since."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployment.ownership.log import OLDER
from deployment.ownership.log_format import decode
from deployment.ownership.messages import CopiesLost, Grant, Lost, Opened, Placed, Taken, Unavailable, Wait
from deployment.ownership.owner import Owner, State
from deployment.ownership.standing import UNBELIEVED_SECONDS
from state.errors import StateError
from tests.ownership.by_hand import KEY, Hand, a_round, began
from tests.ownership.test_by_name import fall_silent


def bereft(*published: int) -> tuple[Hand, Owner, Unavailable]:
    """An owner that has published so much, and whose copies are lost."""
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    hand.append(owner, began(), *(a_round(3 + n, token) for n, token in enumerate(published)))
    hand.told.clear()
    hand.lose_arenas("a", "b")
    hand.tick(owner)
    (told,) = hand.told
    assert isinstance(told, Unavailable)
    return hand, owner, told


def test_owner_whose_stores_are_all_void_is_told_so_and_waits_for_no_receipt():
    hand, owner, told = bereft(10)
    assert owner.state is State.BARREN and told.holds == owner.epoch
    with pytest.raises(StateError, match="without a copy"):
        owner.append([a_round(4, 11)], hand.now)


def test_owner_whose_round_waits_for_receipts_is_told_so_too():
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    hand.append(owner, began())
    hand.away = {"a", "b"}
    hand.append(owner, a_round(3, 10))
    hand.away.clear()
    hand.lose_arenas("a", "b")
    for _ in range(8):
        hand.tick(owner)
    assert owner.state is State.BARREN and owner.committed.sequence == 1


def test_word_that_was_lost_is_said_again_when_the_owner_reports_the_session():
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    hand.append(owner, began())
    hand.lose_arenas("a", "b")
    assert len(hand.directory.reconcile(hand.now)) == 1, "it is sent, and does not come"
    hand.tick(owner, 5.0)
    assert owner.state is State.OPEN, "nobody repeats it to an owner that says nothing"
    hand.renew(owner)
    hand.tick(owner)
    assert owner.state is State.BARREN


def test_owner_that_alone_can_have_published_gives_the_session_new_copies_of_what_it_has():
    hand, owner, told = bereft(10)
    again = hand.owner("r1")
    assert isinstance(hand.claim(again, "a"), Lost), "without its word for it, nothing says what the session is"
    opened = hand.take(again, "a", holds=told.holds)
    assert opened.epoch > owner.epoch and opened.records == () and not opened.continues
    assert hand.append(again, a_round(3, 10)) == 1
    placed = hand.directory.locate(KEY, hand.now)
    assert isinstance(placed, Placed) and placed.owner == "r1"


def test_nobody_else_may_say_what_the_session_is_while_its_owner_lives_or_after():
    hand, _, told = bereft(10)
    assert isinstance(hand.claim(hand.owner("r2"), "b", holds=told.holds), Taken)
    hand.directory.replica_exited("r1")
    assert isinstance(hand.claim(hand.owner("r2"), "b", holds=told.holds), Lost)
    assert isinstance(hand.claim(hand.owner("r2"), "b", anew=True), Wait), "its owner may not know that it is none"
    hand.pass_by(UNBELIEVED_SECONDS)
    assert isinstance(hand.claim(hand.owner("r2"), "b", anew=True), Grant), "a full history may"


@pytest.mark.parametrize("heard", [True, False], ids=["known", "never heard"])
def test_owner_that_slept_through_anothers_tenure_may_not_bring_back_an_older_state(heard: bool):
    hand = Hand("a", "b")
    sleeper, other = hand.owner("r1"), hand.owner("r2")
    hand.take(sleeper, "a")
    hand.append(sleeper, began(), a_round(3, 10))
    held = sleeper.epoch
    fall_silent(hand)
    grant = hand.claim(other, "b")
    assert isinstance(grant, Grant)
    if not heard:
        hand.away.add("head")
    hand.carry(other, other.granted(grant, hand.now))
    other.loaded()
    assert hand.append(other, a_round(4, 20)) == 3
    hand.away.clear()
    hand.directory.replica_exited("r2")
    hand.lose_arenas("a", "b")
    hand.renew(sleeper)
    hand.tick(sleeper)
    assert sleeper.state is (State.FENCED if heard else State.BARREN), "and no store is left to tell it"
    assert isinstance(hand.claim(hand.owner("r1"), "a", holds=held), Lost)


def test_directory_that_was_started_again_cannot_know_and_gives_the_session_up():
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    hand.append(owner, began(), a_round(3, 10))
    hand.start_directory()
    hand.lose_arenas("a", "b")
    hand.tick(owner)
    assert owner.state is State.BARREN
    assert isinstance(hand.claim(hand.owner("r1"), "a", holds=owner.epoch), Lost)


def test_nothing_is_said_to_be_lost_while_a_store_that_has_not_answered_may_know_a_later_set():
    hand = Hand("a", "b", "c")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    hand.append(owner, began(), a_round(3, 10))
    second = next(member.node for member in owner.grant.members if member.node != "a")  # pyright: ignore
    third = ({"b", "c"} - {second}).pop()
    hand.away.add(third)
    hand.start_directory()
    hand.lose_arenas("a", second)
    hand.directory.replica_exited("r1")
    assert isinstance(hand.claim(hand.owner("r2"), "a", anew=True), Wait)
    hand.directory.node_died(third, hand.now)
    assert isinstance(hand.claim(hand.owner("r2"), "a", anew=True), Wait), "who owned it may not know yet"
    hand.pass_by(UNBELIEVED_SECONDS)
    assert isinstance(hand.claim(hand.owner("r2"), "a", anew=True), Grant)


def test_takeover_whose_stores_are_all_lost_meanwhile_is_not_waited_for():
    hand = Hand("a", "b")
    first, second = hand.owner("r1"), hand.owner("r2")
    hand.take(first, "a")
    hand.append(first, began(), a_round(3, 10))
    hand.directory.replica_exited("r1")
    hand.away = {"a", "b"}
    grant = hand.claim(second, "b")
    assert isinstance(grant, Grant)
    hand.told.clear()
    hand.carry(second, second.granted(grant, hand.now))
    hand.away.clear()
    hand.lose_arenas("a", "b")
    hand.tick(second)
    assert second.state is State.BARREN and not any(isinstance(told, Opened) for told in hand.told)
    assert [told.holds for told in hand.told if isinstance(told, Unavailable)] == [None]


# ------------------------------------------------------------------------------------------------ begun anew


def test_session_begins_anew_under_every_grant_until_somebody_has_begun_it_and_only_by_a_full_history():
    hand, _, _ = bereft(10)
    hand.pass_by(UNBELIEVED_SECONDS)
    hand.directory.replica_exited("r1")
    first = hand.owner("r2")
    grant = hand.claim(first, "b", anew=True)
    assert isinstance(grant, Grant) and grant.anew and hand.claim(first, "b", anew=True) == grant, "it did not come"
    hand.directory.replica_exited("r2")
    assert isinstance(hand.claim(hand.owner("r3"), "a"), Lost), "an append turn would go on from nothing"
    second = hand.owner("r3")
    again = hand.claim(second, "a", anew=True)
    assert isinstance(again, Grant) and again.anew and set(again.previous) == set(grant.members)
    hand.carry(second, second.granted(again, hand.now))
    assert second.state is State.OPEN
    hand.carry(first, first.granted(grant, hand.now))
    assert first.state is State.FENCED, "who slept over the first grant does not begin it beside the other"


def test_session_begins_anew_too_where_a_store_of_the_grant_is_void_by_now():
    hand, _, _ = bereft(10)
    hand.pass_by(UNBELIEVED_SECONDS)
    first = hand.owner("r1")
    grant = hand.claim(first, "b", anew=True)
    assert isinstance(grant, Grant)
    hand.lose_arenas("a")
    again = hand.claim(first, "b", anew=True)
    assert (
        isinstance(again, Grant) and again.epoch > grant.epoch and again.anew and hand.member("a") not in again.previous
    )


def test_owner_that_has_begun_a_session_anew_keeps_it_under_a_grant_that_was_given_before_that_was_known():
    hand, _, _ = bereft(10)
    hand.pass_by(UNBELIEVED_SECONDS)
    owner = hand.owner("r1")
    grant = hand.claim(owner, "a", anew=True)
    assert isinstance(grant, Grant)
    hand.away.add("head")
    hand.carry(owner, owner.granted(grant, hand.now))
    hand.directory.node_died("b", hand.now)  # which is cut off from the head alone
    ((_, again),) = hand.directory.reconcile(hand.now)
    assert isinstance(again, Grant) and again.anew and again.epoch > grant.epoch
    hand.away.clear()
    hand.carry(owner, owner.tick(hand.now))
    owner.loaded()
    assert hand.append(owner, began(), a_round(3, 10)) == 2
    hand.told.clear()
    hand.carry(owner, owner.granted(again, hand.now))
    (opened,) = (told for told in hand.told if isinstance(told, Opened))
    assert opened.epoch >= again.epoch and opened.continues and opened.end.sequence == 2


def test_older_session_that_has_new_copies_and_no_image_yet_is_never_taken_for_a_new_one():
    hand, _, told = bereft(10)
    again = hand.owner("r1", first=OLDER)
    grant = hand.claim(again, "a", holds=told.holds)
    assert isinstance(grant, Grant)
    hand.away.add("head")
    hand.carry(again, again.granted(grant, hand.now))
    assert again.state is State.TAKING, "its set is named, which the directory has not heard"
    hand.away.clear()
    hand.owners.clear()  # it is gone
    hand.start_directory()
    hand.directory.replica_exited("r1")
    opened = hand.take(hand.owner("r2"), "b")
    assert [decode(data) for data in opened.records] == [replace(OLDER, order=opened.end)]


def test_first_record_of_a_session_that_begins_anew_is_in_all_copies_and_others_follow_it():
    hand, _, told = bereft(10)
    again = hand.owner("r1", first=OLDER)
    opened = hand.take(again, "a", holds=told.holds)
    assert (opened.end.sequence, opened.records, opened.continues) == (1, (), False)
    assert hand.append(again, a_round(3, 10)) == 2
    assert all(ends.history.end == again.committed for store in hand.stores.values() for ends in store.index())


@pytest.mark.parametrize("comes", [True, False], ids=["comes", "is lost once"])
def test_owner_whose_offer_was_taken_up_while_it_was_granted_another_set_hears_too_that_all_is_lost(comes: bool):
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    hand.append(owner, began(), a_round(3, 10))
    epoch = owner.epoch
    owner.offer("r2", hand.now)
    hand.lose_arenas("b")
    ((_, grant),) = hand.directory.reconcile(hand.now)
    assert isinstance(grant, Grant) and grant.replica == "r1"
    assert isinstance(hand.claim(hand.owner("r2", offered_by="r1"), "b", given=epoch), Grant)
    hand.away.add("a")
    hand.carry(owner, owner.granted(grant, hand.now))
    hand.away.clear()
    hand.lose_arenas("a")
    if not comes:
        assert hand.directory.reconcile(hand.now + 2.0)
        hand.renew(owner)
    hand.tick(owner, 4.0)
    assert owner.state is State.BARREN


def test_owner_that_was_granted_newer_copies_without_hearing_of_them_hears_too_that_these_are_lost():
    hand, _, told = bereft(10)
    again = hand.owner("r1", first=OLDER)
    grant = hand.claim(again, "a", holds=told.holds)
    assert isinstance(grant, Grant)
    hand.away = {"a", "b"}
    hand.carry(again, again.granted(grant, hand.now))
    hand.away.clear()
    hand.lose_arenas("b")
    ((_, newer),) = hand.directory.reconcile(hand.now)
    assert isinstance(newer, Grant) and newer.epoch > grant.epoch
    hand.lose_arenas("a")
    assert [type(word) for _, word in hand.directory.reconcile(hand.now)] == [CopiesLost]
    hand.renew(again)
    hand.tick(again, 2.0)
    assert again.state is State.BARREN, "it had heard neither"
