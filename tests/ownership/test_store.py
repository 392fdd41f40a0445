"""A host store: what it acknowledged outlives its process, and nobody who was shut out comes back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from deployment.ownership.log import Deleted, Numbered
from deployment.ownership.log_format import encode
from deployment.ownership.messages import (
    Append,
    Ends,
    FromStore,
    Full,
    Gap,
    Install,
    Kept,
    NameSet,
    Put,
    Receipt,
    Refused,
    Seal,
    ToStore,
    Trim,
)
from deployment.ownership.storage import Storage
from deployment.ownership.store import Store
from deployment.ownership.tombstones import CROWDED_SECONDS, TOMBSTONE_SECONDS, UNASKED_SECONDS
from deployment.ownership.words import NOTHING, Epoch, Member, Order, SessionKey
from state.errors import StateError
from tests.ownership.by_hand import KEY, UNIX, a_round, began, ended
from tests.ownership.fake_storage import FakeStorage, ProcessDied
from tests.state.arenas import open_small, shared_directory

FIRST, SECOND = Epoch(1_790_000_000, 1), Epoch(1_790_000_000, 2)
OTHER = Member("other", "f" * 32)


def at(sequence: int, epoch: Epoch = FIRST) -> Order:
    return Order(epoch, sequence)


def record(made: Numbered, sequence: int, epoch: Epoch = FIRST) -> bytes:
    return encode(replace(made, order=at(sequence, epoch)))


def turn(sequence: int, epoch: Epoch = FIRST) -> bytes:
    return record(began(f"t{sequence}"), sequence, epoch)


def sealed(storage: Storage | None = None, epoch: Epoch = FIRST) -> Store:
    store = Store("node", storage or FakeStorage("0" * 32))
    assert isinstance(store.answer(Seal(KEY, epoch)), Ends)
    return store


def ends(store: Store) -> Ends:
    (only,) = store.index()
    return only


def test_append_is_idempotent_and_a_gap_is_refused():
    store = sealed()
    both = Append(KEY, FIRST, NOTHING, (turn(1), turn(2)))
    for _ in range(2):
        answer = store.answer(both)
        assert isinstance(answer, Receipt) and answer.end == at(2)
    assert isinstance(store.answer(Append(KEY, FIRST, at(3), (turn(4),))), Gap)
    assert isinstance(store.answer(Append(KEY, FIRST, at(2), (turn(4),))), Gap)
    late = store.answer(Append(KEY, FIRST, NOTHING, (turn(1),)))
    assert isinstance(late, Receipt) and late.end == at(2)


@pytest.mark.parametrize("ours", [FIRST, Epoch(SECOND.incarnation, 9)])
def test_only_the_epoch_that_sealed_may_write(ours: Epoch):
    store = sealed(epoch=SECOND)
    for message in (
        Append(KEY, ours, NOTHING, (turn(1, ours),)),
        NameSet(KEY, ours, NOTHING, (store.member,), "r"),
        Put(KEY, ours, NOTHING, (), b""),
        Trim(KEY, ours, NOTHING, NOTHING),
    ):
        answer = store.answer(message)
        assert isinstance(answer, Refused) and answer.seal == SECOND


def test_image_ahead_of_the_log_or_beside_it_is_refused():
    store = sealed()
    store.answer(Append(KEY, FIRST, NOTHING, (turn(1),)))
    assert isinstance(store.answer(Put(KEY, FIRST, at(2), (1,), b"x")), Gap)
    assert isinstance(store.answer(Put(KEY, FIRST, at(1, SECOND), (1,), b"x")), Gap)
    assert isinstance(store.answer(Put(KEY, FIRST, at(1), (1,), b"x")), Kept)
    assert bytes(store.document(KEY, at(1))[1]) == b"x"
    with pytest.raises(StateError, match="does not hold it"):
        store.document(KEY, at(2))


def test_log_is_trimmed_only_behind_an_image_that_is_held():
    store = sealed()
    store.answer(Append(KEY, FIRST, NOTHING, tuple(turn(n) for n in (1, 2, 3))))
    assert isinstance(store.answer(Trim(KEY, FIRST, at(2), at(2))), Gap)
    store.answer(Put(KEY, FIRST, at(2), (1,), b"x"))
    assert isinstance(store.answer(Trim(KEY, FIRST, at(2), at(2))), Receipt)
    assert ends(store).history.first == 2 and ends(store).whole


def test_later_epoch_takes_the_place_of_a_tail_that_was_never_published():
    store = sealed()
    store.answer(Append(KEY, FIRST, NOTHING, tuple(turn(n) for n in (1, 2, 3))))
    store.answer(Seal(KEY, SECOND))
    store.answer(Append(KEY, SECOND, at(1), (turn(2, SECOND),)))
    restarted = Store("node", store._storage)
    for copy in (store, restarted):
        history = ends(copy).history
        assert history.end == at(2, SECOND) and at(1) in history and at(2) not in history and at(3) not in history


def test_store_that_is_left_out_of_a_set_keeps_nothing_but_that():
    store = sealed()
    store.answer(Append(KEY, FIRST, NOTHING, (turn(1),)))
    store.answer(Put(KEY, FIRST, at(1), (1,), b"x"))
    store.answer(Seal(KEY, SECOND))
    assert isinstance(store.answer(NameSet(KEY, SECOND, at(1), (OTHER,), "r")), Receipt)
    left = ends(Store("node", store._storage))
    assert left.named is not None and left.named.members == (OTHER,)
    assert left.history.runs == () and left.images == () and left.seal == SECOND


def test_image_as_of_nothing_is_none_of_a_session_that_begins_anew():
    store = sealed()
    assert isinstance(store.answer(Put(KEY, FIRST, NOTHING, (0,), b"x")), Kept)
    store.answer(Seal(KEY, SECOND, anew=True))
    assert ends(store).images == () and ends(Store("node", store._storage)).images == ()


def test_member_whose_log_ends_elsewhere_is_not_named():
    store = sealed()
    assert isinstance(store.answer(NameSet(KEY, FIRST, at(1), (store.member,), "r")), Gap)


def test_late_repetition_of_an_installation_takes_nothing_back():
    store = Store("node", FakeStorage("0" * 32))
    install = Install(KEY, FIRST, (turn(5), turn(6)))
    store.answer(install)
    store.answer(Append(KEY, FIRST, at(6), (turn(7),)))
    answer = store.answer(install)
    assert isinstance(answer, Receipt) and answer.end == at(7)


def test_late_repetition_of_an_installation_takes_nothing_back_of_which_an_image_is_left():
    store = sealed()
    install = Install(KEY, FIRST, (turn(5), turn(6)))
    store.answer(install)
    store.answer(Append(KEY, FIRST, at(6), (turn(7), turn(8))))
    store.answer(Put(KEY, FIRST, at(8), (1,), b"x"))
    store.answer(Trim(KEY, FIRST, at(8), at(8)))
    assert ends(store).history.first == 8
    late = store.answer(install)
    assert isinstance(late, Receipt) and late.end == at(8) and ends(store).images


def test_full_store_writes_nothing_and_says_what_is_free():
    storage = FakeStorage("0" * 32, room=400)
    store = sealed(storage)
    assert isinstance(store.answer(Append(KEY, FIRST, NOTHING, (turn(1),))), Receipt | Full)
    end = ends(store).history.end
    answer = store.answer(Append(KEY, FIRST, end, tuple(turn(n) for n in range(end.sequence + 1, 9))))
    assert isinstance(answer, Full) and answer.wanted > answer.free == storage.room
    assert ends(store).history.end == end


def test_tombstone_is_all_that_stays_of_a_deleted_session_for_a_week():
    storage = FakeStorage("0" * 32)
    store = sealed(storage)
    store.answer(Append(KEY, FIRST, NOTHING, (turn(1), turn(2))))
    store.answer(Put(KEY, FIRST, at(2), (1,), b"x"))
    store.answer(Append(KEY, FIRST, at(2), (record(Deleted(NOTHING, UNIX), 3),)))
    for _ in range(2):
        left = ends(store)
        assert left.deleted and left.whole and left.images == () and left.history.first == 3
        store = Store("node", storage)
    store.forget_tombstones(UNIX)
    store.forget_tombstones(UNIX + TOMBSTONE_SECONDS - 1)
    assert ends(store).deleted
    store.forget_tombstones(UNIX + TOMBSTONE_SECONDS + 1)
    assert store.index() == () and storage.keys() == ()


def test_tombstone_of_what_nobody_deleted_is_kept_for_minutes():
    store = sealed()
    store.answer(Append(KEY, FIRST, NOTHING, (turn(1), record(Deleted(NOTHING, 0.0), 2))))
    store.forget_tombstones(UNIX)
    store.forget_tombstones(UNIX + UNASKED_SECONDS - 1)
    assert ends(store).deleted
    store.forget_tombstones(UNIX + UNASKED_SECONDS + 1)
    assert store.index() == ()


@pytest.mark.parametrize("deleted_at", [0.0, UNIX])
def test_tombstone_stays_while_somebody_may_be_about_to_make_the_session_anew(deleted_at: float):
    store = sealed()
    store.answer(Append(KEY, FIRST, NOTHING, (record(Deleted(NOTHING, deleted_at), 1),)))
    store.forget_tombstones(UNIX)
    store.answer(Seal(KEY, SECOND))
    later = UNIX + TOMBSTONE_SECONDS
    store.forget_tombstones(later)
    store.forget_tombstones(later + UNASKED_SECONDS - 1)
    assert ends(store).seal == SECOND
    assert isinstance(store.answer(NameSet(KEY, SECOND, at(1), (store.member,), "r")), Receipt)
    store.answer(Append(KEY, SECOND, at(1), (turn(2, SECOND),)))
    store.forget_tombstones(later + 2 * TOMBSTONE_SECONDS)
    assert ends(store).history.end == at(2, SECOND)


def test_where_deleted_sessions_take_too_much_room_those_of_an_hour_ago_go():
    storage = FakeStorage("0" * 32)
    store = sealed(storage)
    store.answer(Append(KEY, FIRST, NOTHING, (record(Deleted(NOTHING, UNIX), 1),)))
    for crowded, hours_later in ((True, 0), (True, 0.9), (False, 1.1)):
        storage.crowded = crowded
        store.forget_tombstones(UNIX + hours_later * CROWDED_SECONDS)
        assert ends(store).deleted
    storage.crowded = True
    store.forget_tombstones(UNIX + 1.1 * CROWDED_SECONDS)
    assert store.index() == ()


def test_where_they_take_too_much_room_those_of_an_hour_ago_go_though_turns_expire_meanwhile():
    storage = FakeStorage("0" * 32)
    storage.crowded = True
    store = sealed(storage)
    store.answer(Append(KEY, FIRST, NOTHING, (record(Deleted(NOTHING, UNIX), 1),)))
    turns = [SessionKey(KEY.tenant, f"idempotency key {number}") for number in range(8)]
    for number, key in enumerate(turns):  # one every ten minutes
        store.answer(Seal(key, FIRST))
        store.answer(Append(key, FIRST, NOTHING, (record(Deleted(NOTHING, 0.0), 1),)))
        now = UNIX + number * UNASKED_SECONDS
        store.forget_tombstones(now)
        kept = {ends.key for ends in store.index()}
        assert kept == {*turns[max(number - 1, 0) : number + 1], *([KEY] if now <= UNIX + CROWDED_SECONDS else [])}


def test_deleted_sessions_leave_little_in_an_arena_and_nothing_that_is_a_tenants():
    with shared_directory() as directory:
        arena = open_small(directory, 1 << 20)
        store = Store("node", arena)
        for number in range(500):
            key = SessionKey(KEY.tenant, f"idempotency key {number:064x}")
            rounds = tuple(record(a_round(3, *range(200)), 1 + n) for n in range(number % 20))
            store.answer(Seal(key, FIRST))
            store.answer(NameSet(key, FIRST, NOTHING, (store.member, OTHER), "r"))
            store.answer(Append(key, FIRST, NOTHING, rounds))
            end = NOTHING if not rounds else at(len(rounds))
            gone = store.answer(Append(key, FIRST, end, (record(Deleted(NOTHING, UNIX), 1 + len(rounds)),)))
            assert isinstance(gone, Receipt)
        assert arena.used < 500 * 700 and arena.used_by(KEY.tenant) == 0
        index = store.index()
        arena.close()
        again = Store("node", arena := open_small(directory, 1 << 20))
        assert again.index() == index and all(one.deleted and one.named for one in index)
        arena.close()


def test_session_that_is_deleted_in_a_full_arena_makes_room():
    with shared_directory() as directory:
        arena = open_small(directory, 1 << 20)
        store = sealed(arena)
        rounds = tuple(record(a_round(3, *range(200)), 1 + n) for n in range(80))
        for n, one in enumerate(rounds):
            store.answer(Append(KEY, FIRST, at(n) if n else NOTHING, (one,)))
        arena.put(SessionKey("u", "another"), at(1), (), bytes(arena.largest - 256))
        assert arena.largest < 256
        gone = store.answer(Append(KEY, FIRST, at(80), (record(Deleted(NOTHING, UNIX), 81),)))
        assert isinstance(gone, Receipt)
        assert arena.free > 60_000 and arena.used_by(KEY.tenant) == 0
        arena.close()


def scenario(member: Member) -> list[ToStore]:
    """A session's life in one copy: every kind of change."""
    return [
        Seal(KEY, FIRST),
        NameSet(KEY, FIRST, NOTHING, (member, OTHER), "r1"),
        Append(KEY, FIRST, NOTHING, (turn(1), record(a_round(3, 9), 2), record(ended("t1"), 3))),
        Put(KEY, FIRST, at(3), (4,), b"one"),
        Trim(KEY, FIRST, at(3), at(3)),
        Seal(KEY, SECOND),
        Append(KEY, SECOND, at(3), (turn(4, SECOND), turn(5, SECOND))),
        NameSet(KEY, SECOND, at(5, SECOND), (member,), "r2"),
        Put(KEY, SECOND, at(5, SECOND), (6,), b"two"),
        Trim(KEY, SECOND, at(5, SECOND), at(4, SECOND)),
        Append(KEY, SECOND, at(5, SECOND), (record(Deleted(NOTHING, UNIX), 6, SECOND),)),
    ]


