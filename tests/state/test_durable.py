"""A session outlives its cluster: what is published is found again, whole, and nothing older in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from state.byte_store import ByteStore, DirectoryStore
from state.errors import CapacityError, FormatError, StaleError, StateError, StoreError
from state.names import (
    LEASES,
    SEGMENTS,
    SESSIONS,
    TOMBSTONES,
    Epoch,
    Order,
    SessionKey,
    key_digest,
    publication_name,
    segment_name,
)
from state.publication_record import Publication, StoredCheckpoint, read_record, write_record
from tests.state.stores import (
    FIRST,
    KEY,
    TENANT,
    Clock,
    MemoryStore,
    checkpoint,
    data_of,
    document,
    open_tier,
    publish,
    reader,
    segment,
)

A, B, C = data_of("a"), data_of("b"), data_of("c")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def names(store: MemoryStore, prefix: str) -> list[str]:
    return sorted(name for name in store.content if name.startswith(prefix))


def test_what_is_published_is_read_back(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    assert publish(tier, "one", [A, B])
    assert tier.latest(KEY) == (Order(Epoch(1, 1), 1), document("one"))
    with tier.reading(KEY) as reading:
        assert reading is not None
        assert [reading.segment(segment(data).sha256) for data in (A, B)] == [A, B]
        assert reading.segment(segment(C).sha256) is None
    with tier.reading(SessionKey(TENANT, "other")) as reading:
        assert reading is None


def test_segments_are_stored_before_the_record_that_names_them(store: MemoryStore, clock: Clock) -> None:
    publish(open_tier(store, clock), "one", [A, B])
    kinds = [name for name in store.puts if not name.startswith(LEASES)]
    assert [name.startswith(SEGMENTS) for name in kinds] == [True, True, False]


def test_a_segment_that_is_there_is_not_written_again(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    publish(tier, "one", [A, B])
    store.puts.clear()
    asked: list[bytes] = []

    def read(sha256: bytes) -> bytes:
        asked.append(sha256)
        return reader(A, B, C)(sha256)

    done = tier.publish(KEY, Epoch(1, 1), 2, document("two"), [checkpoint("two", [A, B, C])], read)
    assert asked == [segment(C).sha256]
    assert [name for name in store.puts if name.startswith(SEGMENTS)] == [segment_name(segment(C).sha256)]
    assert done.written == len(C) + len(store.content[names(store, SESSIONS)[0]])


def test_a_segment_of_another_size_is_written_again(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    publish(tier, "one", [A])
    store.content[segment_name(segment(A).sha256)] = A[:50]
    publish(tier, "two", [A], sequence=2)
    assert tier.segment(segment(A).sha256) == A


def test_a_damaged_segment_is_named_removed_and_written_again(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    publish(tier, "one", [A])
    store.content[segment_name(segment(A).sha256)] = B
    with pytest.raises(FormatError, match=segment(A).sha256.hex()):
        tier.segment(segment(A).sha256)
    assert tier.segment(segment(A).sha256) is None
    publish(tier, "two", [A], sequence=2)
    assert tier.segment(segment(A).sha256) == A


def test_a_publisher_whose_bytes_are_not_what_they_are_named_is_refused(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    publish(tier, "one", [A])
    with pytest.raises(StateError, match=segment(B).sha256.hex()):
        tier.publish(KEY, Epoch(1, 1), 2, document("two"), [checkpoint("two", [B])], lambda sha256: C)
    assert tier.latest(KEY) == (Order(Epoch(1, 1), 1), document("one"))
    assert segment_name(segment(B).sha256) not in store.content


def test_a_torn_document_is_not_published(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    with pytest.raises(FormatError, match="torn"):
        tier.publish(KEY, Epoch(1, 1), 1, document("one")[:-1], [], reader())
    assert store.content == {}


@pytest.mark.parametrize("epoch, sequence", [(Epoch(1, 1), 2), (Epoch(1, 2), 1), (Epoch(2, 0), 1), (Epoch(10, 0), 0)])
def test_a_higher_order_replaces_a_lower_one(store: MemoryStore, clock: Clock, epoch: Epoch, sequence: int) -> None:
    tier = open_tier(store, clock)
    publish(tier, "one")
    publish(tier, "two", epoch=epoch, sequence=sequence)
    assert tier.latest(KEY) == (Order(epoch, sequence), document("two"))
    assert len(names(store, SESSIONS)) == 1


@pytest.mark.parametrize("epoch, sequence", [(Epoch(9, 9), 9), (Epoch(9, 9), 8), (Epoch(9, 8), 10), (Epoch(8, 10), 10)])
def test_an_order_that_is_not_higher_is_refused(store: MemoryStore, clock: Clock, epoch: Epoch, sequence: int) -> None:
    tier = open_tier(store, clock)
    publish(tier, "new", epoch=Epoch(9, 9), sequence=9)
    with pytest.raises(StaleError, match=r"published as 9\.9\.9"):
        publish(tier, "old", epoch=epoch, sequence=sequence)
    assert tier.latest(KEY) == (Order(Epoch(9, 9), 9), document("new"))


def test_a_stale_publication_that_lands_late_is_not_read_and_is_swept(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    publish(tier, "new", [A], epoch=Epoch(2, 1))
    late = Publication(KEY, Order(Epoch(1, 5), 70), clock(), ())
    store.content[publication_name(key_digest(KEY), late.order)] = write_record(late, document("old"))
    assert tier.latest(KEY) == (Order(Epoch(2, 1), 1), document("new"))
    assert [found.order for found in tier.sessions()] == [Order(Epoch(2, 1), 1)]
    assert tier.sweep().records == 1
    assert len(names(store, SESSIONS)) == 1


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:50] + b"?" + data[51:]]
)
def test_a_reader_takes_the_highest_record_that_is_whole(
    store: MemoryStore, clock: Clock, damage: Callable[[bytes], bytes]
) -> None:
    tier = open_tier(store, clock)
    publish(tier, "one", [A])
    higher = Publication(KEY, Order(Epoch(1, 1), 2), clock(), ())
    name = publication_name(key_digest(KEY), higher.order)
    store.content[name] = damage(write_record(higher, document("two")))
    assert tier.latest(KEY) == (Order(Epoch(1, 1), 1), document("one"))
    assert [found.order.sequence for found in tier.sessions()] == [1]
    tier.sweep()
    assert name not in store.content
    assert tier.segment(segment(A).sha256) == A


def test_a_record_whose_document_does_not_verify_is_passed_over(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    publish(tier, "one")
    higher = Publication(KEY, Order(Epoch(1, 1), 2), clock(), ())
    store.content[publication_name(key_digest(KEY), higher.order)] = write_record(higher, b"no document at all, but so")
    assert tier.latest(KEY) == (Order(Epoch(1, 1), 1), document("one"))


def test_a_record_under_the_name_of_another_session_is_not_believed(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    publish(tier, "mine")
    stranger = SessionKey("b" * 64, "chat")
    name = publication_name(key_digest(stranger), Order(Epoch(1, 1), 1))
    store.content[name] = store.content[names(store, SESSIONS)[0]]
    assert tier.latest(stranger) is None
    assert [found.key for found in tier.sessions()] == [KEY]


def test_a_store_that_cannot_read_the_newest_record_is_an_error_and_no_older_state(clock: Clock) -> None:
    class Failing(MemoryStore):
        broken = False

        def get(self, name: str) -> bytes | None:
            if self.broken and name.startswith(SESSIONS):
                raise StoreError("get", name, "Input/output error", 5)
            return super().get(name)

    store = Failing()
    tier = open_tier(store, clock)
    publish(tier, "one", [A])
    store.broken = True
    with pytest.raises(StoreError, match="Input/output"):
        tier.latest(KEY)
    with pytest.raises(StoreError, match="Input/output"):
        open_tier(store, clock).sweep()
    store.broken = False
    assert tier.segment(segment(A).sha256) == A, "a sweep that cannot read what is needed removes nothing"


def test_a_reader_that_listed_before_a_publication_finds_the_new_one(clock: Clock) -> None:
    class Racing(MemoryStore):
        meanwhile: Callable[[], object] | None = None

        def get(self, name: str) -> bytes | None:
            if name.startswith(SESSIONS) and self.meanwhile:
                act, self.meanwhile = self.meanwhile, None
                act()
            return super().get(name)

    store = Racing()
    tier = open_tier(store, clock)
    publish(tier, "one")
    store.meanwhile = lambda: publish(tier, "two", sequence=2)
    assert tier.latest(KEY) == (Order(Epoch(1, 1), 2), document("two"))
    store.meanwhile = lambda: publish(tier, "three", sequence=3)
    assert [found.order.sequence for found in open_tier(store, clock).sessions()] == [3]


def test_a_reader_does_not_take_an_older_record_for_one_that_was_just_replaced(clock: Clock) -> None:
    class Racing(MemoryStore):
        replaced = ""

        def __init__(self) -> None:
            super().__init__()
            self.older: dict[str, bytes] = {}

        def get(self, name: str) -> bytes | None:
            if name == self.replaced:
                publish(open_tier(self, clock), "four", sequence=4)
                self.content.update(self.older)  # pruning has not come to it yet
            return super().get(name)

    store = Racing()
    tier = open_tier(store, clock)
    publish(tier, "two", sequence=2)
    store.older = {name: data for name, data in store.content.items() if name.startswith(SESSIONS)}
    publish(tier, "three", sequence=3)
    store.replaced = publication_name(key_digest(KEY), Order(Epoch(1, 1), 3))
    store.content.update(store.older)
    assert tier.latest(KEY) == (Order(Epoch(1, 1), 4), document("four"))


def test_a_store_that_lists_what_it_does_not_have_is_an_error(clock: Clock) -> None:
    class Lying(MemoryStore):
        def get(self, name: str) -> bytes | None:
            return None

    store = Lying()
    tier = open_tier(store, clock)
    publish(tier, "one")
    with pytest.raises(StoreError, match="not there"):
        tier.latest(KEY)


def test_a_new_tier_over_the_same_store_finds_sessions_and_bytes_again(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    others = [SessionKey(tenant * 64, f"chat {number}") for tenant in "ab" for number in range(3)]
    for key in others:
        publish(tier, str(key), [A, data_of(str(key))], key=key)
    again = open_tier(store, clock)
    assert sorted(found.key for found in again.sessions()) == sorted(others)
    assert {found.key.tenant for found in again.sessions("b" * 64)} == {"b" * 64}
    assert again.size() == tier.size() == store.counted()
    assert [again.latest(key) for key in others] == [tier.latest(key) for key in others]


@pytest.mark.parametrize("session", ["../../etc/passwd", "/", "..", "a\0b", "x" * 1000, "ü", "CON", "a/b"])
def test_no_id_reaches_a_name(store: MemoryStore, clock: Clock, session: str) -> None:
    tier = open_tier(store, clock)
    key = SessionKey(TENANT, session)
    publish(tier, "one", [A], key=key)
    tier.delete(key, Epoch(0, 0))
    assert all(set(name) <= set("v1/sessiontombgl-.0123456789abcdefuw") for name in store.content)
    assert tier.latest(key) is not None


@pytest.mark.parametrize("key", [SessionKey("", "chat"), SessionKey(TENANT, "x" * 1025), SessionKey(TENANT, "\ud800")])
def test_an_id_that_cannot_be_stored_is_refused_by_name(store: MemoryStore, clock: Clock, key: SessionKey) -> None:
    with pytest.raises(StateError, match=r"tenant|session"):
        open_tier(store, clock).latest(key)


def test_tenant_and_session_cannot_be_shifted_into_each_other() -> None:
    assert key_digest(SessionKey("ab", "c")) != key_digest(SessionKey("a", "bc"))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda good: replace(good, seconds=float("nan")),
        lambda good: replace(good, seconds=-1.0),
        lambda good: replace(good, segments=(replace(good.segments[0], sha256=b"short"),)),
        lambda good: replace(good, segments=(replace(good.segments[0], size=-1),)),
        lambda good: replace(good, segments=(*good.segments, replace(good.segments[0], size=7))),
    ],
)
def test_facts_of_a_checkpoint_that_cannot_be_true_are_refused(
    store: MemoryStore, clock: Clock, wrong: Callable[[StoredCheckpoint], StoredCheckpoint]
) -> None:
    tier = open_tier(store, clock)
    with pytest.raises(StateError, match="checkpoint one"):
        tier.publish(KEY, Epoch(1, 1), 1, document("one"), [wrong(checkpoint("one", [A]))], reader(A))
    assert store.content == {}


def test_two_checkpoints_of_one_id_are_refused_since_eviction_could_not_tell_them_apart(
    store: MemoryStore, clock: Clock
) -> None:
    tier = open_tier(store, clock)
    twice = [checkpoint("one", [A]), checkpoint("one", [B])]
    with pytest.raises(StateError, match="checkpoint one: two checkpoints"):
        tier.publish(KEY, Epoch(1, 1), 1, document("one"), twice, reader(A, B))
    assert store.content == {}


@pytest.mark.parametrize("sequence", [-1, (1 << 53) + 1, (1 << 64) - 1])
def test_a_record_whose_order_no_name_can_have_is_passed_over(store: MemoryStore, clock: Clock, sequence: int) -> None:
    tier = open_tier(store, clock)
    publish(tier, "one", [A])
    forged = write_record(Publication(KEY, Order(FIRST, sequence), 1.0, ()), document("forged"))
    store.content[publication_name(key_digest(KEY), Order(Epoch(9, 9), 9))] = forged
    assert tier.latest(KEY) == (Order(FIRST, 1), document("one"))
    assert [publication.order for publication in tier.sessions()] == [Order(FIRST, 1)]
    assert tier.sweep().records == 1


def test_every_changed_byte_of_a_record_is_noticed() -> None:
    publication = Publication(KEY, Order(Epoch(1, 2), 3), 4.5, (checkpoint("one", [A, B], 1.5, "zero"),))
    data = write_record(publication, document("one"))
    assert read_record(data) == (publication, document("one"))
    for place in range(len(data)):
        with pytest.raises(FormatError):
            read_record(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(FormatError):
            read_record(data[:place])


# ------------------------------------------------------------------------------------------------ deletion and age


def test_a_deleted_session_is_gone_and_refused_up_to_its_epoch(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    publish(tier, "one", [A], epoch=Epoch(3, 2))
    tier.delete(KEY, Epoch(3, 2))
    assert tier.latest(KEY) is None
    assert tier.sessions() == []
    assert tier.tombstone(KEY) == Epoch(3, 2)
    assert names(store, SESSIONS) == []
    for epoch in (Epoch(3, 2), Epoch(3, 1), Epoch(2, 9)):
        with pytest.raises(StaleError, match=r"deleted at epoch 3\.2"):
            publish(tier, "again", epoch=epoch, sequence=99)
    publish(tier, "new", epoch=Epoch(3, 3), sequence=0)
    assert tier.latest(KEY) == (Order(Epoch(3, 3), 0), document("new"))
    tier.delete(KEY, Epoch(3, 2))
    assert tier.latest(KEY) is not None, "a late delete of an older epoch takes nothing newer"


def test_a_copy_that_comes_back_after_deletion_is_not_seen_and_is_swept(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    publish(tier, "one", [A])
    copied = {name: data for name, data in store.content.items() if name.startswith((SESSIONS, SEGMENTS))}
    tier.delete(KEY, Epoch(1, 1))
    tier.sweep()
    assert names(store, SEGMENTS) == []
    store.content.update(copied)
    again = open_tier(store, clock)
    assert again.latest(KEY) is None
    assert again.sessions() == []
    again.sweep()
    assert names(store, "v1/") == names(store, TOMBSTONES)


def test_a_publication_that_overtakes_its_deletion_is_not_seen(clock: Clock) -> None:
    store = MemoryStore()
    tier = open_tier(store, clock)
    store.after = lambda name: tier.delete(KEY, Epoch(1, 1)) if name.startswith(SEGMENTS) else None
    with pytest.raises(StaleError):
        publish(tier, "one", [A])
    assert tier.latest(KEY) is None


def test_a_tombstone_outlives_every_copy_and_then_goes(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock, session_ttl=1000.0)
    publish(tier, "one")
    tier.delete(KEY, Epoch(1, 1))
    clock.now += 1990
    tier.sweep()
    assert tier.tombstone(KEY) == Epoch(1, 1)
    clock.now += 20
    tier.sweep()
    assert tier.tombstone(KEY) is None
    assert store.content == {}


def test_a_session_that_was_not_published_for_its_time_to_live_goes(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock, session_ttl=1000.0)
    other = SessionKey(TENANT, "other")
    publish(tier, "one", [A])
    publish(tier, "two", [B], key=other)
    clock.now += 900
    publish(tier, "three", [C], sequence=2)
    clock.now += 200
    tier.sweep()
    assert [found.key for found in tier.sessions()] == [KEY]
    assert names(store, SEGMENTS) == [segment_name(segment(C).sha256)]


# ------------------------------------------------------------------------------------------------ sweep and leases


def test_a_sweep_keeps_what_publications_need_and_nothing_else(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    publish(tier, "one", [A, B])
    publish(tier, "two", [B, C], sequence=2)
    swept = tier.sweep()
    assert (swept.records, swept.segments) == (0, 1)
    assert {tier.segment(segment(data).sha256) for data in (A, B, C)} == {None, B, C}
    assert names(store, LEASES) == []


def test_segments_of_a_checkpoint_that_lacks_one_go_too(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    publish(tier, "one", [A, B])
    publish(tier, "two", [B], key=SessionKey(TENANT, "other"))
    del store.content[segment_name(segment(A).sha256)]
    publish(tier, "three", [B, C], key=SessionKey(TENANT, "third"))
    del store.content[segment_name(segment(B).sha256)]
    tier.sweep()
    assert names(store, SEGMENTS) == []
    assert len(tier.sessions()) == 3


def test_a_sweep_in_the_middle_of_a_publication_takes_nothing_of_it(clock: Clock) -> None:
    store = MemoryStore()
    tier = open_tier(store, clock)
    publish(tier, "old", [A])
    publish(tier, "new", [B], sequence=2)  # A is left over, and needed again
    sweeper = open_tier(store, clock)

    def sweep_once(name: str) -> None:
        if name == segment_name(segment(C).sha256):
            store.after = lambda name: None
            sweeper.sweep()

    store.after = sweep_once
    publish(tier, "third", [A, C], sequence=3)
    assert tier.segment(segment(A).sha256) == A
    assert tier.segment(segment(C).sha256) == C


def test_what_is_being_read_outlives_replacement_deletion_and_sweep(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    publish(tier, "one", [A])
    with tier.reading(KEY) as reading:
        assert reading is not None
        publish(tier, "two", [B], sequence=2)
        tier.delete(KEY, Epoch(1, 1))
        open_tier(store, clock).sweep()
        assert reading.segment(segment(A).sha256) == A
    tier.sweep()
    assert tier.segment(segment(A).sha256) is None


def test_a_reader_that_took_longer_than_its_lease_is_told(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock, lease_seconds=60)
    publish(tier, "one", [A])
    with tier.reading(KEY) as reading:
        assert reading is not None
        for _ in range(5):  # as long as it goes on, its lease does
            clock.now += 40
            assert reading.segment(segment(A).sha256) == A
        clock.now += 61
        with pytest.raises(StoreError, match="took too long"):
            reading.segment(segment(A).sha256)


def test_a_publisher_that_stalled_longer_than_its_lease_publishes_nothing(clock: Clock) -> None:
    store = MemoryStore()
    tier = open_tier(store, clock, lease_seconds=60)

    def stall(name: str) -> None:
        if name.startswith(SEGMENTS):
            clock.now += 61

    store.after = stall
    with pytest.raises(StoreError, match="took too long"):
        publish(tier, "one", [A])
    assert tier.latest(KEY) is None


def test_a_dead_process_is_in_nobodys_way_for_long(store: MemoryStore, clock: Clock) -> None:
    for kind in ("use", "sweep"):
        name = f"{LEASES}{kind}-{int(clock.now) + 20:016}-{10**9:016}-{'0' * 32}"
        store.content[name] = bytes.fromhex(key_digest(KEY)) + segment(A).sha256
    store.content[segment_name(segment(A).sha256)] = A
    tier = open_tier(store, clock)
    began = clock.now
    publish(tier, "one", [B])
    assert 20 < clock.now - began < 30, "waited until the dead sweep's lease had ended"
    tier.sweep()
    assert names(store, LEASES) == []
    assert tier.segment(segment(A).sha256) is None


def test_who_waits_for_a_sweep_longer_than_his_lease_has_one_afterwards(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock, lease_seconds=10)
    publish(tier, "one", [A])
    store.content[f"{LEASES}sweep-{int(clock.now) + 25:016}-{0:016}-{'0' * 32}"] = b""
    with tier.reading(KEY) as reading:
        assert reading is not None
        assert reading.segment(segment(A).sha256) == A


def test_a_sweep_that_does_not_end_is_an_error_after_a_while(clock: Clock) -> None:
    class Sweeping(MemoryStore):
        def list(self, prefix: str):
            if prefix == LEASES:
                self.content[f"{LEASES}sweep-{int(clock.now) + 30:016}-{0:016}-{'0' * 32}"] = b""
            return super().list(prefix)

    with pytest.raises(StoreError, match="does not end"):
        publish(open_tier(Sweeping(), clock), "one")


@pytest.mark.parametrize("ahead", [7200, 10 * 365 * 86400])
def test_a_lease_that_a_wrong_clock_dated_into_the_future_is_in_nobodys_way(
    store: MemoryStore, clock: Clock, ahead: int
) -> None:
    for kind in ("use", "sweep"):
        name = f"{LEASES}{kind}-{int(clock.now) + ahead:016}-{10**9:016}-{'0' * 32}"
        store.content[name] = bytes.fromhex(key_digest(KEY)) + segment(A).sha256
    store.content[segment_name(segment(A).sha256)] = A
    tier, began = open_tier(store, clock, budget=1000), clock.now
    assert publish(tier, "one", [B])
    tier.sweep()
    assert clock.now == began, "nobody waited"
    assert names(store, LEASES) == [] and tier.segment(segment(A).sha256) is None


def test_who_holds_a_lease_while_the_clock_is_set_back_is_told(store: MemoryStore, clock: Clock) -> None:
    tier = open_tier(store, clock)
    publish(tier, "one", [A])
    with tier.reading(KEY) as reading:
        assert reading is not None
        clock.now -= 1.5
        assert reading.segment(segment(A).sha256) == A, "as much as clocks may differ"
        clock.now -= 86400
        with pytest.raises(StoreError, match="set back"):
            reading.segment(segment(A).sha256)


@pytest.mark.parametrize("seconds", [0, -5, 3601, float("nan")])
def test_a_lease_that_would_end_at_once_or_never_is_refused(store: MemoryStore, clock: Clock, seconds: float) -> None:
    with pytest.raises(StateError, match=r"leases: .* must be from 1 to 3600"):
        open_tier(store, clock, lease_seconds=seconds)


def test_leftovers_of_dead_writers_count_and_are_swept_by_age(store: MemoryStore, clock: Clock) -> None:
    for age in (0, 7200):
        store.content[f"{SEGMENTS}aa/tmp-{int(clock.now) - age}-{'0' * 16}"] = A
    tier = open_tier(store, clock)
    assert tier.size() == 2 * len(A)
    assert tier.sessions() == []
    assert tier.sweep().leftovers == 1
    assert tier.size() == len(A)


def test_a_tier_of_less_than_nothing_is_refused(store: MemoryStore, clock: Clock) -> None:
    with pytest.raises(StateError, match="budget of -1"):
        open_tier(store, clock, budget=-1)
    with pytest.raises(StateError, match="session_ttl is 0"):
        open_tier(store, clock, session_ttl=0)
    with pytest.raises(StateError, match="session_ttl is nan"):
        open_tier(store, clock, session_ttl=float("nan"))


def test_the_same_holds_in_a_directory(tmp_path, clock: Clock) -> None:
    store: ByteStore = DirectoryStore(tmp_path / "durable")
    tier = open_tier(store, clock)
    publish(tier, "one", [A, B])
    publish(tier, "two", [B, C], sequence=2)
    tier.sweep()
    again = open_tier(DirectoryStore(tmp_path / "durable"), clock)
    assert again.latest(KEY) == (Order(Epoch(1, 1), 2), document("two"))
    assert [again.segment(segment(data).sha256) for data in (A, B, C)] == [None, B, C]
    with pytest.raises(CapacityError, match="durable store"):
        publish(open_tier(store, clock, budget=10), "three", sequence=3)
