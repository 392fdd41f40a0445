"""A session from the device into the durable tier, turn by turn, and back: nothing twice, no more lost than must."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deployment.engine.commands import Drop, Export, Import, Publish
from deployment.engine.durable_sessions import DurableSessions, KindsAt
from deployment.engine.events import Failed, Imported, Publishing
from deployment.whole_documents import NOTHING, Slices
from state.background import BackgroundWriter, Job
from state.document import open_document
from state.durable import DurableTier, Published
from state.errors import StoreError
from state.geometry import PAGE_TOKENS
from state.names import SEGMENTS, Epoch, Order, SessionKey
from state.session_record import SessionRecord
from tests.engine.tiny import PUBLIC, TinyDriver
from tests.state.stores import MemoryStore

KEY = SessionKey("a" * 64, "chat")
RECORD = SessionRecord("chat", (1, 2, 3))


class Durable:
    """A store, and what came of each publication by its sequence."""

    def __init__(self, budget: int = 1 << 24) -> None:
        self.store = MemoryStore()
        self.tier = DurableTier(self.store, budget, open_document)
        self.writer = BackgroundWriter(places=4, most_bytes=1 << 14)
        self.outcomes: dict[int, Any] = {}
        self.state: dict[int, KindsAt] = {}
        self.sessions = DurableSessions(self.tier, self.writer, 1e-4, self._told)

    def _told(self, key: SessionKey, order: Order, outcome: Any, checkpoints: KindsAt) -> None:
        assert key == KEY
        self.outcomes[order.sequence], self.state[order.sequence] = outcome, checkpoints

    @contextmanager
    def held_up(self) -> Iterator[threading.Event]:
        """The writer stands within the first publication that comes, until the block ends."""
        tier: Any = self.tier
        publish, begun, gate = tier.publish, threading.Event(), threading.Event()

        def late(*what: Any) -> Published:
            begun.set()
            assert gate.wait(30)
            return publish(*what)

        tier.publish = late
        try:
            yield begun
        finally:
            tier.publish = publish
            gate.set()
            assert self.writer.flush(timeout=30)

    def occupy(self, begun: threading.Event, size: int = 0) -> None:
        """The writer stands within another session's publication, which fails in its time."""
        tier: Any = self.tier
        self.writer.submit(
            Job(SessionKey("b" * 64, "other"), Order(Epoch(1, 1), 1), tier.publish, lambda _: None, size)
        )
        assert begun.wait(30)

    def driver(self, **more: Any) -> TinyDriver:
        return TinyDriver("dflash", durable=self.sessions, **{"lanes": 1, "images": 8, "pages": 24, **more})

    def segments(self) -> dict[str, int]:
        return {name: len(data) for name, data in self.store.content.items() if name.startswith(SEGMENTS)}


@pytest.fixture
def durable():
    made = Durable()
    yield made
    assert made.writer.close(timeout=30)


def turn(driver: TinyDriver, ledger: tuple[int, ...], asked: int, tokens: int = 2) -> tuple[int, ...]:
    """A turn of a session to whose ledger `asked` tokens are appended; returns the new ledger."""
    prompt = (*ledger, *random.Random(len(ledger)).choices(range(PUBLIC), k=asked))
    finished = driver.run(prompt, session="s", stable_boundary=len(prompt) - 1, max_tokens=tokens, ignore_eos=True)
    return prompt + finished.token_ids


def publish(
    driver: TinyDriver,
    durable: Durable,
    ledger: tuple[int, ...],
    sequence: int,
    record_alone: bool = False,
    epoch: int = 1,
) -> Publishing:
    answer = submit(driver, ledger, sequence, record_alone, epoch)
    assert durable.writer.flush(timeout=30)
    return answer


def submit(
    driver: TinyDriver, ledger: tuple[int, ...], sequence: int, record_alone: bool = False, epoch: int = 1
) -> Publishing:
    record = SessionRecord("chat", ledger, frontier=len(ledger) - 1)
    order = Order(Epoch(epoch, 1), sequence)
    answer = driver.call(Publish("p", "s", KEY, order, record, record_alone=record_alone))
    assert isinstance(answer, Publishing), answer
    return answer


