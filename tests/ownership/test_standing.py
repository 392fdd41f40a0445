"""Nobody is left who could be sealed: who owned the session publishes nothing beside whoever begins it anew."""

from __future__ import annotations

import pytest

from deployment.ownership.known_stores import KnownStores
from deployment.ownership.liveness import SILENT_SECONDS
from deployment.ownership.messages import Committed, Grant, Lost, Opened, Silent, Wait
from deployment.ownership.owner import Owner, State
from deployment.ownership.registry import Registry
from deployment.ownership.standing import STANDING_SECONDS, UNBELIEVED_SECONDS, Standing
from deployment.ownership.words import Member
from tests.ownership.by_hand import KEY, Hand, a_round, began
from tests.ownership.fake_storage import FakeValues


def tokens_told(hand: Hand, owner: Owner, token: int) -> bool:
    """Whether the owner's client would read one more round."""
    before = owner.committed
    hand.carry(owner, owner.append([a_round(3 + before.sequence, token)], hand.now))
    return owner.committed != before


def begin_anew(hand: Hand, node: str, void_since: float) -> None:
    """A client's full history, as soon as somebody else may begin with it."""
    claimer = hand.owner("r2")
    while isinstance(hand.claim(claimer, node, anew=True), Wait):
        hand.pass_by(0.5)
    assert hand.now >= void_since + UNBELIEVED_SECONDS
    hand.take(claimer, node, anew=True)


def test_owner_that_is_cut_off_with_the_only_copy_publishes_nothing_beside_who_begins_the_session_anew():
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a", alone=True)
    hand.append(owner, began())
    hand.away = {"head"}
    hand.directory.node_died("a", died := hand.now)  # its owner and its store still hear each other
    hand.now += STANDING_SECONDS
    assert tokens_told(hand, owner, 10), "it cannot know"
    hand.away.clear()
    begin_anew(hand, "b", died)
    hand.away = {"head"}
    assert not tokens_told(hand, owner, 11)
    hand.carry(owner, owner.tick(hand.now + 1.0))
    assert owner.committed.sequence == 2


def test_owner_whose_stores_were_all_given_up_publishes_nothing_when_they_wake():
    hand = Hand("a", "b", "c")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    hand.append(owner, began())
    second = next(member.node for member in owner.grant.members if member.node != "a")  # pyright: ignore
    other = next(node for node in hand.stores if node not in ("a", second))
    hand.away = {second}  # its process sleeps, and the owner does not hear from the head
    hand.pass_by(SILENT_SECONDS + 1)
    hand.directory.reconcile(hand.now)
    hand.directory.node_died("a", hand.now)
    begin_anew(hand, other, hand.now)
    hand.away = {"head"}
    assert not tokens_told(hand, owner, 10)
    assert owner.state is State.OPEN, "both stores have taken it: neither was sealed"


def test_directory_that_never_heard_of_a_void_store_begins_nothing_while_an_owner_may_still_believe_in_it():
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a", alone=True)
    hand.owners.remove(owner)
    hand.away = {"a"}
    hand.start_directory()
    hand.directory.node_died("a", hand.now)
    begin = hand.now
    claimer = hand.owner("r2")
    while isinstance(hand.claim(claimer, "b"), Wait):
        assert isinstance(hand.directory.locate(KEY, hand.now), Wait)
        hand.pass_by(1.0)
    assert hand.now - begin >= UNBELIEVED_SECONDS
    hand.away = {"head"}
    assert owner.append([began()], hand.now) and not tokens_told(hand, owner, 10)


def test_owner_that_sleeps_over_the_last_receipt_does_not_publish_it_when_it_wakes():
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a", alone=True)
    (send,) = owner.append([began()], hand.now)
    assert isinstance(send.to, Member)
    receipt = hand.ask(send.to, send.message)  # pyright: ignore[reportArgumentType]
    assert receipt is not None
    hand.directory.node_died("a", hand.now)
    begin_anew(hand, "b", hand.now)
    assert owner.received(receipt, hand.now) == [] and owner.committed.sequence == 0
    hand.see(owner)
    assert not any(isinstance(sent.message, Committed) for sent in owner.tick(hand.now))


