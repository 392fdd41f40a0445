"""Sessions with images: what their state is found by, and how they are saved, moved, forked, rebuilt and continued."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deployment.engine.commands import Checkpoint, Export, ExportPages, Fork, Import, Publish, StageSegments
from deployment.engine.durable_sessions import DurableSessions
from deployment.engine.events import Checkpointed, Exported, Failed, Finished, Imported, Pages, Staged
from state.background import BackgroundWriter
from state.byte_store import DirectoryStore
from state.container import Blob
from state.document import open_document
from state.durable import DurableTier, Published
from state.media import Placed
from state.names import Epoch, Order, SessionKey
from state.session_record import SessionRecord
from tests.engine.seeing import SeeingDriver, shown
from tests.engine.ways import Unsynced
from tests.model.test_vision import image, words

PARTS = (words(9), image(32, 40), words(60, 1), image(24, 56, 1), words(6, 2))
"""120 tokens, of which two images are the ordinals [10, 30) and [92, 113): one on each side of a page's edge."""
MORE = tuple(words(5, 3))
TOKENS = 6


def driver(backend: str = "dflash2", **more: object) -> SeeingDriver:
    return SeeingDriver(backend, lanes=1, images=8, prefill_chunk=20, **more)  # pyright: ignore[reportArgumentType]


def turned(engine: SeeingDriver, session: str = "s", **more: object) -> tuple[tuple[int, ...], Placed]:
    """A turn of both images in a session; returns the ledger and its media."""
    ids, media = shown(*PARTS)
    finished = engine.run(ids, media=media, session=session, max_tokens=TOKENS, ignore_eos=True, **more)
    return ids + finished.token_ids, media


def record(ledger: tuple[int, ...], media: Placed) -> SessionRecord:
    return SessionRecord("s", ledger, frontier=len(ledger) - 1, media=media)


def go_on(engine: SeeingDriver, ledger: tuple[int, ...], media: Placed, session: str = "s") -> tuple[Finished, int]:
    """The next turn, of text, and how much of it was reused."""
    turn = engine.submit(ledger + MORE, media=media, session=session, max_tokens=TOKENS, ignore_eos=True)
    engine.steps()
    return engine.finished(turn), engine.started(turn).reused


@functools.cache
def undisturbed() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ledger after the first turn and the next turn's answer, of engines that kept nothing."""
    ids, media = shown(*PARTS)
    plain = SeeingDriver(lanes=1, images=0)
    ledger = ids + plain.run(ids, media=media, max_tokens=TOKENS, ignore_eos=True).token_ids
    return ledger, plain.run(ledger + MORE, media=media, max_tokens=TOKENS, ignore_eos=True).token_ids


def exported(engine: SeeingDriver, **how: object) -> Exported:
    answer = engine.call(Export("e", "s", **how))  # pyright: ignore[reportArgumentType]
    assert isinstance(answer, Exported), answer
    return answer


def imported(engine: SeeingDriver, document: Blob, **how: object) -> Imported:
    answer = engine.call(Import("i", "s", document, **how))  # pyright: ignore[reportArgumentType]
    assert isinstance(answer, Imported), answer
    return answer


# ------------------------------------------------------------------------------------------------ sharing


def test_a_session_goes_on_from_its_own_state_behind_its_images() -> None:
    engine = driver()
    ledger, media = turned(engine)
    finished, reused = go_on(engine, ledger, media)
    assert (ledger, finished.token_ids) == undisturbed() and reused == len(ledger) - 1


@pytest.mark.parametrize("number", [0, 1])
def test_the_same_text_with_another_image_shares_nothing_from_the_image_on(number: int) -> None:
    engine = driver(image_min_tokens=0)
    ids, media = shown(*PARTS)
    first = engine.run(ids, media=media, session="a", stable_boundary=70, max_tokens=3, ignore_eos=True)
    parts = list(PARTS)
    parts[1 + 2 * number] = (image(32, 40, 7), image(24, 56, 8))[number]
    other_ids, other = shown(*parts)
    assert other_ids == ids and other != media
    text = ids + first.token_ids + MORE
    turn = engine.submit(text, media=other, session="b", max_tokens=TOKENS, ignore_eos=True)
    engine.steps()
    alone = SeeingDriver(lanes=1, images=0).run(text, media=other, max_tokens=TOKENS, ignore_eos=True)
    assert engine.finished(turn).token_ids == alone.token_ids
    least, most = ((0, media[0].start), (70, media[1].start))[number]
    assert least <= engine.started(turn).reused <= most, "what lies before the image is shared"
    again = engine.submit(text, media=media, session="c", max_tokens=3, ignore_eos=True)
    engine.steps()
    assert engine.started(again).reused == len(ids) + 2, "the same images share it all"


