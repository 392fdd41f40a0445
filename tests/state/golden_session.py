"""A session made of plain counting, the same on every machine for ever: what `golden/session-v1.dfs` holds.

`python -m tests.state.golden_session` writes the file again, after a change of the format that is meant.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch

from state.checkpoint import Checkpoint
from state.codec import encode_session
from state.coverage import Form
from state.geometry import StateGeometry
from state.memory import StateMemory
from state.session_record import ForkPoint, SessionRecord, TurnRecord

GOLDEN = Path(__file__).parent / "golden" / "session-v1.dfs"
GOLDEN_1_0 = GOLDEN.with_name("session-v1.0.dfs")
"""As version 1.0 wrote it, without what was added since."""
GOLDEN_FINGERPRINT: dict[str, str | int] = {"made_by": "golden", "window": 6}
GOLDEN_RECORD = SessionRecord(
    id="golden",
    ledger=tuple(range(100, 170)),
    epoch=(1_700_000_000, 3),
    order=5,
    opener=64,
    frontier=69,
    transcript=(
        {"role": "user", "content": "Grüße, 世界"},
        {"role": "assistant", "content": "ok", "reasoning_content": "…"},
    ),
    turns=(
        TurnRecord(
            id="turn-0",
            mode="append",
            replica="replica-0",
            request={"temperature": 0.5, "stop": ["END"], "max_tokens": 5},
            request_sha256=bytes(range(32)),
            seed=2**64 - 1,
            idempotency_key="key",
            start=65,
            published=4,
            finish_reason="stop",
            frontier=69,
            hit="device",
            reused=64,
            prefilled=1,
            acceptance_length=1.25,
            ended_at=1_700_000_002.5,
        ),
    ),
    fork_points=(
        ForkPoint("turn-9", 3, 1, 2, 1, "before", 2, (90, 91, 92), ({"role": "user", "content": "Ö"},)),
        ForkPoint("turn-0", 70, 2, 69, 64),
        ForkPoint("turn-0", 70, 2, 69, 64, "here", 66),
    ),
)
_CAPTURES: tuple[tuple[int, Form, str], ...] = ((64, "prompt", "turn_start"), (66, "decode", "explicit"))


def golden_state() -> tuple[StateMemory, list[Checkpoint]]:
    """A turn's start at 64 and an explicit checkpoint at 66; the ledger goes on to 70 without an image."""
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
    memory = StateMemory(geometry, 3, 3, 4, clock=lambda: 1_700_000_000.0)
    sequence = memory.open(66)
    assert memory.draft is not None
    planes = [memory.images.gdn, memory.images.conv, memory.images.hidden, memory.images.rings.keys]
    planes += [memory.images.rings.values, memory.target.keys, memory.target.values]
    planes += [memory.draft.keys, memory.draft.values]
    for number, plane in enumerate(planes):
        counting = torch.arange(plane.numel()) % 61 - 30 + number
        plane.copy_((counting / 4).to(plane.dtype).view_as(plane))
    checkpoints: list[Checkpoint] = []
    for digit, (frontier, form, kind) in zip("ab", _CAPTURES, strict=True):
        sequence.settle(frontier)
        sequence.context_frontier = frontier
        ledger = range(100, 100 + frontier + (form == "decode"))
        with mock.patch("state.memory.new_checkpoint_id", return_value=digit * 32):
            checkpoints.append(memory.capture(sequence, ledger, form, kind, parent="0123456789abcdef" * 2))
    return memory, checkpoints


def golden_document() -> bytes:
    memory, checkpoints = golden_state()
    return encode_session(memory, checkpoints, GOLDEN_RECORD, GOLDEN_FINGERPRINT)


if __name__ == "__main__":
    GOLDEN.write_bytes(golden_document())