def found(durable: Durable, driver: TinyDriver) -> Imported:
    with durable.tier.reading(KEY) as reading:
        assert reading is not None
        answer = driver.call(Import("i", "s", reading.document, origin="disk"))
    assert isinstance(answer, Imported), answer
    return answer


def test_twenty_published_turns_write_and_read_only_what_is_new(durable: Durable) -> None:
    driver, ledger = durable.driver(), ()
    before: dict[str, int] = {}
    written = 0
    for sequence in range(1, 21):
        ledger = turn(driver, ledger, 8)
        read = publish(driver, durable, ledger, sequence).read
        now = durable.segments()
        added = sum(size for name, size in now.items() if name not in before)
        record = sum(len(data) for name, data in durable.store.content.items() if "/sessions/" in name)
        assert durable.outcomes[sequence] == Published(Order(Epoch(1, 1), sequence), True, added + record)
        assert read == added, "the device was read for what is stored"
        written += added + record
        before = now
    assert (durable.sessions.flow_out.transfers, durable.sessions.flow_out.bytes) == (20, written)
    puts = [name for name in durable.store.puts if name.startswith(SEGMENTS)]
    assert len(puts) == len(set(puts)) == len(before)
    images, partial = 2 * 20, 2 * 2 * 20  # at a turn's start and end; pages of target and drafter
    full = 2 * (len(ledger) // PAGE_TOKENS)
    assert len(puts) == images + partial + full


def test_what_was_hashed_for_a_copy_is_not_hashed_again_for_the_durable_tier(durable: Durable, monkeypatch) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 70)
    slices = Slices(NOTHING)
    while not (part := driver.call(slices.asking(Export("e", "s", slice_bytes=1 << 20)))).whole:
        slices.take(part)
    hashed: list[int] = []
    sha256 = hashlib.sha256
    monkeypatch.setattr("state.codec.hashlib.sha256", lambda data: hashed.append(len(data)) or sha256(data))
    monkeypatch.setattr(durable.tier, "publish", lambda *what: Published(Order(Epoch(1, 1), 1), True, 0))
    assert publish(driver, durable, ledger, 1).read > 0
    assert len(hashed) == 1, "but for the document's own trailer"


def asked(driver: TinyDriver, ledger: tuple[int, ...], sequence: int, slice_bytes: int) -> Publishing:
    record = SessionRecord("chat", ledger, frontier=len(ledger) - 1)
    answer = driver.call(Publish("p", "s", KEY, Order(Epoch(1, 1), sequence), record, slice_bytes=slice_bytes))
    assert isinstance(answer, Publishing), answer
    return answer


def asked_for_all(driver: TinyDriver, ledger: tuple[int, ...], sequence: int, slice_bytes: int) -> list[int]:
    """How much was read after each slice."""
    answers: list[Publishing] = []
    while not (answers and answers[-1].whole):
        assert len(answers) < 500, "it does not come to its end"
        answers.append(asked(driver, ledger, sequence, slice_bytes))
    return [answer.read for answer in answers]


def copied(driver: TinyDriver) -> None:
    """Gives an image of the session to its copies, as every turn's end does first."""
    slices = Slices(NOTHING)
    while not (part := driver.call(slices.asking(Export("e", "s", slice_bytes=1 << 20)))).whole:
        slices.take(part)


def test_a_publication_in_slices_reads_no_more_than_its_slices_at_once_and_is_the_same(durable: Durable) -> None:
    driver, whole = durable.driver(), Durable()
    ledger = turn(driver, (), 150)
    copied(driver)
    first = asked(driver, ledger, 1, 700)
    assert not first.whole and not durable.outcomes and not durable.segments()
    read = [0, first.read, *asked_for_all(driver, ledger, 1, 700)]
    geometry = driver.engine.memory.geometry
    page = max(geometry.target_page_bytes, geometry.draft_page_bytes) + 512
    assert durable.writer.flush(30) and durable.outcomes[1].payload
    assert all(0 < after - before < 700 + page for before, after in itertools.pairwise(read))
    driver.engine._exchange._durable = whole.sessions
    publish(driver, whole, ledger, 1)
    assert durable.segments() == whole.segments() and len(read) > 3
    assert durable.tier.latest(KEY) == whole.tier.latest(KEY)
    assert whole.writer.close(30)


