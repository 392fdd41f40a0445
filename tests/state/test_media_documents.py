"""Media in documents: what is written where, what a reader makes of it, and which lies are refused by name."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from model.media_positions import rope_delta as rope_delta_of_the_model
from model.placeholders import MediaSpan
from state.checkpoint import Checkpoint
from state.codec import encode_detached, encode_session
from state.difference import differences
from state.document import open_document
from state.errors import FormatError, MissingSegment
from state.media import Media, Placed, PlacedMedia, begun, frames, media_digest, page_keys, rope_delta
from state.memory import StateMemory
from state.prefix_tree import PrefixTree
from tests.model.test_vision import image, video
from tests.state.blobs import Parts, packed, put_together, read_safetensors, take_apart, words
from tests.state.refusals import brought_in, refused
from tests.state.samples import FINGERPRINT, MIXED, advance, memory_of, record_of

FRONTIER = 70
IMAGE, VIDEO = 11, 12
"""Ids of placeholders."""


def media(kind: Any, frame_count: int, rows: int, columns: int, seed: int) -> Media:
    shape = (frame_count, 3, 4 * rows, 4 * columns)
    size = frame_count * 3 * 16 * rows * columns
    pixels = bytes((seed + 7 * at) % 251 for at in range(size))
    times = () if kind == "image" else tuple(0.5 * at for at in range(frame_count))
    return Media(kind, media_digest(kind, shape, pixels), shape, rows, columns, times, pixels)


PICTURE, OTHER, CLIP = media("image", 1, 2, 5, 1), media("image", 1, 2, 5, 2), media("video", 2, 3, 2, 3)
PLACED = (PlacedMedia(PICTURE, (4,)), PlacedMedia(CLIP, (20, 30)), PlacedMedia(PICTURE, (58,)))


def ledger_with(placed: Placed, length: int = FRONTIER + 1) -> list[int]:
    tokens = [at % 9 for at in range(length)]
    for frame in frames(placed):
        for at in range(frame.start, min(frame.stop, length)):
            tokens[at] = IMAGE if placed[frame.item].media.kind == "image" else VIDEO
    return tokens


def captured(memory: StateMemory, placed: Placed, frontier: int = FRONTIER, kind: str = "turn_end") -> Checkpoint:
    sequence = memory.open(frontier)
    advance(memory, sequence, frontier, seed=frontier)
    checkpoint = memory.capture(sequence, ledger_with(placed)[: frontier + 1], "decode", kind, media=placed)
    memory.close(sequence)
    return checkpoint


def parts_of(placed: Placed = PLACED, own: Placed = PLACED) -> Parts:
    memory = memory_of(MIXED)
    record = replace(record_of(ledger_with(placed)), media=placed)
    return take_apart(encode_session(memory, [captured(memory, own)], record, FINGERPRINT))


# ------------------------------------------------------------------------------------------------ what they are


def test_a_digest_is_that_of_the_item_that_a_tower_sees() -> None:
    for item in (image(32, 40), video(5, 27, 33)):
        assert media_digest(item.kind, tuple(item.pixels.shape), item.pixels.numpy().tobytes()) == item.digest


def test_the_rope_delta_is_the_models() -> None:
    spans = [MediaSpan(f.start, f.rows, f.columns, f.item, f.offset) for f in frames(PLACED)]
    assert rope_delta(PLACED) == rope_delta_of_the_model(spans, FRONTIER) == 2 * (5 - 10) + 2 * (3 - 6)


def test_tokens_that_end_inside_a_video_show_the_frames_that_have_begun() -> None:
    assert begun(PLACED, 20) == PLACED[:1] and begun(PLACED, 5) == PLACED[:1] and begun(PLACED, 4) == ()
    assert begun(PLACED, 30) == (PLACED[0], PlacedMedia(CLIP, (20,)))
    assert begun(PLACED, 31) == PLACED[:2]


@pytest.mark.parametrize("end", [5, 13, 14, 25, 63, 64, 65])
def test_a_prefix_is_found_under_equal_media_only(end: int) -> None:
    tree: PrefixTree[str] = PrefixTree()
    tokens = ledger_with(PLACED)
    tree.insert("t", tokens[:end], "here", page_keys(begun(PLACED, end)))

    def found(placed: Placed) -> list[str]:
        return list(tree.prefixes("t", tokens, FRONTIER, page_keys(placed)))

    assert found(PLACED) == ["here"] and found(()) == []
    assert found((PlacedMedia(OTHER, (4,)), *PLACED[1:])) == []
    shorter = (replace(PLACED[0], media=replace(PICTURE, rows=5, columns=2)), *PLACED[1:])
    assert found(shorter) == [], "the same pixels in another grid"
    later = (*PLACED[:2], PlacedMedia(OTHER, (58,)))
    assert found(later) == (["here"] if end <= 58 else [])
    late_frame = (PLACED[0], PlacedMedia(CLIP, (20,)), PLACED[2])
    assert found(late_frame) == (["here"] if end <= 30 else [])


# ------------------------------------------------------------------------------------------------ as the page says


def test_a_stranger_finds_media_where_the_page_says() -> None:
    parts = parts_of()
    entries = parts.manifest["media"]
    assert parts.manifest["positions"] == {"rope_delta": -16}
    assert [entry["kind"] for entry in entries] == ["image", "video", "image"]
    assert [words(entry["starts"]) for entry in entries] == [[4], [20, 30], [58]]
    assert [entry["grid"] for entry in entries] == [[2, 5], [3, 2], [2, 5]]
    assert entries[1]["times"] == [0.0, 0.5] and entries[1]["shape"] == [2, 3, 12, 8]
    pages = len(parts.names())
    assert [entry["segment"] for entry in entries] == [pages, pages + 1, pages], (
        "a picture that is shown twice lies once"
    )
    assert len(parts.segments) == pages + 2
    for entry in entries:
        tensors = read_safetensors(parts.segments[entry["segment"]])
        dtype, shape, data = tensors.pop("pixels")
        assert (dtype, shape, tensors) == ("U8", entry["shape"], {})
        text = f"{entry['kind']} ({', '.join(map(str, shape))})".encode()
        assert hashlib.sha256(text + data).digest() == entry["digest"]
    assert "own_media" not in parts.manifest["checkpoints"][0]


def test_a_session_with_media_comes_back_as_it_was() -> None:
    memory = memory_of(MIXED)
    record = replace(record_of(ledger_with(PLACED)), media=PLACED)
    start = captured(memory, PLACED, 25, "turn_start")
    blob = encode_session(memory, [start, captured(memory, PLACED)], record, FINGERPRINT)
    fresh = memory_of(MIXED)
    document, moved = brought_in(fresh, blob)
    assert document.record() == record
    assert [one.media for one in moved] == [begun(PLACED, 26), PLACED]
    assert encode_session(fresh, moved, record, FINGERPRINT) == blob
    assert fresh.fork(moved[0]).media == moved[0].media


def test_a_checkpoint_with_another_picture_shares_tokens_up_to_it() -> None:
    for own, shared in (
        ((PlacedMedia(OTHER, (4,)), *PLACED[1:]), 4),
        ((*PLACED[:2], PlacedMedia(OTHER, (58,))), 58),
        (PLACED[:2], 58),
        ((), 4),
    ):
        memory = memory_of(MIXED)
        record = replace(record_of(ledger_with(PLACED)), media=PLACED)
        sequence = memory.open(FRONTIER)
        advance(memory, sequence, FRONTIER, seed=1)
        checkpoint = memory.capture(sequence, ledger_with(PLACED), "decode", "turn_end", media=own)
        blob = encode_session(memory, [checkpoint], record, FINGERPRINT)
        entry = take_apart(blob).manifest["checkpoints"][0]
        assert entry["shared_tokens"] == shared and words(entry["own_tokens"]) == ledger_with(PLACED)[shared:]
        document, (moved,) = brought_in(memory_of(MIXED), blob)
        assert moved.media == own and document.record().media == PLACED
        other = open_document(encode_session(memory, [checkpoint], replace(record, media=own), FINGERPRINT))
        places = [difference.place for difference in differences(document, other)]
        assert places and all(place.startswith("media") for place in places)


def test_a_detached_document_without_a_picture_is_no_session() -> None:
    memory = memory_of(MIXED)
    record = replace(record_of(ledger_with(PLACED)), media=PLACED)
    detached = encode_detached(memory, [captured(memory, PLACED)], record, FINGERPRINT)
    by_digest = {segment.sha256: segment.read() for segment in detached.segments}
    assert open_document(detached.document, fetch=by_digest.get).record() == record
    assert [segment.size for segment in detached.of_media()] == [len(by_digest[s.sha256]) for s in detached.of_media()]
    del by_digest[detached.of_media()[1].sha256]
    document = open_document(detached.document, fetch=by_digest.get)
    with pytest.raises(MissingSegment, match=f"segment media/{CLIP.digest}"):
        document.record()
    with pytest.raises(MissingSegment):
        document.load(memory_of(MIXED), document.manifest.checkpoints[0])


def test_media_without_pixels_cannot_be_written() -> None:
    bare = (replace(PLACED[0], media=replace(PICTURE, pixels=b"")),)
    with pytest.raises(FormatError, match=f"media {PICTURE.digest}: is without its pixels"):
        encode_session(memory_of(MIXED), [], replace(record_of(ledger_with(bare)), media=bare), FINGERPRINT)


# ------------------------------------------------------------------------------------------------ lies


def lying(number: int, **changes: object) -> Parts:
    parts = parts_of()
    entries = [dict(entry) for entry in parts.manifest["media"]]
    entries[number] |= changes
    return parts.with_manifest(media=entries)


@pytest.mark.parametrize(
    ("number", "changes", "place"),
    [
        (0, {"kind": "sound"}, "manifest.media[0].kind"),
        (0, {"kind": None}, "manifest.media[0].kind"),
        (0, {"digest": b"short"}, "manifest.media[0].digest"),
        (0, {"shape": [1, 3, 8]}, "manifest.media[0].shape"),
        (0, {"shape": [1, 4, 8, 20]}, "manifest.media[0].shape"),
        (0, {"shape": [1, 3, 0, 20]}, "manifest.media[0].shape"),
        (0, {"shape": [2**40, 3, 2**40, 20]}, "manifest.media[0].shape"),
        (0, {"grid": [0, 5]}, "manifest.media[0].grid"),
        (0, {"grid": [5, 2]}, "manifest.media[0].grid"),
        (0, {"grid": [2, 5.0]}, "manifest.media[0].grid"),
        (0, {"times": [1.0]}, "manifest.media[0].times"),
        (1, {"times": []}, "manifest.media[1].times"),
        (1, {"times": [0.0, -1.0]}, "manifest.media[1].times"),
        (1, {"times": [0.0, 1.0, 2.0]}, "manifest.media[1].times"),
        (0, {"starts": b""}, "manifest.media[0].starts"),
        (0, {"starts": packed([4, 5])}, "manifest.media[0].starts"),
        (1, {"starts": packed([30, 20])}, "manifest.media[1].starts"),
        (0, {"starts": packed([5])}, "manifest.media[0].starts"),
        (1, {"starts": packed([8, 30])}, "manifest.media[1].starts"),
        (2, {"starts": packed([71])}, "manifest.media[2].starts"),
        (2, {"segment": 0}, "manifest.segments[0].size"),
        (0, {"segment": -1}, "manifest.media[0].segment"),
        (0, {"more": 1}, "manifest.media[0].more"),
    ],
)
def test_media_that_lie_are_refused_by_name(number: int, changes: dict[str, object], place: str) -> None:
    assert refused(put_together(lying(number, **changes))).place == place


def test_segments_of_media_that_are_out_of_order_or_unused_are_refused() -> None:
    pages = len(parts_of().names())
    assert refused(put_together(lying(0, segment=pages + 1))).place == f"manifest.media {PICTURE.digest}"
    parts = parts_of(PLACED[:1], PLACED[:1])
    fewer = parts.with_manifest(media=[], positions={"rope_delta": 0})
    assert refused(put_together(fewer)).place == f"manifest.segments[{pages}]"


@pytest.mark.parametrize("delta", [0, -15, 16, 0.5])
def test_another_rope_delta_than_that_of_the_media_is_refused(delta: object) -> None:
    parts = parts_of().with_manifest(positions={"rope_delta": delta})
    assert refused(put_together(parts)).place == "manifest.positions.rope_delta"


def test_own_media_that_begin_among_shared_tokens_are_refused() -> None:
    own = parts_of().manifest["media"][:1]
    assert refused(put_together(parts_of().with_checkpoint(own_media=own))).place == (
        "manifest.checkpoints[0].own_media"
    )


def test_pixels_of_another_picture_are_refused() -> None:
    parts, other = parts_of(PLACED[:1], PLACED[:1]), parts_of((PlacedMedia(OTHER, (4,)),), (PlacedMedia(OTHER, (4,)),))
    table = [*parts.manifest["segments"][:-1], other.manifest["segments"][-1]]
    swapped = replace(parts.with_manifest(segments=table), segments=[*parts.segments[:-1], other.segments[-1]])
    error = refused(put_together(swapped))
    assert str(error).startswith(f"segment media/{PICTURE.digest}: its pixels have another digest, {OTHER.digest}")
