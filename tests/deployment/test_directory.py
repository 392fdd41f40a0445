"""The directory: one owner at a time, epochs that only rise, and a rebuild that brings nothing deleted back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployment.directory import Directory
from deployment.ownership import Conflict, Copy, Epoch, Grant, Placement, SessionKey

KEY = SessionKey("t" * 64, "one")


def claimed(directory: Directory, replica: str, expected: Epoch | None, key: SessionKey = KEY) -> Epoch:
    grant = directory.claim(key, replica, expected, now=1.0)
    assert isinstance(grant, Grant)
    return grant.epoch


def test_unknown_session_is_claimed_once():
    directory = Directory(7)
    epoch = claimed(directory, "a", None)
    assert epoch == Epoch(7, 1)
    refused = directory.claim(KEY, "b", None, now=2.0)
    assert isinstance(refused, Conflict) and refused.current is not None and refused.current.owner == "a"


def test_takeover_needs_the_epoch_that_was_read():
    directory = Directory(7)
    first = claimed(directory, "a", None)
    second = claimed(directory, "b", first)
    assert second > first
    assert isinstance(directory.claim(KEY, "c", first, now=2.0), Conflict)
    placement = directory.locate(KEY)
    assert placement is not None and (placement.owner, placement.epoch) == ("b", second)


def test_copy_of_a_former_owner_is_not_recorded():
    directory = Directory(7)
    first = claimed(directory, "a", None)
    assert directory.record_copy(KEY, Copy("node", first, 1, 40), now=1.0)
    claimed(directory, "b", first)
    assert not directory.record_copy(KEY, Copy("node", first, 2, 80), now=2.0)
    placement = directory.locate(KEY)
    assert placement is not None and [copy.frontier for copy in placement.copies] == [40]


def test_tenants_do_not_see_each_other():
    directory = Directory(7)
    claimed(directory, "a", None)
    other = SessionKey("u" * 64, KEY.session)
    assert directory.locate(other) is None
    assert directory.sessions(other.tenant) == ()
    claimed(directory, "a", None, other)
    assert [placement.key for placement in directory.sessions(KEY.tenant)] == [KEY]


def test_session_without_a_published_turn_is_abandoned_and_one_with_a_copy_is_not():
    directory = Directory(7)
    epoch = claimed(directory, "a", None)
    assert directory.abandon(KEY, epoch) and directory.locate(KEY) is None
    epoch = claimed(directory, "a", None)
    directory.record_copy(KEY, Copy("node", epoch, 1, 40), now=1.0)
    assert not directory.abandon(KEY, epoch)


def test_deleted_session_comes_back_only_under_a_higher_epoch():
    directory = Directory(7)
    old = claimed(directory, "a", None)
    assert directory.delete(KEY, now=3.0) is not None
    assert directory.delete(KEY, now=4.0) is None
    directory.restore(KEY, "a", Copy("node", old, 3, 40), now=5.0)
    assert directory.locate(KEY) is None
    assert claimed(directory, "b", None) > old


def test_rebuild_takes_the_newest_epoch_and_keeps_every_copy_of_it():
    directory = Directory(8)
    directory.restore(KEY, "a", Copy("n1", Epoch(7, 3), 5, 40), now=1.0)
    directory.restore(KEY, "b", Copy("n2", Epoch(7, 9), 6, 90), now=1.0)
    directory.restore(KEY, "a", Copy("n3", Epoch(7, 3), 5, 40), now=1.0)
    placement = directory.locate(KEY)
    assert placement is not None
    assert (placement.owner, placement.epoch) == ("b", Epoch(7, 9))
    assert {copy.node for copy in placement.copies} == {"n1", "n2", "n3"}
    assert claimed(directory, "c", Epoch(7, 9)) > Epoch(7, 9)


def test_rebuild_believes_a_live_owner_unless_a_copy_is_newer_or_the_session_was_deleted():
    directory = Directory(8)
    directory.restore_owner(KEY, "a", Epoch(7, 3), now=1.0)
    placement = directory.locate(KEY)
    assert placement is not None and (placement.owner, placement.epoch) == ("a", Epoch(7, 3))
    directory.restore(KEY, "b", Copy("n1", Epoch(7, 9), 6, 90), now=1.0)
    directory.restore_owner(KEY, "a", Epoch(7, 3), now=2.0)
    placement = directory.locate(KEY)
    assert placement is not None and placement.owner == "b"
    directory.restore_owner(KEY, "b", Epoch(7, 9), now=2.0)
    assert directory.locate(KEY) == Placement(KEY, Epoch(7, 9), "b", placement.copies, placement.created, 2.0)
    directory.delete(KEY, now=3.0)
    directory.restore_owner(KEY, "b", Epoch(7, 9), now=4.0)
    assert directory.locate(KEY) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=40))
def test_epochs_rise_and_two_replicas_with_one_belief_never_both_get_a_grant(steps: list[tuple[str, bool, bool]]):
    directory = Directory(1)
    last = Epoch(0, 0)
    for replica, rival_claims_too, delete in steps:
        placement = directory.locate(KEY)
        believed = placement.epoch if placement else None
        grant = directory.claim(KEY, replica, believed, now=1.0)
        assert isinstance(grant, Grant) and grant.epoch > last
        last = grant.epoch
        if rival_claims_too:
            assert isinstance(directory.claim(KEY, "rival", believed, now=1.0), Conflict)
        if delete:
            directory.delete(KEY, now=1.0)
