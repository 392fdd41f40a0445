"""The format is what its page says: read by a reader that knows only the page, and pinned by a golden file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from state.checkpoint import Checkpoint
from state.codec import encode_session
from state.container import HEADER, MAGIC, VERSION
from state.document import open_document
from state.errors import FormatError
from state.memory import StateMemory
from state.session_manifest import LEDGER_LIMIT
from tests.state.blobs import put_together, read_safetensors, take_apart, words
from tests.state.golden_session import (
    GOLDEN,
    GOLDEN_1_0,
    GOLDEN_FINGERPRINT,
    GOLDEN_RECORD,
    golden_document,
    golden_state,
)
from tests.state.refusals import brought_in
from tests.state.samples import FINGERPRINT, MIXED, WINDOW, checkpoint_at, memory_of, record_of


def encoded(memory: StateMemory, checkpoint: Checkpoint) -> bytes:
    return encode_session(memory, [checkpoint], record_of(checkpoint.ledger), FINGERPRINT)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_stranger_finds_every_plane_where_the_page_says() -> None:
    memory = memory_of(MIXED)
    frontier = WINDOW + 20
    checkpoint = checkpoint_at(memory, frontier)
    parts = take_apart(encoded(memory, checkpoint))
    images, slot = memory.images, checkpoint.slot

    manifest = parts.manifest
    assert words(manifest["ledger"]) == list(checkpoint.ledger)
    assert manifest["positions"] == {"rope_delta": 0} and manifest["page_tokens"] == 64
    assert manifest["checkpoints"][0]["coverage"]["ring"] == [20, frontier]
    assert list(parts.names()) == ["image", "target/0", "target/1", "draft/0", "draft/1"]

    image = read_safetensors(parts.segment("image"))
    assert image["gdn"] == ("F32", [2, 2, 3, 5], raw(images.gdn[slot]))
    assert image["conv"] == ("BF16", [2, 6, 3], raw(images.conv[slot]))
    assert image["hidden"] == ("BF16", [7], raw(images.hidden[slot]))
    logical = [position % WINDOW for position in range(20, frontier)]
    assert image["ring_keys"] == ("BF16", [2, WINDOW, 2, 4], raw(images.rings.keys[slot][:, logical]))
    assert image["ring_values"] == ("F16", [2, WINDOW, 2, 4], raw(images.rings.values[slot][:, logical]))

    assert memory.draft is not None
    for kind, pool, pages in (
        ("target", memory.target, checkpoint.pages),
        ("draft", memory.draft, checkpoint.draft_pages),
    ):
        full, last = (read_safetensors(parts.segment(f"{kind}/{index}")) for index in (0, 1))
        for part, plane in (("keys", pool.keys), ("values", pool.values)):
            assert full[part][2] == raw(plane[pages[0]])
            tail = plane[pages[1]].clone()
            tail[:, frontier - 64 :] = 0
            assert last[part][2] == raw(tail)
    for kind, tensors in manifest["layouts"].items():
        for name in parts.names():
            if name.split("/")[0] == kind:
                found = read_safetensors(parts.segment(name))
                stated = {tensor: [entry[0], entry[1]] for tensor, entry in found.items()}
                assert stated == tensors


def test_what_a_stranger_writes_is_read() -> None:
    memory = memory_of(MIXED)
    blob = encoded(memory, checkpoint_at(memory, 70))
    parts = take_apart(blob)
    reordered = replace(parts, manifest=dict(reversed(parts.manifest.items())))
    assert put_together(parts) == blob and put_together(reordered) != blob
    _, (moved,) = brought_in(memory, put_together(reordered))
    assert encoded(memory, moved) == blob


def test_equal_pages_have_equal_digests_in_different_documents() -> None:
    memory = memory_of(MIXED)
    first = checkpoint_at(memory, 100)
    sequence = memory.restore(first, 140)
    sequence.settle(140)
    sequence.context_frontier = 140
    second = memory.capture(sequence, range(141), "decode", "turn_end")
    one, other = (take_apart(encoded(memory, checkpoint)) for checkpoint in (first, second))
    for name in ("target/0", "draft/0"):
        digests = [parts.manifest["segments"][parts.names()[name]]["sha256"] for parts in (one, other)]
        assert digests[0] == digests[1]


def test_the_golden_session_is_written_and_read_for_ever() -> None:
    golden = GOLDEN.read_bytes()
    assert golden_document() == golden
    memory, _ = golden_state()
    fresh = StateMemory(memory.geometry, 4, 4, 2)
    document, moved = brought_in(fresh, golden, dict(reversed(GOLDEN_FINGERPRINT.items())), public_rows=170)
    assert document.manifest.session.record() == GOLDEN_RECORD
    assert [c.frontier for c in moved] == [64, 66] and moved[1].ledger == tuple(range(100, 167))
    assert fresh.target.pages - fresh.target.free == 2
    assert encode_session(fresh, moved, GOLDEN_RECORD, GOLDEN_FINGERPRINT) == golden


def test_a_document_of_version_1_0_is_read_for_ever() -> None:
    fresh = StateMemory(golden_state()[0].geometry, 4, 4, 2)
    document, moved = brought_in(fresh, GOLDEN_1_0.read_bytes(), GOLDEN_FINGERPRINT, public_rows=170)
    turns = tuple(replace(turn, ended_at=0.0) for turn in GOLDEN_RECORD.turns)
    assert document.manifest.session.record() == replace(GOLDEN_RECORD, turns=turns, fork_points=())
    assert [checkpoint.frontier for checkpoint in moved] == [64, 66]


def test_every_byte_of_the_golden_session_is_covered_by_a_digest() -> None:
    golden = GOLDEN.read_bytes()
    for at in range(len(golden)):
        damaged = bytearray(golden)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(FormatError):
            open_document(damaged).check_payload()


def test_the_page_states_the_magic_the_version_the_sizes_and_every_field_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "state" / "FORMAT.md").read_text()
    assert MAGIC.hex(" ").upper() in page and f"version {VERSION[0]}.{VERSION[1]}" in page
    assert f"Header, {HEADER.size} bytes" in page and f"{LEDGER_LIMIT:,}" in page
    manifest = take_apart(GOLDEN.read_bytes()).manifest
    listed = ("turns", "fork_points", "checkpoints", "segments")
    known = [manifest, manifest["session"], *(manifest[name][0] for name in listed)]
    for fields in known:
        for name in fields:
            assert f"`{name}`" in page, name
