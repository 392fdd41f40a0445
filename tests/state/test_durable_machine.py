"""Any sequence of publications, deletions, sweeps, evictions and restarts, against a dictionary."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from state.errors import CapacityError, StaleError
from state.names import LEASES, Epoch, Order, SessionKey
from tests.state.stores import (
    TENANT,
    Clock,
    MemoryStore,
    checkpoint,
    data_of,
    document,
    open_tier,
    reader,
    segment,
)

TTL = 1000.0
BUDGET = 3500
SEGMENTS = [data_of(f"{number} ", 50 * (number + 1)) for number in range(8)]
KEYS = [SessionKey(TENANT, name) for name in "abcd"]

keys = st.sampled_from(KEYS)
epochs = st.builds(Epoch, st.integers(1, 2), st.integers(1, 2))
contents = st.lists(st.sampled_from(SEGMENTS), max_size=4, unique=True)


class DurableMachine(RuleBasedStateMachine):
    """`published`: order, text, segments and time of what each session's newest publication is; `deleted`: tombstones.

    A document may be missing only once documents had to make room, and a segment only once anything had to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.store.after = self.check_budget
        self.clock = Clock()
        self.published: dict[SessionKey, tuple[Order, str, list[bytes], float]] = {}
        self.deleted: list[tuple[SessionKey, Epoch, float]] = []
        self.total_written = 0
        self.reopen()

    def check_budget(self, name: str) -> None:
        assert self.store.counted() <= BUDGET, f"over the budget after {name}"

    @rule()
    def reopen(self) -> None:
        self.tier = open_tier(self.store, self.clock, budget=BUDGET, session_ttl=TTL)

    @rule(key=keys, epoch=epochs, sequence=st.integers(0, 9), parts=contents, seconds=st.floats(0, 9))
    def publish(self, key: SessionKey, epoch: Epoch, sequence: int, parts: list[bytes], seconds: float) -> None:
        text = f"{key.session} {epoch} {sequence} " + "." * (97 * sequence % 300)
        made = [checkpoint(f"{text} {at}", parts[: at + 1], seconds, None) for at in range(len(parts))]
        order = Order(epoch, sequence)
        late = key in self.published and self.published[key][0] >= order
        dead = any(name == key and epoch <= until for name, until, _ in self.deleted)
        try:
            done = self.tier.publish(key, epoch, sequence, document(text), made, reader(*parts))
        except StaleError:
            assert late or dead
            return
        except CapacityError:
            return
        assert not dead
        assert not late or self.total_written > BUDGET, "only a session whose document was evicted may go back"
        self.total_written += done.written
        if done.payload:
            assert all(self.tier.segment(segment(part).sha256) == part for part in parts)
        self.published[key] = (order, text, parts, self.clock())

    @rule(key=keys, epoch=epochs)
    def delete(self, key: SessionKey, epoch: Epoch) -> None:
        self.tier.delete(key, epoch)
        self.deleted.append((key, epoch, self.clock()))
        if key in self.published and self.published[key][0].epoch <= epoch:
            del self.published[key]

    @rule()
    def sweep(self) -> None:
        self.tier.sweep()
        self.deleted = [item for item in self.deleted if item[2] >= self.clock() - 2 * TTL]
        old = [key for key, (*_, at) in self.published.items() if self.clock() - at > TTL]
        for key in old:
            del self.published[key]
        assert not [name for name in self.store.content if name.startswith(LEASES)]
        again = self.tier.sweep()
        assert (again.records, again.segments, again.leftovers) == (0, 0, 0), "one sweep is enough"

    @rule(seconds=st.integers(1, int(TTL)))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def what_is_read_is_what_was_published(self) -> None:
        for key in KEYS:
            latest = self.tier.latest(key)
            expected = self.published.get(key)
            if latest is None:
                assert expected is None or self.total_written > BUDGET // 2
                continue
            assert expected is not None
            order, text, parts, _ = expected
            assert latest == (order, document(text))
            for part in parts:
                assert self.tier.segment(segment(part).sha256) in (part, None)

    @invariant()
    def all_sessions_are_found(self) -> None:
        found = {publication.key: publication.order for publication in self.tier.sessions()}
        assert found == {key: latest[0] for key in KEYS if (latest := self.tier.latest(key))}


TestDurableMachine = DurableMachine.TestCase
TestDurableMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