def test_slices_are_of_the_first_ones_moment_whatever_turns_come_between(durable: Durable) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 70)
    copied(driver)
    assert not asked(driver, ledger, 1, 700).whole
    turn(driver, ledger, 20)
    asked_for_all(driver, ledger, 1, 700)
    assert durable.writer.flush(30) and max(at for _, at in durable.state[1]) == len(ledger) - 1


def test_state_that_goes_between_two_slices_is_left_out_and_what_is_written_is_whole(durable: Durable) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 70)
    copied(driver)
    assert not asked(driver, ledger, 1, 700).whole
    table = driver.engine._sessions
    table._evict(table.checkpoints("s")[0])
    asked_for_all(driver, ledger, 1, 700)
    assert durable.writer.flush(30) and durable.state[1] == (("turn_end", len(ledger) - 1),)
    assert found(durable, durable.driver()).frontiers == (len(ledger) - 1,)


def test_a_publication_that_nobody_asks_on_for_is_dropped_with_the_next_one(durable: Durable) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 70)
    copied(driver)
    assert not asked(driver, ledger, 1, 700).whole
    publish(driver, durable, ledger, 2)
    assert list(durable.outcomes) == [2] and not durable.sessions._prepared
    assert not asked(driver, turn(driver, ledger, 90), 3, 700).whole
    driver.call(Drop("d", "s"))
    assert not durable.sessions._prepared


def test_a_new_tier_and_a_new_engine_go_on_where_the_last_turn_ended(durable: Durable) -> None:
    driver, ledger = durable.driver(), ()
    for sequence in (1, 2, 3):
        ledger = turn(driver, ledger, 30)
        publish(driver, durable, ledger, sequence)
    again = Durable()
    again.store.content = durable.store.content
    fresh = again.driver()
    answer = found(again, fresh)
    assert answer.record is not None and answer.record.ledger == ledger and len(ledger) - 1 in answer.frontiers
    assert again.sessions.flow_in.transfers > 1 and again.sessions.flow_in.bytes <= sum(durable.segments().values())
    assert turn(fresh, ledger, 3, tokens=9) == turn(driver, ledger, 3, tokens=9)
    started = fresh.started_events(fresh.events[-1].turn)[0]  # pyright: ignore[reportAttributeAccessIssue]
    assert (started.hit, started.reused, started.prefilled) == ("disk", len(ledger) - 1, 4)
    assert again.writer.close(timeout=30)


def test_a_record_alone_is_durable_beside_the_state_that_was_written_before_it(durable: Durable) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 70)
    publish(driver, durable, ledger, 1)
    written, state = durable.segments(), len(ledger) - 1
    for sequence in (2, 3):
        ledger = turn(driver, ledger, 9)
        assert publish(driver, durable, ledger, sequence, record_alone=True).read == 0
        assert durable.outcomes[sequence].payload and durable.segments() == written
    fresh = durable.driver()
    answer = found(durable, fresh)
    assert answer.record is not None and answer.record.ledger == ledger and max(answer.frontiers) == state
    ledger, gone_on = turn(driver, ledger, 3, tokens=9), turn(fresh, ledger, 3, tokens=9)
    assert gone_on == ledger
    started = fresh.started_events(fresh.events[-1].turn)[0]  # pyright: ignore[reportAttributeAccessIssue]
    assert (started.hit, started.reused) == ("disk", state)
    publish(driver, durable, ledger, 4)
    assert len(ledger) - 1 in found(durable, durable.driver()).frontiers


def test_a_record_that_has_no_state_to_stand_beside_brings_its_own(durable: Durable) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 70)
    assert publish(driver, durable, ledger, 1, record_alone=True).read > 0
    assert len(ledger) - 1 in found(durable, durable.driver()).frontiers
    for name in durable.segments():
        del durable.store.content[name]
    ledger = turn(driver, ledger, 5)
    publish(driver, durable, ledger, 2, record_alone=True)
    assert durable.outcomes[2].payload is False, "the state that it names is not there"
    ledger = turn(driver, ledger, 5)
    publish(driver, durable, ledger, 3, record_alone=True)
    assert durable.outcomes[3].payload and len(ledger) - 1 in found(durable, durable.driver()).frontiers