def test_placeholders_without_their_image_share_nothing_with_it() -> None:
    engine = driver(image_min_tokens=0)
    ledger, media = turned(engine)
    for given in ((), media[:1]):
        turn = engine.submit(ledger + MORE, media=given, max_tokens=2, ignore_eos=True)
        engine.steps()
        assert engine.started(turn).reused <= media[len(given)].start


def test_a_state_that_ends_inside_an_image_is_found_under_that_image_alone() -> None:
    engine = driver(image_min_tokens=0)
    ids, media = shown(*PARTS)
    inside = media[0].start + 7
    engine.run(ids, media=media, session="a", system_boundary=inside, max_tokens=2, ignore_eos=True)
    for seed in (0, 7):
        other_ids, other = shown(words(9), image(32, 40, seed), words(12, 9))
        turn = engine.submit(other_ids, media=other, max_tokens=TOKENS, ignore_eos=True)
        engine.steps()
        alone = SeeingDriver(lanes=1, images=0).run(other_ids, media=other, max_tokens=TOKENS, ignore_eos=True)
        reused = engine.started(turn).reused
        assert reused == inside if seed == 0 else reused <= media[0].start
        assert engine.finished(turn).token_ids == alone.token_ids


def test_a_regenerated_turn_with_another_image_makes_a_checkpoint_of_its_own() -> None:
    engine = driver(image_min_tokens=0)
    ids, media = shown(*PARTS)
    _, other = shown(*PARTS[:3], image(24, 56, 9), *PARTS[4:])
    for given in (media, other):
        engine.run(ids, media=given, session="s", stable_boundary=len(ids) - 1, max_tokens=3, ignore_eos=True)
    document = open_document(exported(engine).document)
    starts = [
        document.manifest.media_of(entry) for entry in document.manifest.checkpoints if entry.kind == "turn_start"
    ]
    held = [c for c in engine.engine._sessions.checkpoints("s") if c.kind == "turn_start"]
    assert len(held) == 2 and len(starts) == 1
    assert [one.placed.media.digest for one in starts[0]] == [one.media.digest for one in other]


# ------------------------------------------------------------------------------------------------ elsewhere


def test_a_saved_session_goes_on_in_another_engine_with_its_images() -> None:
    source, destination = driver(), driver()
    ledger, media = turned(source)
    document = exported(source, record=record(ledger, media)).document
    answer = imported(destination, document)
    assert answer.record is not None and answer.record.media == media
    finished, reused = go_on(destination, ledger, answer.record.media)
    assert finished.token_ids == undisturbed()[1] and reused == len(ledger) - 1


def test_a_session_without_state_is_rebuilt_from_its_ledger_and_its_images() -> None:
    source, destination = driver(), driver()
    ledger, media = turned(source)
    document = exported(source, record=record(ledger, media), checkpoints=False).document
    answer = imported(destination, document)
    assert answer.frontiers == () and answer.record is not None
    finished, reused = go_on(destination, answer.record.ledger, answer.record.media)
    assert finished.token_ids == undisturbed()[1] and reused == 0


def test_a_fork_inside_the_second_image_and_at_the_end_goes_on_as_its_parent_would() -> None:
    engine = driver(image_min_tokens=0)
    ids, media = shown(*PARTS)
    inside = media[1].start + 4
    engine.run(ids, media=media, session="s", stable_boundary=inside, max_tokens=TOKENS, ignore_eos=True)
    ledger, expected = undisturbed()
    for child, frontier, reused in (("c", None, len(ledger) - 1), ("d", inside, inside)):
        past = None if frontier is None else tuple(ids[:frontier])
        assert isinstance(engine.call(Fork("f", "s", child, past, media)), Imported)
        turn = engine.submit(ledger + MORE, media=media, session=child, max_tokens=TOKENS, ignore_eos=True)
        engine.steps()
        assert engine.finished(turn).token_ids == expected
        assert engine.started(turn).reused >= reused


def test_a_state_inside_an_image_travels_alone() -> None:
    """A checkpoint whose ledger ends there, in a session whose ledger goes on differently."""
    engine, destination = driver(image_min_tokens=0), driver(image_min_tokens=0)
    ids, media = shown(*PARTS)
    inside = media[1].start + 4
    engine.run(ids, media=media, session="s", stable_boundary=inside, max_tokens=2, ignore_eos=True)
    other_ids, other = shown(*PARTS[:3], image(24, 56, 9), *PARTS[4:])
    document = exported(engine, record=record(other_ids, other)).document
    manifest = open_document(document).manifest
    assert {entry.shared_tokens for entry in manifest.checkpoints} == {media[1].start}
    assert all(len(entry.own_media) == 1 for entry in manifest.checkpoints)
    answer = imported(destination, document)
    assert inside in answer.frontiers and answer.record is not None and answer.record.media == other
    for given, least in ((media, inside), (other, 0)):
        turn = destination.submit(ids, media=given, session="s", max_tokens=TOKENS, ignore_eos=True)
        destination.steps()
        alone = SeeingDriver(lanes=1, images=0).run(ids, media=given, max_tokens=TOKENS, ignore_eos=True)
        assert destination.finished(turn).token_ids == alone.token_ids
        assert least <= destination.started(turn).reused < (len(ids) if least else media[1].start + 1)


