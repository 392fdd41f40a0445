"""The format is what its page says: read by a reader that knows only the page, and pinned by a golden file."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from state.checkpoint import Checkpoint
from state.codec import HEADER, MAGIC, VERSION, decode_checkpoint, encode_checkpoint
from state.geometry import StateGeometry
from state.memory import StateMemory
from tests.state.blobs import put_together, read_safetensors, take_apart
from tests.state.samples import FINGERPRINT, MIXED, PUBLIC_ROWS, WINDOW, checkpoint_at, memory_of

GOLDEN = Path(__file__).parent / "golden" / "checkpoint-1.0.bin"
GOLDEN_RECORD = {"session": "golden", "turns": [{"published": 4, "finish": "stop"}]}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_stranger_finds_every_plane_where_the_page_says() -> None:
    memory = memory_of(MIXED)
    frontier = WINDOW + 20
    checkpoint = checkpoint_at(memory, frontier)
    parts = take_apart(encode_checkpoint(memory, checkpoint, FINGERPRINT, {"a": 1}))
    images, slot = memory.images, checkpoint.slot

    manifest = parts.manifest
    assert list(struct.unpack(f"<{frontier + 1}I", manifest["ledger"])) == list(checkpoint.ledger)
    assert manifest["positions"] == {"rope_delta": 0} and manifest["page_tokens"] == 64
    assert manifest["coverage"]["ring"] == [20, frontier]
    assert list(parts.segments) == ["image", "target/0", "target/1", "draft/0", "draft/1"]

    image = read_safetensors(parts.segments["image"])
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
        full, last = (read_safetensors(parts.segments[f"{kind}/{index}"]) for index in (0, 1))
        for part, plane in (("keys", pool.keys), ("values", pool.values)):
            assert full[part][2] == raw(plane[pages[0]])
            tail = plane[pages[1]].clone()
            tail[:, frontier - 64 :] = 0
            assert last[part][2] == raw(tail)
    for kind, tensors in manifest["layouts"].items():
        for name, segment in parts.segments.items():
            if name.split("/")[0] == kind:
                stated = {tensor: [entry[0], entry[1]] for tensor, entry in read_safetensors(segment).items()}
                assert stated == tensors


def test_what_a_stranger_writes_is_read() -> None:
    memory = memory_of(MIXED)
    blob = encode_checkpoint(memory, checkpoint_at(memory, 70), FINGERPRINT, {"a": 1})
    parts = take_apart(blob)
    reordered = replace(parts, manifest=dict(reversed(parts.manifest.items())))
    assert put_together(parts) == blob and put_together(reordered) != blob
    moved, record = decode_checkpoint(memory, put_together(reordered), FINGERPRINT, PUBLIC_ROWS)
    assert record == {"a": 1} and encode_checkpoint(memory, moved, FINGERPRINT, {"a": 1}) == blob


def test_equal_pages_have_equal_digests_in_different_checkpoints() -> None:
    memory = memory_of(MIXED)
    first = checkpoint_at(memory, 100)
    sequence = memory.restore(first, 140)
    sequence.settle(140)
    sequence.context_frontier = 140
    second = memory.capture(sequence, range(141), "decode", "turn_end")
    digests = [
        {entry["name"]: entry["sha256"] for entry in take_apart(blob).manifest["segments"]}
        for blob in (encode_checkpoint(memory, checkpoint, FINGERPRINT, {}) for checkpoint in (first, second))
    ]
    assert digests[0]["target/0"] == digests[1]["target/0"] and digests[0]["draft/0"] == digests[1]["draft/0"]


def golden_state() -> tuple[StateMemory, Checkpoint]:
    """A state made of plain counting, so that it is the same on every machine for ever."""
    geometry = StateGeometry(
        kv_layers=1,
        kv_heads=1,
        kv_head_dim=2,
        kv_dtype=torch.bfloat16,
        gdn_layers=1,
        gdn_heads=1,
        gdn_key_dim=2,
        gdn_value_dim=3,
        conv_channels=4,
        conv_history=3,
        conv_dtype=torch.bfloat16,
        hidden_size=5,
        hidden_dtype=torch.float32,
        ring_layers=1,
        full_layers=1,
        draft_kv_heads=1,
        draft_head_dim=2,
        window=6,
        ring_key_dtype=torch.bfloat16,
        ring_value_dtype=torch.float16,
    )
    memory = StateMemory(geometry, 2, 2, 3, clock=lambda: 1_700_000_000.0)
    sequence = memory.open(66)
    assert memory.draft is not None
    planes = [memory.images.gdn, memory.images.conv, memory.images.hidden, memory.images.rings.keys]
    planes += [memory.images.rings.values, memory.target.keys, memory.target.values]
    planes += [memory.draft.keys, memory.draft.values]
    for number, plane in enumerate(planes):
        counting = torch.arange(plane.numel()) % 61 - 30 + number
        plane.copy_((counting / 4).to(plane.dtype).view_as(plane))
    sequence.settle(66)
    sequence.context_frontier = 66
    with mock.patch("state.memory.new_checkpoint_id", return_value="f" * 32):
        return memory, memory.capture(sequence, range(100, 167), "decode", "turn_end", parent="0123456789abcdef" * 2)


def test_the_golden_checkpoint_is_written_and_read_for_ever() -> None:
    golden = GOLDEN.read_bytes()
    memory, checkpoint = golden_state()
    assert encode_checkpoint(memory, checkpoint, {"made_by": "golden", "window": 6}, GOLDEN_RECORD) == golden
    moved, record = decode_checkpoint(
        StateMemory(memory.geometry, 2, 2, 1), golden, {"window": 6, "made_by": "golden"}, public_rows=167
    )
    assert record == GOLDEN_RECORD and moved.ledger == tuple(range(100, 167)) and moved.id == "f" * 32


def test_the_page_states_the_magic_the_version_and_the_header_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "state" / "FORMAT.md").read_text()
    assert MAGIC.hex(" ").upper() in page and f"version {VERSION[0]}.{VERSION[1]}" in page
    assert f"Header, {HEADER.size} bytes" in page
    assert hashlib.sha256().digest_size == 32 and "Trailer, 32 bytes" in page
