"""Any sequence of calls and restarts, against dictionaries; and after each step inside a call, a crash."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from state.arena import Arena
from state.arena_view import ArenaView
from state.errors import CapacityError
from state.names import SessionKey
from state.stored import Reservation, StoredDocument
from tests.state.arenas import APPLICATION, HEAP, NODE, open_image, open_recording, order, shared_directory
from tests.state.stores import data_of

KEYS = [SessionKey("a" * 64, "first"), SessionKey("b" * 64, "second"), SessionKey("b" * 64, "третья")]
WRITERS = ["engine-1", "engine-2"]

keys = st.sampled_from(KEYS)
sizes = st.sampled_from([0, 1, 7, 8, 200, 700, 2100, 5000])

Documents = tuple[tuple[StoredDocument, bytes], ...]


@dataclass(frozen=True)
class Content:
    """All that an arena holds, for its user. `writing`: reservations that are not ready."""

    records: dict[SessionKey, tuple[bytes, ...]] = field(default_factory=dict)
    documents: dict[SessionKey, Documents] = field(default_factory=dict)
    writing: frozenset[Reservation] = frozenset()

    def with_records(self, key: SessionKey, records: tuple[bytes, ...]) -> Content:
        others = {name: value for name, value in self.records.items() if name != key}
        return replace(self, records=others | ({key: records} if records else {}))

    def with_documents(self, key: SessionKey, documents: Documents) -> Content:
        others = {name: value for name, value in self.documents.items() if name != key}
        return replace(self, documents=others | ({key: documents} if documents else {}))

    def with_document(self, stored: StoredDocument, data: bytes) -> Content:
        documents = (*self.documents.get(stored.key, ()), (stored, data))
        return self.with_documents(stored.key, tuple(sorted(documents, key=lambda item: item[0].order)))


def content_of(arena: Arena) -> Content:
    found = Content(writing=frozenset(arena.writing()))
    sessions = arena.keys()
    for key in sessions:
        found = found.with_records(key, arena.records(key))
        found = found.with_documents(key, tuple((item, bytes(arena.document(item))) for item in arena.documents(key)))
    return found


def check_room(arena: Arena, content: Content) -> None:
    """Nothing is lost: when all is given back, the arena is one piece again."""
    assert arena.free + arena.used == HEAP
    for reservation in content.writing:
        arena.forget(reservation.writer)
    sessions = arena.keys()
    for key in sessions:
        arena.remove(key)
    assert arena.largest == arena.free == HEAP


class ArenaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.directory = self.stack.enter_context(shared_directory())
        self.crashed = self.stack.enter_context(shared_directory())
        self.content = Content()
        self.inherited: frozenset[Reservation] = frozenset()
        self.sequence = 0
        self.open()

    def open(self) -> None:
        self.mapping = open_recording(self.directory)
        self.arena = Arena(self.mapping)

    def teardown(self) -> None:
        self.arena.close()
        self.stack.close()

    def step(self, call: Callable[[], Content], between: Iterable[Content] = ()) -> None:
        """A call that gives what the arena holds after it; a crash may also leave what is `between`."""
        free, before = self.arena.free, self.content
        self.mapping.steps.clear()
        try:
            self.content = call()
        except CapacityError:
            assert self.arena.free == free
        allowed = (before, self.content, *between)
        for image in self.mapping.steps:
            again = open_image(self.crashed, image)
            found = content_of(again)
            assert found in allowed
            check_room(again, found)
            again.close()

    def numbered(self) -> tuple[int, tuple[int, ...]]:
        """A record's or document's number, higher than any before, and what frontiers a document has."""
        self.sequence += 1
        return self.sequence, tuple(range(self.sequence % 4))

    @rule()
    def restart(self) -> None:
        self.arena.close()
        self.open()
        self.inherited = self.content.writing
        assert self.arena.awaited == {reservation.writer for reservation in self.inherited}

    @rule(key=keys, lengths=st.lists(sizes, min_size=1, max_size=4), remains=st.booleans())
    def append(self, key: SessionKey, lengths: list[int], remains: bool) -> None:
        records = [data_of(f"{self.numbered()[0]} ", length) for length in lengths]

        def call() -> Content:
            self.arena.append(key, records, remains=remains)
            return self.content.with_records(key, (*self.content.records.get(key, ()), *records))

        self.step(call)

    @rule(key=keys, first=st.integers(0, 9))
    def trim(self, key: SessionKey, first: int) -> None:
        old = self.content.records.get(key, ())
        states = [self.content.with_records(key, old[count:]) for count in range(min(first, len(old)) + 1)]
        self.step(lambda: self.arena.trim(key, first) or states[-1], states)

    @rule(key=keys, size=sizes)
    def put(self, key: SessionKey, size: int) -> None:
        number, frontiers = self.numbered()
        data = data_of(f"{number} ", size)

        def call() -> Content:
            stored = self.arena.put(key, order(number), frontiers, data)
            assert stored == StoredDocument(key, order(number), frontiers, size, stored.place)
            return self.content.with_document(stored, data)

        self.step(call)

    @rule(key=keys, which=st.integers(0, 9))
    def discard(self, key: SessionKey, which: int) -> None:
        old = self.content.documents.get(key, ())
        if old:
            chosen = old[which % len(old)]
            after = self.content.with_documents(key, tuple(item for item in old if item != chosen))
            self.step(lambda: self.arena.discard(chosen[0]) or after)

    @rule(key=keys)
    def remove(self, key: SessionKey) -> None:
        records, documents = self.content.records.get(key, ()), self.content.documents.get(key, ())
        states = [self.content.with_documents(key, documents[count:]) for count in range(len(documents) + 1)]
        states += [states[-1].with_records(key, records[count:]) for count in range(len(records) + 1)]
        self.step(lambda: self.arena.remove(key) or states[-1], states)

    @rule(writer=st.sampled_from(WRITERS), key=keys, size=sizes)
    def reserve(self, writer: str, key: SessionKey, size: int) -> None:
        number, frontiers = self.numbered()

        def call() -> Content:
            made = self.arena.reserve(writer, key, order(number), frontiers, size)
            return replace(self.content, writing=self.content.writing | {made})

        self.step(call)

    @rule(which=st.integers(0, 9), good=st.booleans())
    def finish(self, which: int, good: bool) -> None:
        """Its writer has written it, or has given up."""
        if not self.content.writing:
            return
        reservation = sorted(self.content.writing, key=lambda item: item.generation)[which % len(self.content.writing)]
        data = data_of("written by another ", reservation.document.size)
        view = ArenaView(APPLICATION, NODE, self.arena.incarnation, writable=True, directory=self.directory)
        view.write(reservation)[:] = data
        view.close()
        after = replace(self.content, writing=self.content.writing - {reservation})
        if good:
            after = after.with_document(reservation.document, data)
            self.step(lambda: after if self.arena.ready(reservation) == reservation.document else self.content)
        else:
            self.step(lambda: self.arena.abandon(reservation) or after)

    @rule(writer=st.sampled_from(WRITERS), named=st.booleans())
    def register(self, writer: str, named: bool) -> None:
        """Only what it held before the restart, and does not name, is freed."""
        own = {item for item in self.content.writing if item.writer == writer}
        freed = set() if named else own & self.inherited
        names = [item.generation for item in own] if named else []
        assert set(self.arena.register(writer, [*names, 10**6])) == (own if named else set())
        assert writer not in self.arena.awaited
        self.inherited = frozenset(item for item in self.inherited if item.writer != writer)
        self.content = replace(self.content, writing=self.content.writing - freed)

    @rule(writer=st.sampled_from(WRITERS))
    def forget(self, writer: str) -> None:
        self.arena.forget(writer)
        assert writer not in self.arena.awaited
        self.content = replace(
            self.content, writing=frozenset(item for item in self.content.writing if item.writer != writer)
        )

    @invariant()
    def what_is_there_is_what_was_put(self) -> None:
        assert content_of(self.arena) == self.content


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None, derandomize=True)
