"""What a host store keeps in its arena, and what it says when there is no room or no such thing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from state.arena import Arena
from state.arena_view import ArenaView
from state.errors import ArenaError, CapacityError, StateError
from state.names import Epoch, Order, SessionKey
from state.stored import StoredDocument
from tests.state.arenas import (
    APPLICATION,
    HEAP,
    KEY,
    NODE,
    open_image,
    open_recording,
    open_small,
    order,
    shared_directory,
)
from tests.state.stores import data_of

OTHER = SessionKey(KEY.tenant, "other")


@pytest.fixture
def directory() -> Iterator[Path]:
    with shared_directory() as path:
        yield path


@pytest.fixture
def arena(directory: Path) -> Iterator[Arena]:
    opened = open_small(directory)
    yield opened
    opened.close()


def view_of(arena: Arena, directory: Path, *, writable: bool = False) -> ArenaView:
    return ArenaView(APPLICATION, NODE, arena.incarnation, writable=writable, directory=directory)


# ---------------------------------------------------------------------------------------------------- logs


def test_records_come_back_in_order_though_their_chunks_lie_out_of_order(directory: Path) -> None:
    arena = open_small(directory)
    arena.append(OTHER, [b"x" * 9000])
    arena.append(KEY, [b"first"])
    arena.remove(OTHER)  # the next chunk comes to lie before the first
    arena.append(KEY, [b"second" + b"." * 3000, b"third"])
    arena.close()
    again = open_small(directory)
    assert [record[:6] for record in again.records(KEY)] == [b"first", b"second", b"third"]
    again.close()


def test_an_append_beyond_the_room_changes_nothing(arena: Arena) -> None:
    arena.append(KEY, [b"kept"])
    free = arena.free
    with pytest.raises(CapacityError, match=rf"arena, bytes in one piece: 4\d{{4}} wanted, {arena.largest} free"):
        arena.append(KEY, [b"small", b"x" * 40000])
    assert (arena.records(KEY), arena.free) == ((b"kept",), free)
    with pytest.raises(CapacityError):
        arena.append(OTHER, [b"x" * 40000])
    assert arena.keys() == (KEY,)


def test_a_log_takes_the_last_room_in_a_small_chunk(arena: Arena) -> None:
    arena.put(OTHER, order(1), (), b"x" * (HEAP - 1024))
    arena.append(KEY, [b"r" * 200])
    assert arena.records(KEY) == (b"r" * 200,)


@pytest.mark.parametrize("damaged, left", [(2, 2), (1, 1), (0, 0)])
def test_nothing_is_kept_from_the_first_damaged_record_on(directory: Path, damaged: int, left: int) -> None:
    arena = open_small(directory)
    records = [f"record {number} ".encode() * 20 for number in range(3)]
    arena.append(KEY, records)
    arena.append(KEY, [b"x" * 5000])  # in the next chunk
    arena.close()
    path = next(directory.iterdir())
    content = bytearray(path.read_bytes())
    content[content.index(records[damaged]) + 5] ^= 1
    again = open_image(directory, bytes(content))
    assert again.records(KEY) == tuple(records[:left])
    again.append(KEY, [b"next"])
    again.close()
    last = open_small(directory)
    assert last.records(KEY) == (*records[:left], b"next")
    last.remove(KEY)
    assert last.free == HEAP
    last.close()


def test_a_count_below_zero_is_refused(arena: Arena) -> None:
    arena.append(KEY, [b"record"])
    with pytest.raises(StateError, match="first is -1, must be 0 or more"):
        arena.trim(KEY, -1)


def test_a_tenants_bytes_are_those_of_its_records_and_documents_alone(arena: Arena) -> None:
    stranger = SessionKey("stranger", "one")
    for key in (KEY, OTHER, stranger):
        arena.append(key, [b"record"])
        arena.put(key, order(1), (5,), bytes(2000))
    assert arena.used_by(KEY.tenant) + arena.used_by("stranger") == arena.used
    assert arena.used_by(KEY.tenant) > 1.8 * arena.used_by("stranger") > 2000
    assert arena.used_by("nobody") == 0


def test_what_is_left_of_a_deleted_session_takes_what_it_needs_and_is_nobodys(directory: Path) -> None:
    arena = open_small(directory)
    arena.append(KEY, [b"r" * 5000, b"tombstone"])
    arena.append(KEY, [b"tombstone", b"seal"], remains=True)
    arena.trim(KEY, 2)
    arena.close()
    again = open_small(directory)
    assert again.records(KEY) == (b"tombstone", b"seal")
    assert again.used <= 384 and again.used_by(KEY.tenant) == 0
    again.append(KEY, [b"made anew"])
    assert again.records(KEY) == (b"tombstone", b"seal", b"made anew")
    assert again.used_by(KEY.tenant) > 2048
    again.close()


def test_deleted_sessions_take_too_much_beyond_a_sixteenth(directory: Path) -> None:
    arena = open_small(directory)
    keys = [SessionKey("t", str(number)) for number in range(20)]
    for key in keys:
        assert arena.crowded == (arena.used > arena.size / 16)
        arena.append(key, [b"tombstone"], remains=True)
    assert arena.crowded
    arena.close()
    again = open_small(directory)
    assert again.crowded
    for key in keys:
        again.remove(key)
    assert not again.crowded and again.free == HEAP
    again.close()


# ---------------------------------------------------------------------------------------------------- documents


def test_documents_come_in_the_order_of_epoch_and_sequence(arena: Arena) -> None:
    orders = [Order(Epoch(7, 2), 0), Order(Epoch(7, 1), 9), Order(Epoch(6, 5), 11)]
    for number, each in enumerate(orders):
        arena.put(KEY, each, (number,), b"document")
    assert [stored.order for stored in arena.documents(KEY)] == orders[::-1]


def test_a_document_is_read_only_and_one_that_is_gone_is_refused(arena: Arena) -> None:
    stored = arena.put(KEY, order(1), (5,), memoryview(b"document"))
    assert arena.document(stored).readonly
    arena.discard(stored)
    arena.put(KEY, order(2), (5,), b"another ")  # in the same place
    for call in (arena.document, arena.discard):
        with pytest.raises(StateError, match=r"has no document of order 7\.1\.1 at"):
            call(stored)


@pytest.mark.parametrize(
    "key, sequence, frontiers, problem",
    [
        (SessionKey("t" * 1025, "s"), 0, (), "tenant has 1025 bytes, may have 1024"),
        (SessionKey("t", "\ud800"), 0, (), "session .* must be valid Unicode"),
        (KEY, -1, (), "sequence is -1, must be 0 to 2"),
        (KEY, 0, (3, -2), "smallest frontier is -2"),
        (KEY, 0, tuple(range(1024)), "1024 frontiers, may have 1023"),
    ],
)
def test_a_document_that_no_header_can_describe_is_refused(
    arena: Arena, key: SessionKey, sequence: int, frontiers: tuple[int, ...], problem: str
) -> None:
    with pytest.raises(StateError, match=problem):
        arena.put(key, order(sequence), frontiers, b"document")
    assert arena.free == HEAP


@pytest.mark.parametrize("kind", ["log", "document"])
def test_whatever_a_crash_leaves_can_be_filled_to_the_last_byte_and_read_again(directory: Path, kind: str) -> None:
    arena = open_small(directory)
    free = arena.free
    arena.put(OTHER, order(1), (), b"")
    header_bytes = free - arena.free
    arena.remove(OTHER)
    arena.close()
    mapping = open_recording(directory)
    arena = Arena(mapping)
    if kind == "log":
        arena.append(KEY, [b"record"])
    else:
        arena.discard(arena.put(KEY, order(1), (), b"document"))
    steps = mapping.steps
    arena.close()
    for image in steps:
        again = open_image(directory, image)
        data = data_of("all there is ", again.largest - header_bytes)
        again.put(OTHER, order(1), (), data)
        assert again.largest == 0 or kind == "document"
        again.close()
        last = open_small(directory)
        assert [bytes(last.document(stored)) for stored in last.documents(OTHER)] == [data]
        last.close()


def test_an_arena_in_use_for_long_is_well_filled() -> None:
    """Sessions grow and are replaced, and the oldest goes when there is no room, as a host store does it. When one has
    to go, three fifths of the arena are in use at the median, though a document takes up to a tenth of it."""
    chance = random.Random(7)
    used: list[float] = []
    with shared_directory() as directory:
        arena = open_small(directory, 1 << 22)
        sessions: dict[SessionKey, int] = {}
        for number in range(4000):
            key = SessionKey("t", str(chance.randrange(60)))
            size = min(400_000, sessions.pop(key, int(chance.lognormvariate(9.5, 1.2))) + chance.randrange(4000))
            sessions[key] = size
            while True:
                try:
                    arena.append(key, [b"r" * 200] * 3)
                    old = arena.documents(key)
                    arena.put(key, order(number), (), bytes(size))
                    break
                except CapacityError:
                    used.append(arena.used / arena.size)
                    arena.remove(oldest := next(iter(sessions)))
                    sessions.pop(oldest)
                    sessions.setdefault(key, size)
            for stored in old:
                arena.discard(stored)
        for key in sessions:
            arena.remove(key)
        assert arena.largest == arena.free == arena.size - 4096
        arena.close()
    assert len(used) > 100
    assert sorted(used)[len(used) // 2] > 0.6, sorted(used)[:: len(used) // 10]


# ---------------------------------------------------------------------------------------------------- writers


def test_a_writer_writes_where_the_store_reserved_and_a_reader_reads_it_there(arena: Arena, directory: Path) -> None:
    reservation = arena.reserve("engine", KEY, order(1), (64, 80), 5000)
    assert arena.documents(KEY) == ()
    writer, reader = view_of(arena, directory, writable=True), view_of(arena, directory)
    writer.write(reservation)[:] = data_of("image ", 5000)
    with pytest.raises(ArenaError, match="holds no document of order"), reader.read(reservation.document):
        pass
    stored = arena.ready(reservation)
    with reader.read(stored) as document:
        assert document.readonly
        assert bytes(document) == data_of("image ", 5000) == bytes(arena.document(stored))
    with pytest.raises(ArenaError, match="holds no reservation 1: its room was freed"):
        writer.write(reservation)
    with pytest.raises(ArenaError, match="mapped read-only"):
        reader.write(reservation)
    with pytest.raises(StateError, match=r"reservation 1 of writer engine .* is not being written"):
        arena.ready(reservation)
    writer.close()
    reader.close()


def test_a_reader_learns_that_what_it_read_was_discarded_meanwhile(arena: Arena, directory: Path) -> None:
    reader = view_of(arena, directory)
    for replaced in (False, True):
        stored = arena.put(KEY, order(1), (), b"x" * 500)
        reading = reader.read(stored)
        reading.__enter__()
        arena.discard(stored)
        if replaced:
            arena.put(KEY, order(1), (), b"y" * 500)
        with pytest.raises(ArenaError, match="was discarded while it was read"):
            reading.__exit__(None, None, None)
    wrong = StoredDocument(KEY, order(1), (), 500, 12345)
    with pytest.raises(ArenaError, match="holds no document"), reader.read(wrong):
        pass
    reader.close()


def test_a_reservation_that_was_given_up_is_room_again(arena: Arena) -> None:
    arena.abandon(arena.reserve("engine", KEY, order(1), (), 5000))
    assert arena.free == HEAP
    with pytest.raises(StateError, match="needs a writer's name"):
        arena.reserve("", KEY, order(1), (), 5000)


def test_after_a_restart_what_is_being_written_stays_until_its_writer_has_spoken(directory: Path) -> None:
    arena = open_small(directory)
    kept, dropped, others = (
        arena.reserve(writer, KEY, order(number), (), 3000) for number, writer in enumerate(["a", "a", "b"])
    )
    arena.close()
    again = open_small(directory)
    free = again.free
    assert again.awaited == {"a", "b"}
    assert again.register("c", [kept.generation]) == ()  # not its own
    assert (again.free, again.awaited) == (free, {"a", "b"})
    new = again.reserve("a", KEY, order(9), (), 100)  # its writer may not know of it yet
    free = again.free
    assert again.register("a", [kept.generation, 99]) == (kept,)
    assert again.free > free
    assert again.awaited == {"b"}
    assert again.writing() == (kept, others, new)
    again.ready(kept)
    with pytest.raises(StateError, match="is not being written"):
        again.ready(dropped)
    again.forget("b")
    assert again.awaited == frozenset()
    assert again.writing() == (new,)
    again.close()


def test_a_generation_is_never_given_twice(directory: Path) -> None:
    seen: list[int] = []
    for _ in range(3):
        arena = open_small(directory)
        reservation = arena.reserve("engine", KEY, order(1), (), 20)
        seen.append(reservation.generation)
        arena.abandon(reservation)
        arena.close()
    assert len(set(seen)) == 3


def test_a_thousand_captures_with_restarts_lose_nothing_and_leave_nothing_behind(directory: Path) -> None:
    """Two engines capture in turns; the store dies at any moment of that, and each engine says what it writes."""
    chance = random.Random(11)
    arena = open_small(directory, 1 << 20)
    view = view_of(arena, directory, writable=True)
    newest: dict[SessionKey, tuple[int, bytes]] = {}
    restarts = 0
    for number in range(1000):
        key, writer = SessionKey("t", str(number % 7)), f"engine-{number % 2}"
        data = data_of(f"{number} ", chance.randrange(30_000))
        reservation = arena.reserve(writer, key, order(number), (number,), len(data))
        half = len(data) // 2
        view.write(reservation)[:half] = data[:half]
        if chance.random() < 0.1:
            restarts += 1
            arena.close()
            arena = open_small(directory)
            for name in ("engine-0", "engine-1"):
                arena.register(name, [reservation.generation] if name == writer else [])
        view.write(reservation)[half:] = data[half:]
        for stored in (*arena.documents(key), arena.ready(reservation))[:-1]:
            arena.discard(stored)
        newest[key] = number, data
        for name, (sequence, content) in newest.items():
            (stored,) = arena.documents(name)
            assert stored.order == order(sequence)
            assert arena.document(stored) == content
    assert restarts > 50
    for key in newest:
        arena.remove(key)
    assert arena.largest == arena.free == arena.size - 4096
    view.close()
    arena.close()