def test_streams_go_on_for_as_long_as_there_is_no_directory():
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    hand.append(owner, began())
    for second in range(60):
        hand.now += 1.0
        assert tokens_told(hand, owner, second)


def test_what_came_while_an_owner_could_not_know_is_published_once_it_can_and_no_store_is_called_silent():
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a")
    hand.away = {"head"}
    hand.now += STANDING_SECONDS + 0.1
    hand.carry(owner, owner.append([began()], hand.now))
    for _ in range(int(SILENT_SECONDS) + 3):
        hand.now += 1.0
        sends = owner.tick(hand.now)
        assert not any(isinstance(send.message, Silent) for send in sends)
        hand.carry(owner, sends)
    assert owner.committed.sequence == 0
    hand.standings["r1"].seen(hand.registry.stores(), hand.now)
    owner.tick(hand.now)
    assert owner.committed.sequence == 1


def test_takeover_that_ends_in_doubt_is_open_when_there_is_none():
    hand = Hand("a", "b")
    first, second = hand.owner("r1"), hand.owner("r2")
    hand.take(first, "a")
    hand.append(first, began(), a_round(3, 10))
    hand.directory.replica_exited("r1")
    grant = hand.claim(second, "b")
    assert isinstance(grant, Grant)
    hand.now += STANDING_SECONDS + 0.1
    hand.away = {"head"}
    hand.told.clear()
    hand.carry(second, second.granted(grant, hand.now))
    assert not hand.told
    hand.away.clear()
    for _ in range(4):  # each answer leads to the next question
        hand.tick(second)
    assert any(isinstance(told, Opened) for told in hand.told)


def test_an_append_turn_hears_at_once_that_nothing_is_left():
    hand = Hand("a", "b")
    owner = hand.owner("r1")
    hand.take(owner, "a", alone=True)
    hand.append(owner, began())
    hand.directory.node_died("a", hand.now)
    assert isinstance(hand.claim(hand.owner("r2"), "b"), Lost)


# ------------------------------------------------------------------------------------------------ the parts


MEMBERS = tuple(Member(node, f"{number:032x}") for number, node in enumerate("ab"))


def test_standing_counts_from_when_it_was_asked_for_and_an_older_answer_says_nothing():
    standing = Standing()
    assert not standing.holds(MEMBERS, 0.0)
    standing.seen(MEMBERS[:1], asked=10.0)
    assert standing.holds(MEMBERS, 10.0 + STANDING_SECONDS) and not standing.holds(MEMBERS, 10.1 + STANDING_SECONDS)
    assert not standing.holds(MEMBERS[1:], 10.0)
    standing.seen((), asked=11.0)
    standing.seen(MEMBERS, asked=10.5)
    assert not standing.holds(MEMBERS, 11.0)


@pytest.mark.parametrize(("ago", "waits"), [(100.0, False), (1.0, True), (-50.0, True)], ids=["long", "just", "later"])
def test_new_directory_knows_when_stores_were_made_void_that_it_never_heard_of(ago: float, waits: bool):
    registry = Registry(FakeValues(), "app")
    registry.register(MEMBERS[0])
    registry.make_void(MEMBERS[0], 1000.0 - ago)
    stores = KnownStores(registry, 1000.0)
    assert (stores.believed_until((), all_known=False) > 1000.0) is waits
    assert stores.believed_until((), all_known=False) <= 1000.0 + UNBELIEVED_SECONDS
    assert stores.believed_until((), all_known=True) == float("-inf")


def test_time_runs_from_when_the_key_value_store_has_written_that_a_store_is_void():
    registry = Registry(FakeValues(), "app")
    registry.register(MEMBERS[0])
    stores = KnownStores(registry, 1000.0)
    stores.make_void(MEMBERS[0], 1000.0)
    assert stores.believed_until(MEMBERS, all_known=True) == float("inf")
    stores.look(1003.0)
    stores.look(1004.0)
    assert stores.believed_until(MEMBERS, all_known=True) == 1003.0 + UNBELIEVED_SECONDS