@pytest.mark.parametrize("left", ["nothing", "where its first turn began"])
def test_a_session_that_the_device_let_go_of_keeps_the_state_that_was_written_of_it(
    durable: Durable, left: str
) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 70)
    publish(driver, durable, ledger, 1)
    state = len(ledger) - 1
    ledger = turn(driver, ledger, 9)
    publish(driver, durable, ledger, 2, record_alone=True)
    table = driver.engine._sessions
    for checkpoint in table.checkpoints("s")[left != "nothing" :]:
        table._evict(checkpoint)
    answer = publish(driver, durable, ledger, 3)
    assert max(answer.frontiers) == state and answer.read == 0
    assert durable.outcomes[3].payload and max(durable.state[3]) == ("turn_start", state - 2)
    assert ("turn_end", state) in durable.state[3]
    fresh = durable.driver()
    assert state in found(durable, fresh).frontiers
    assert turn(fresh, ledger, 3, tokens=9) == turn(driver, ledger, 3, tokens=9)
    started = fresh.started_events(fresh.events[-1].turn)[0]  # pyright: ignore[reportAttributeAccessIssue]
    assert (started.hit, started.reused) == ("disk", state)


def test_state_on_another_way_is_no_reason_to_leave_out_what_the_device_has(durable: Durable) -> None:
    driver = durable.driver()
    publish(driver, durable, turn(driver, (), 70), 1)
    prompt = (6, 5, 4, 6, 5)
    ledger = prompt + driver.run(prompt, session="s", max_tokens=2, ignore_eos=True).token_ids
    publish(driver, durable, ledger, 2)
    assert ("turn_end", len(ledger) - 1) in durable.state[2]


def test_a_session_of_which_nothing_is_anywhere_is_stored_without_state_and_says_so(durable: Durable) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 70)
    driver.engine._sessions.drop("s")
    assert publish(driver, durable, ledger, 1).frontiers == () and durable.state[1] == ()
    assert found(durable, durable.driver()).frontiers == ()


@pytest.mark.parametrize("other", [True, False], ids=["it waits", "it is being written"])
def test_a_record_that_comes_before_state_is_written_stands_beside_that_and_not_beside_older_one(
    durable: Durable, other: bool
) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 70)
    publish(driver, durable, ledger, 1)
    ledger = turn(driver, ledger, 30)
    state = len(ledger) - 1
    with durable.held_up() as begun:
        if other:
            durable.occupy(begun)
        submit(driver, ledger, 2)
        assert begun.wait(30)
        ledger = turn(driver, ledger, 5)
        assert submit(driver, ledger, 3, record_alone=True).read == 0
    assert durable.outcomes[3].payload and ("turn_end", state) in durable.state[3]
    assert durable.outcomes[2] == "superseded" if other else durable.outcomes[2].payload
    fresh = durable.driver()
    answer = found(durable, fresh)
    assert answer.record is not None and answer.record.ledger == ledger and max(answer.frontiers) == state
    assert turn(fresh, ledger, 3, tokens=9) == turn(driver, ledger, 3, tokens=9)


def test_state_whose_write_failed_follows_with_the_record_that_came_meanwhile(durable: Durable, monkeypatch) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 70)
    state, put = len(ledger) - 1, durable.store.put

    def full(name: str, data: Any) -> None:
        monkeypatch.setattr(durable.store, "put", put)
        raise StoreError("put", name, "no space left", 28)

    monkeypatch.setattr(durable.store, "put", full)
    with durable.held_up() as begun:
        submit(driver, ledger, 1)
        assert begun.wait(30)
        ledger = turn(driver, ledger, 5)
        submit(driver, ledger, 2, record_alone=True)
    assert isinstance(durable.outcomes[1], StoreError) and durable.outcomes[2].payload
    assert state in found(durable, durable.driver()).frontiers


def test_a_write_that_failed_leaves_what_was_written_before_to_the_next_record(durable: Durable, monkeypatch) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 70)
    publish(driver, durable, ledger, 1)
    written = durable.state[1]
    with monkeypatch.context() as broken:
        broken.setattr(durable.tier, "publish", lambda *what: (_ for _ in ()).throw(StoreError("put", "x", "full", 28)))
        publish(driver, durable, ledger, 2)
    driver.engine._sessions.drop("s")
    publish(driver, durable, ledger, 3)
    assert durable.state[3] == written