def test_a_moving_session_brings_its_images_as_segments() -> None:
    source, destination = driver(), driver()
    ledger, media = turned(source)
    moved = exported(source, record=record(ledger, media), without=frozenset())
    assert isinstance(destination.call(StageSegments("st", "m", moved.segments)), Staged)
    answer = imported(destination, moved.document, migration="m")
    assert answer.record is not None and answer.record.media == media
    assert go_on(destination, ledger, media)[0].token_ids == undisturbed()[1]
    missing = [s for s in moved.segments if len(s.data) != len(moved.segments[-1].data)]
    assert len(missing) < len(moved.segments)
    assert isinstance(destination.call(StageSegments("st", "n", tuple(missing))), Staged)
    failed = destination.call(Import("i", "s", moved.document, migration="n"))
    assert isinstance(failed, Failed) and "segment media/" in failed.message and failed.code == "bad_state"


def test_a_durable_session_keeps_its_images_also_where_its_record_goes_alone(tmp_path: Path) -> None:
    outcomes: list[object] = []
    store = DirectoryStore(tmp_path / "store", Unsynced())
    writer = BackgroundWriter(places=1, most_bytes=1 << 24)
    tier = DurableTier(store, 1 << 24, open_document)
    durable = DurableSessions(tier, writer, 1e-4, lambda *told: outcomes.append(told[2]))
    engine = driver()
    engine.engine._exchange._durable = durable
    key = SessionKey("a" * 64, "s")
    first_ids, first = shown(*PARTS[:2], words(5))
    finished = engine.run(first_ids, media=first, session="s", max_tokens=3, ignore_eos=True)
    ledger = first_ids + finished.token_ids
    engine.call(Publish("p", "s", key, Order(Epoch(1, 1), 1), record(ledger, first)))
    deadline = time.monotonic() + 10
    while not outcomes and time.monotonic() < deadline:
        time.sleep(0.01)
    # a turn with another image, whose state need not follow
    more_ids, more = shown(words(3), image(24, 56, 1), words(4))
    moved = tuple(replace(one, starts=tuple(at + len(ledger) for at in one.starts)) for one in more)
    longer, both = ledger + more_ids, (*first, *moved)
    engine.call(Publish("p", "s", key, Order(Epoch(1, 1), 2), record(longer, both), record_alone=True))
    assert writer.close(timeout=30)
    assert [type(one) for one in outcomes] == [Published, Published], outcomes
    idle = BackgroundWriter(places=1, most_bytes=1 << 24)
    found = DurableSessions(DurableTier(store, 1 << 24, open_document), idle, 1e-4, lambda *told: None)
    idle.close(timeout=30)
    destination = driver()
    destination.engine._exchange._durable = found
    latest = tier.latest(key)
    assert latest is not None
    answer = imported(destination, latest[1])
    assert answer.record is not None and (answer.record.ledger, answer.record.media) == (longer, both)
    assert answer.frontiers and max(answer.frontiers) >= len(first_ids)
    turn = destination.submit(longer, media=both, session="s", max_tokens=TOKENS, ignore_eos=True)
    destination.steps()
    alone = SeeingDriver(lanes=1, images=0).run(longer, media=both, max_tokens=TOKENS, ignore_eos=True)
    assert destination.finished(turn).token_ids == alone.token_ids and destination.started(turn).reused


def test_pages_that_travel_ahead_are_those_of_the_document_that_follows() -> None:
    engine = driver()
    ids, media = shown(*PARTS)
    turn = engine.submit(ids, media=media, session="s", max_tokens=TOKENS, ignore_eos=True)
    while not engine.of(turn):
        engine.engine.step()
    pages = engine.call(ExportPages("x", turn))
    assert isinstance(pages, Pages) and pages.end == 1
    assert isinstance(engine.call(Checkpoint("c", "s")), Checkpointed)
    segments = {segment.sha256 for segment in open_document(exported(engine).document).manifest.segments}
    assert {segment.sha256 for segment in pages.segments} <= segments
    engine.steps()


def test_a_document_whose_image_was_changed_is_refused_by_name() -> None:
    engine, destination = driver(), driver()
    ledger, media = turned(engine)
    pixels = bytearray(media[0].media.pixels)
    pixels[17] ^= 1
    lying = (replace(media[0], media=replace(media[0].media, pixels=bytes(pixels))), media[1])
    document = exported(engine, record=record(ledger, lying), checkpoints=False).document
    failed = destination.call(Import("i", "s", document))
    assert isinstance(failed, Failed) and failed.code == "bad_state"
    assert failed.message.startswith(f"segment media/{media[0].media.digest}: its pixels have another digest")
