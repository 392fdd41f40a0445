"""A full store keeps what saves most prefill, takes payload before text, and takes nothing that is in use."""

from __future__ import annotations

import pytest

from state.durable import DurableTier
from state.errors import CapacityError
from state.names import SEGMENTS, Epoch, SessionKey
from tests.state.stores import (
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

SIZE = 1000


def key(number: int) -> SessionKey:
    return SessionKey(TENANT, f"chat {number}")


def content(number: int, size: int = SIZE) -> bytes:
    return data_of(f"{number} ", size)


class Watched:
    """A tier whose counted bytes are checked after every single change of its store."""

    def __init__(self, budget: int = 1 << 30) -> None:
        self.store = MemoryStore()
        self.clock = Clock()
        self.peak = 0
        self.store.after = self._look
        self.tier = self.within(budget)

    def within(self, budget: int) -> DurableTier:
        """The same store, with another budget."""
        self.budget = budget
        self.tier = open_tier(self.store, self.clock, budget=budget)
        return self.tier

    def has(self, *numbers: int) -> list[bool]:
        return [self.tier.segment(segment(content(number)).sha256) is not None for number in numbers]

    def _look(self, name: str) -> None:
        assert self.store.counted() <= self.budget, name


def filled(*seconds: float) -> Watched:
    """One session for each of the prefill seconds, with one segment of the same size; the budget is exactly full."""
    watched = Watched()
    for number, value in enumerate(seconds):
        publish(watched.tier, str(number), [content(number)], key=key(number), seconds=value)
        watched.clock.now += 1
    watched.within(watched.tier.size())
    return watched


def record_bytes() -> int:
    watched = filled(1.0)
    return watched.tier.size() - SIZE


def test_a_publication_that_fits_to_the_byte_evicts_nothing() -> None:
    watched = filled(1.0, 2.0)
    watched.within(watched.budget + record_bytes() + SIZE)
    assert publish(watched.tier, "2", [content(2)], key=key(2))
    assert watched.tier.size() == watched.budget
    assert watched.has(0, 1, 2) == [True, True, True]


def test_one_byte_less_evicts_what_saves_least_and_keeps_its_document() -> None:
    watched = filled(2.0, 1.0, 3.0)
    watched.within(watched.budget + record_bytes() + SIZE - 1)
    assert publish(watched.tier, "3", [content(3)], key=key(3))
    assert watched.has(0, 1, 2, 3) == [True, False, True, True]
    assert len(watched.tier.sessions()) == 4
    latest = watched.tier.latest(key(1))
    assert latest is not None and latest[1] == document("1")


def test_value_is_seconds_per_byte() -> None:
    watched = Watched()
    publish(watched.tier, "0", [content(0, 4000)], key=key(0), seconds=3.0)
    publish(watched.tier, "1", [content(1, 1000)], key=key(1), seconds=1.0)
    watched.within(watched.tier.size() + record_bytes())
    publish(watched.tier, "2", [content(2)], key=key(2))
    assert watched.tier.segment(segment(content(0, 4000)).sha256) is None
    assert watched.has(1, 2) == [True, True]


def test_a_checkpoint_saves_only_what_its_nearest_kept_ancestor_does_not() -> None:
    watched = Watched()
    chain = [
        checkpoint("a", [content(0)], 10.0),
        checkpoint("b", [content(1)], 11.0, "a"),
        checkpoint("c", [content(2)], 14.0, "b"),
    ]
    watched.tier.publish(KEY, Epoch(1, 1), 1, document("chain"), chain, reader(*(content(n) for n in range(3))))
    order: list[list[bool]] = []
    for number in range(3, 5):
        watched.within(watched.tier.size() + record_bytes())
        publish(watched.tier, str(number), [content(number)], key=key(number), seconds=100.0)
        order.append(watched.has(0, 1, 2))
    # b saves 1 s over a; then c saves 4 s over a, no longer 3 s over b.
    assert order == [[True, False, True], [True, False, False]]


def test_one_eviction_counts_what_a_checkpoint_saves_once_its_ancestor_is_gone() -> None:
    watched = Watched()
    chain = [
        checkpoint("a", [content(0)], 10.0),
        checkpoint("b", [content(1)], 11.0, "a"),
        checkpoint("c", [content(2)], 14.0, "b"),
    ]
    watched.tier.publish(KEY, Epoch(1, 1), 1, document("chain"), chain, reader(*(content(n) for n in range(3))))
    publish(watched.tier, "3", [content(3)], key=key(3), seconds=3.5)
    watched.within(watched.tier.size() + record_bytes() + 100)
    publish(watched.tier, "4", [content(4), content(5)], key=key(4), seconds=100.0)
    assert watched.has(0, 1, 2, 3) == [True, False, True, False]


def test_an_ancestor_may_lie_in_another_session() -> None:
    watched = Watched()
    publish(watched.tier, "trunk", [content(0)], key=key(0), seconds=9.0)
    publish(watched.tier, "fork", [content(1)], key=key(1), seconds=10.0, ancestor="trunk")
    publish(watched.tier, "alone", [content(2)], key=key(2), seconds=5.0)
    watched.within(watched.tier.size() + record_bytes())
    publish(watched.tier, "3", [content(3)], key=key(3))
    assert watched.has(0, 1, 2, 3) == [True, False, True, True]


def test_ancestors_that_go_in_a_circle_do_no_harm() -> None:
    watched = Watched()
    publish(watched.tier, "a", [content(0)], key=key(0), ancestor="b")
    publish(watched.tier, "b", [content(1)], key=key(1), ancestor="a")
    watched.within(watched.tier.size() + record_bytes())
    assert publish(watched.tier, "2", [content(2)], key=key(2))


def test_a_segment_that_another_checkpoint_needs_stays() -> None:
    watched = Watched()
    shared = content(9)
    for number in range(2):
        publish(watched.tier, str(number), [shared, content(number)], key=key(number), seconds=1.0 + number)
    watched.within(watched.tier.size() + record_bytes())
    publish(watched.tier, "2", [content(2)], key=key(2), seconds=50.0)
    assert watched.has(0, 1, 9, 2) == [False, True, True, True]
    watched.within(watched.tier.size() + 2 * record_bytes())
    publish(watched.tier, "3", [content(3), content(4)], key=key(3), seconds=50.0)
    assert watched.has(1, 9, 2, 3, 4) == [False, False, True, True, True]


def test_checkpoints_that_share_all_their_segments_can_be_evicted_together() -> None:
    watched = Watched()
    for number in range(3):
        publish(watched.tier, str(number), [content(9)], key=key(number))
    watched.within(watched.tier.size() + record_bytes())
    assert publish(watched.tier, "4", [content(4)], key=key(4))
    assert watched.has(9, 4) == [False, True]


def test_leftovers_go_before_anything_of_worth() -> None:
    watched = filled(0.0, 1.0)
    publish(watched.within(1 << 30), "new", [content(5)], key=key(1), sequence=2)  # leaves content 1 to nobody
    watched.within(watched.tier.size() + record_bytes())
    publish(watched.tier, "2", [content(2)], key=key(2))
    assert watched.has(0, 1, 5, 2) == [True, False, True, True]


def test_documents_go_last_for_documents_only_and_the_longest_unpublished_first() -> None:
    watched = filled(1.0, 2.0, 3.0)
    watched.within(record_bytes() * 3)
    watched.store.after = lambda name: None  # the budget was cut: it holds again with the next publication
    assert not publish(watched.tier, "3", [content(3, 10)], key=key(3)), "payload is not worth another's document"
    assert watched.store.counted() <= watched.budget
    assert sorted(found.key.session for found in watched.tier.sessions()) == ["chat 1", "chat 2", "chat 3"]
    assert not [name for name in watched.store.content if name.startswith(SEGMENTS)]


def test_a_publication_whose_payload_does_not_fit_keeps_its_document() -> None:
    watched = Watched(budget=3 * SIZE)
    assert not publish(watched.tier, "large", [content(0), content(1), content(2)])
    latest = watched.tier.latest(KEY)
    assert latest is not None and latest[1] == document("large")


def test_a_document_that_does_not_fit_is_refused_and_evicts_nothing() -> None:
    watched = filled(1.0, 2.0)
    before = dict(watched.store.content)
    with pytest.raises(CapacityError, match="durable store") as refused:
        publish(watched.tier, "x" * watched.budget, key=key(7))
    assert refused.value.wanted > watched.budget
    assert watched.store.content == before


def test_what_is_being_read_is_not_evicted() -> None:
    watched = filled(1.0, 2.0)
    watched.within(watched.budget + record_bytes())
    with watched.tier.reading(key(0)) as reading:
        assert reading is not None
        assert publish(watched.tier, "2", [content(2)], key=key(2), seconds=3.0)
        assert reading.segment(segment(content(0)).sha256) == content(0)
    assert watched.has(0, 1, 2) == [True, False, True]


def test_nothing_is_evicted_when_all_of_it_is_in_use() -> None:
    watched = filled(1.0)
    with watched.tier.reading(key(0)), pytest.raises(CapacityError):
        publish(watched.tier, "1", [content(1)], key=key(1))
    assert watched.has(0) == [True]
    assert [found.key for found in watched.tier.sessions()] == [key(0)]


def test_a_session_does_not_evict_what_its_own_new_publication_needs() -> None:
    watched = filled(1.0, 5.0)
    watched.within(watched.budget + 500)
    chain = [checkpoint("0", [content(0)], 1.0), checkpoint("next", [content(0), content(7)], 1.1, "0")]
    done = watched.tier.publish(key(0), Epoch(1, 1), 2, document("0"), chain, reader(content(0), content(7)))
    assert done.payload
    assert watched.has(0, 1, 7) == [True, False, True]


def test_bytes_that_another_process_is_about_to_write_are_counted() -> None:
    watched = Watched()
    budget = 2 * record_bytes() + 2 * SIZE - 1
    first, second = watched.within(budget), watched.within(budget)
    outcomes: list[bool] = []

    def read(sha256: bytes) -> bytes:
        outcomes.append(publish(second, "1", [content(1)], key=key(1)))
        return content(0)

    made = [checkpoint("0", [content(0)])]
    assert first.publish(key(0), Epoch(1, 1), 1, document("0"), made, read).payload
    assert outcomes == [False], "one byte is lacking, so the second one's payload waits for another time"
    assert len(watched.tier.sessions()) == 2


def test_a_long_conversation_in_a_small_store_writes_each_segment_once() -> None:
    """Bytes written grow with the conversation, not with its square, and the newest checkpoint is never the victim."""
    watched = Watched()
    watched.within(12 * SIZE + 12 * record_bytes())
    pages: list[bytes] = []
    for turn in range(10):
        pages.append(content(turn))
        assert publish(watched.tier, f"{turn}", list(pages), sequence=turn, seconds=turn)
        assert all(watched.has(*range(turn + 1)))
    written = [name for name in watched.store.puts if name.startswith(SEGMENTS)]
    assert len(written) == len(set(written)) == 10