def test_state_that_is_being_written_goes_with_no_record_of_the_session_that_follows(durable: Durable) -> None:
    driver = durable.driver()
    with durable.held_up() as begun:
        submit(driver, turn(driver, (1, 2, 3), 30), 1)
        assert begun.wait(30)
        driver.call(Drop("d", "s"))
        prompt = (6, 5, 4, 6, 5)
        ledger = prompt + driver.run(prompt, session="s", max_tokens=2, ignore_eos=True).token_ids
        driver.engine._sessions.drop("s")
    publish(driver, durable, ledger, 2, record_alone=True)
    assert durable.state[1] and durable.state[2] == ()


@pytest.mark.parametrize("before", [True, False], ids=["beside what was written", "without any"])
def test_as_long_as_too_much_waits_records_go_without_new_state_which_follows_later(
    durable: Durable, before: bool
) -> None:
    driver, ledger, written = durable.driver(), (), ()
    if before:
        ledger = turn(driver, ledger, 70)
        publish(driver, durable, ledger, 1)
        written = durable.state[1]
    ledger = turn(driver, ledger, 30)
    with durable.held_up() as begun:
        durable.occupy(begun, 1 << 14)
        answer = submit(driver, ledger, 2)
        assert answer.read == 0 and answer.frontiers == tuple(at for _, at in written)
    assert durable.state[2] == written and durable.outcomes[2].payload is False
    assert found(durable, durable.driver()).record.ledger == ledger  # pyright: ignore[reportOptionalMemberAccess]
    publish(driver, durable, ledger, 3)
    assert durable.outcomes[3].payload and ("turn_end", len(ledger) - 1) in durable.state[3]


@pytest.mark.parametrize("same_epoch", [True, False])
def test_no_token_of_a_deleted_session_comes_back_when_its_id_is_used_again(durable: Durable, same_epoch: bool) -> None:
    """The device is told of the end, or the epoch is another; each is enough."""
    driver = durable.driver()
    publish(driver, durable, turn(driver, (1, 2, 3), 30), 1)
    if same_epoch:
        driver.call(Drop("d", "s"))
    else:
        durable.tier.delete(KEY, Epoch(1, 1))
        driver.engine._sessions.drop("s")
    prompt = (6, 5, 4, 6, 5)
    ledger = prompt + driver.run(prompt, session="s", max_tokens=2, ignore_eos=True).token_ids
    publish(driver, durable, ledger, 2, record_alone=True, epoch=1 if same_epoch else 2)
    latest = durable.tier.latest(KEY)
    assert latest is not None
    manifest = open_document(latest[1]).manifest
    assert manifest.checkpoints and all(entry.frontier < len(ledger) for entry in manifest.checkpoints)
    assert all(tuple(manifest.ledger_of(entry).tolist()) == ledger for entry in manifest.checkpoints)


def test_state_from_outside_is_not_signed_with_a_record_that_follows_it(durable: Durable, tmp_path) -> None:
    (tmp_path / "key").write_text("k" * 16)
    elsewhere = Durable()
    source = elsewhere.driver()
    turn(source, (), 70)
    driver = durable.driver(cluster_key_file=tmp_path / "key")
    document = source.call(Export("e", "s")).document
    assert driver.call(Import("i", "s", document)).signed is False
    ledger = open_document(document).manifest.session.record().ledger
    publish(driver, durable, ledger, 1)
    driver.engine._sessions.drop("s")  # as memory that is short does
    publish(driver, durable, ledger, 2, record_alone=True)
    latest = durable.tier.latest(KEY)
    assert latest is not None and durable.outcomes[2].payload
    opened = open_document(latest[1], key=b"k" * 16)
    assert opened.manifest.checkpoints and not opened.signed
    assert elsewhere.writer.close(timeout=30)


def image_of(deepest: bool) -> Callable[[Any], int]:
    """Which segment is lost: the image of the deepest checkpoint, or of the one before it."""
    return lambda manifest: int(manifest.checkpoints[-1 if deepest else 0].segments[0])


