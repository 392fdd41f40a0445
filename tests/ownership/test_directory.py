"""The directory: when others may take over, and what it says of ids that it does not know (yet)."""

from __future__ import annotations

import pytest

from deployment.ownership.directory import Directory
from deployment.ownership.known_sessions import GONE_SECONDS
from deployment.ownership.liveness import LEASE_SECONDS, LEASE_SLACK
from deployment.ownership.log import Deleted
from deployment.ownership.messages import Claim, Grant, Held, Install, Join, Lost, Placed, Taken, Wait
from deployment.ownership.owner import State
from deployment.ownership.words import NOTHING, Epoch, Order, SessionKey
from state.errors import StateError
from tests.ownership.by_hand import KEY, UNIX, Hand, a_round, began


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
        hand.wait(LEASE_SECONDS + LEASE_SLACK - 0.1)
        assert isinstance(hand.claim(hand.owner("r2"), "b"), Taken)
        hand.wait(0.2)
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
    hand.wait(LEASE_SECONDS + LEASE_SLACK + 1)
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
        owner.publish(1, (3,), b"", keep=1, now=hand.now)


def pass_by(hand: Hand, seconds: float) -> None:
    """Stores and the replica r1 are there meanwhile."""
    hand.wait(seconds)
    for node in hand.stores:
        hand.directory.store_alive(hand.member(node), hand.now)
    hand.directory.renew("r1", "a", [], hand.now)


def test_only_what_has_changed_is_looked_after_and_all_that_a_new_store_may_hold(monkeypatch: pytest.MonkeyPatch):
    hand = Hand("a")
    keys = [SessionKey(KEY.tenant, str(number)) for number in range(20)]
    for key in keys:
        grant = hand.directory.claim(Claim(key, "r1", f"of {key}", "a"), hand.now)
        assert isinstance(grant, Grant)
        hand.directory.told(Held(key, grant.epoch, "r1", grant.tenure, grant.members, NOTHING), hand.now)
    looked: list[SessionKey] = []
    wanted_join = Directory._wanted_join

    def noted(directory: Directory, key: SessionKey, session: object, now: float) -> Join | None:
        looked.append(key)
        return wanted_join(directory, key, session, now)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Directory, "_wanted_join", noted)
    for _ in range(3):
        pass_by(hand, 2.0)
        assert hand.directory.reconcile(hand.now) == []
    assert looked == keys, "once, after they were named"
    hand.directory.told(
        Held(keys[3], Epoch(hand.directory.incarnation, 99), "r1", "t", grant.members, NOTHING), hand.now
    )
    hand.directory.reconcile(hand.now)
    assert looked[20:] == [keys[3]]
    hand.fresh_store("b")
    hand.tell("b")
    for _ in range(3):
        pass_by(hand, 2.0)
        joins = [message for _, message in hand.directory.reconcile(hand.now)]
        assert [join.key for join in joins] == keys, "until it has joined"


def test_owner_that_comes_back_is_told_what_it_missed():
    hand = Hand("a")
    hand.take(hand.owner("r1"), "a")
    hand.wait(LEASE_SECONDS + LEASE_SLACK + 1.0)
    hand.fresh_store("b")
    hand.tell("b")
    for _ in range(2):
        hand.now += 2.0
        for node in hand.stores:
            hand.directory.store_alive(hand.member(node), hand.now)
        assert hand.directory.reconcile(hand.now) == []
    pass_by(hand, 2.0)
    ((replica, join),) = hand.directory.reconcile(hand.now)
    assert replica == "r1" and isinstance(join, Join) and join.joiner == hand.member("b")


def test_deleted_session_is_forgotten_after_an_hour_and_no_store_brings_it_back():
    hand = owned()
    owner = hand.owners[0]
    hand.append(owner, began())
    (data,) = hand.stores["a"]._copies[KEY].after(None)
    hand.append(owner, Deleted(NOTHING, UNIX))
    hand.fresh_store("c")
    hand.stores["c"].answer(Install(KEY, owner.epoch, (data,)))  # it was to join meanwhile
    hand.tell("c")
    hand.directory.reconcile(hand.now)
    pass_by(hand, GONE_SECONDS - 1.0)
    hand.directory.reconcile(hand.now)
    assert KEY in hand.directory._sessions and hand.directory.locate(KEY, hand.now) is None
    pass_by(hand, 2.0)
    hand.directory.reconcile(hand.now)
    assert KEY not in hand.directory._sessions
    for node in hand.stores:
        assert hand.tell(node)
    assert hand.directory.locate(KEY, hand.now) is None
    hand.take(hand.owner("r2"), "b")
    assert isinstance(hand.directory.locate(KEY, hand.now), Placed), "its name is free"


def test_deleted_session_is_remembered_while_somebody_may_know_of_it():
    hand = owned()
    hand.append(hand.owners[0], Deleted(NOTHING, UNIX))
    hand.owners.clear()
    hand.away.add("b")
    hand.start_directory()
    hand.directory.reconcile(hand.now)
    pass_by(hand, GONE_SECONDS + 1.0)
    hand.directory.store_alive(hand.member("a"), hand.now)
    hand.directory.reconcile(hand.now)
    assert KEY in hand.directory._sessions