def play(store: Store, messages: list[ToStore]) -> list[FromStore]:
    return [store.answer(message) for message in messages]


def test_process_may_die_before_any_write_and_what_was_asked_again_is_done():
    whole = Store("node", FakeStorage("0" * 32))
    messages = scenario(whole.member)
    expected = play(whole, messages)
    assert not any(isinstance(answer, Gap | Refused | Full) for answer in expected)
    for writes in range(100):
        storage = FakeStorage("0" * 32)
        storage.writes_left = writes
        store, done, died, seal = Store("node", storage), 0, False, Epoch(0, 0)
        while done < len(messages):
            try:
                answer = store.answer(messages[done])
                assert answer == expected[done]
                seal, done = max(seal, messages[done].epoch), done + 1
            except ProcessDied:
                storage.writes_left, died = None, True
                store = Store("node", storage)
                assert done == 0 or ends(store).seal >= seal
        assert store.index() == whole.index()
        if not died:
            assert writes > len(messages)
            return
    pytest.fail("the scenario has no end")


def test_store_restarts_during_a_thousand_captures_and_every_receipt_holds():
    rng = random.Random(5)
    storage = FakeStorage("0" * 32)
    store = sealed(storage)
    store.answer(Append(KEY, FIRST, NOTHING, (turn(1),)))
    deaths = 0
    for sequence in range(2, 1002):
        messages = [
            Append(KEY, FIRST, at(sequence - 1), (record(a_round(sequence, sequence), sequence),)),
            Put(KEY, FIRST, at(sequence), (sequence,), sequence.to_bytes(4)),
            Trim(KEY, FIRST, at(sequence), at(sequence)),
        ]
        while messages:
            storage.writes_left = rng.randint(0, 6)
            try:
                assert isinstance(store.answer(messages[0]), Receipt | Kept)
                del messages[0]
            except ProcessDied:
                deaths += 1
                storage.writes_left = None
                store = Store("node", storage)
                left = ends(store)
                assert left.whole and left.seal == FIRST and left.history.end >= at(sequence - 1)
        assert [image.order for image in ends(store).images] == [at(sequence)]
    assert deaths > 500
    assert bytes(store.document(KEY, at(1001))[1]) == (1001).to_bytes(4)
    assert len(storage.records(KEY)) < 10