@pytest.mark.parametrize("damage", ["removed", "changed"])
@pytest.mark.parametrize("deepest", [True, False], ids=["the deepest", "an earlier one"])
def test_a_segment_that_is_lost_costs_its_checkpoint_only(durable: Durable, deepest: bool, damage: str) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 70, tokens=9)
    publish(driver, durable, ledger, 1)
    latest = durable.tier.latest(KEY)
    assert latest is not None
    manifest = open_document(latest[1]).manifest
    start, end = (entry.frontier for entry in manifest.checkpoints)
    digest = manifest.segments[image_of(deepest)(manifest)].sha256.hex()
    name = f"{SEGMENTS}{digest[:2]}/{digest}"
    if damage == "removed":
        del durable.store.content[name]
    else:
        durable.store.content[name] = bytes(len(durable.store.content[name]))
    fresh = durable.driver()
    assert found(durable, fresh).frontiers == ((start,) if deepest else (end,))
    assert turn(fresh, ledger, 3) == turn(driver, ledger, 3)
    started = fresh.started_events(fresh.events[-1].turn)[0]  # pyright: ignore[reportAttributeAccessIssue]
    assert started.reused == (start if deepest else end) and started.reused + started.prefilled == len(ledger) + 3


def test_without_any_segment_the_session_is_rebuilt_from_its_ledger(durable: Durable) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 70)
    publish(driver, durable, ledger, 1)
    for name in durable.segments():
        del durable.store.content[name]
    fresh = durable.driver()
    answer = found(durable, fresh)
    assert answer.frontiers == () and answer.record is not None and answer.record.ledger == ledger
    assert turn(fresh, ledger, 3) == turn(driver, ledger, 3)


def test_what_the_store_let_go_of_is_written_again_by_the_next_turn_and_the_ledger_does_not_wait(
    durable: Durable,
) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 70)
    publish(driver, durable, ledger, 1)
    for name in durable.segments():
        del durable.store.content[name]
    ledger = turn(driver, ledger, 5)
    publish(driver, durable, ledger, 2)
    assert durable.outcomes[2].payload is False
    assert found(durable, durable.driver()).record.ledger == ledger  # pyright: ignore[reportOptionalMemberAccess]
    ledger = turn(driver, ledger, 5)
    publish(driver, durable, ledger, 3)
    assert durable.outcomes[3].payload is True
    assert len(ledger) - 1 in found(durable, durable.driver()).frontiers


def test_a_publication_is_what_the_session_was_even_if_the_device_forgets_it_before_it_is_written(
    durable: Durable, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = durable.driver(images=2)
    ledger = turn(driver, (), 70)
    late: list[Any] = []
    with monkeypatch.context() as held:
        held.setattr(durable.writer, "submit", late.append)
        publish(driver, durable, ledger, 1)
    for number in range(4):
        driver.run(tuple(random.Random(number).choices(range(PUBLIC), k=90)), session=f"other-{number}", max_tokens=2)
    assert not driver.engine._sessions.checkpoints("s")
    durable.writer.submit(late[0])
    assert durable.writer.flush(timeout=30)
    fresh = durable.driver()
    assert len(ledger) - 1 in found(durable, fresh).frontiers
    assert turn(fresh, ledger, 3) == turn(driver, ledger, 3)


def test_without_a_durable_tier_publishing_is_refused_and_a_detached_document_brings_its_ledger(
    durable: Durable,
) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 20)
    publish(driver, durable, ledger, 1)
    bare = TinyDriver("dflash", lanes=1, images=8, pages=24)
    refused = bare.call(Publish("p", "s", KEY, Order(Epoch(1, 1), 2), RECORD))
    assert isinstance(refused, Failed) and "durable tier" in refused.message
    answer = found(durable, bare)
    assert answer.frontiers == () and answer.record is not None and answer.record.ledger == ledger


def test_a_store_that_cannot_say_what_it_has_leaves_the_session_as_it_was(
    durable: Durable, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = durable.driver()
    ledger = turn(driver, (), 20)
    publish(driver, durable, ledger, 1)
    latest = durable.tier.latest(KEY)
    assert latest is not None
    held = driver.engine._sessions.checkpoints("s")

    def broken(sha256: bytes) -> bytes:
        raise StoreError("get", sha256.hex(), "input/output error", 5)

    monkeypatch.setattr(durable.tier, "segment", broken)
    answer = driver.call(Import("i", "s", latest[1]))
    assert isinstance(answer, Failed) and "input/output error" in answer.message
    assert driver.engine._sessions.checkpoints("s") == held
