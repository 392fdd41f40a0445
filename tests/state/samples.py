"""Small geometries, states full of random numbers, and an independent view of what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from state.checkpoint import Checkpoint
from state.coverage import Form
from state.errors import CapacityError
from state.geometry import PAGE_TOKENS, StateGeometry, pages_for
from state.memory import SequenceMemory, StateMemory
from state.session_record import ForkPoint, SessionRecord, TurnRecord

WINDOW = 80
"""S of the samples: no multiple of a page, so that rings and pages wrap at different places."""

FP32 = StateGeometry(
    kv_layers=2,
    kv_heads=1,
    kv_head_dim=4,
    kv_dtype=torch.float32,
    gdn_layers=2,
    gdn_heads=2,
    gdn_key_dim=3,
    gdn_value_dim=5,
    conv_channels=6,
    conv_history=3,
    conv_dtype=torch.float32,
    hidden_size=7,
    hidden_dtype=torch.float32,
    ring_layers=2,
    full_layers=1,
    draft_kv_heads=2,
    draft_head_dim=4,
    window=WINDOW,
)
MIXED = replace(
    FP32,
    kv_dtype=torch.bfloat16,
    conv_dtype=torch.bfloat16,
    hidden_dtype=torch.bfloat16,
    ring_key_dtype=torch.bfloat16,
    ring_value_dtype=torch.float16,
)
LOCAL_ONLY = replace(MIXED, full_layers=0)
FULL_ONLY = replace(FP32, ring_layers=0, window=0)
NO_DRAFTER = replace(FP32, ring_layers=0, full_layers=0, draft_kv_heads=0, draft_head_dim=0, window=0)

GEOMETRIES = {
    "fp32": FP32,
    "bf16 keys, fp16 values": MIXED,
    "local draft layers only": LOCAL_ONLY,
    "full draft layers only": FULL_ONLY,
    "no drafter": NO_DRAFTER,
}

PUBLIC_ROWS = 5000
FINGERPRINT: dict[str, str | int] = {"weights": "w1", "tokenizer": "t1", "window": WINDOW, "numeric_path": "cpu"}

TURN = TurnRecord(
    id="turn-1",
    mode="history",
    replica="r1",
    request={"temperature": 0.5, "stop": ["a"], "logit_bias": [[1, -0.5]]},
    request_sha256=bytes(range(32)),
    seed=2**64 - 1,
    idempotency_key=None,
    start=3,
    published=2,
    finish_reason="stop",
    frontier=5,
    hit="none",
    reused=0,
    prefilled=3,
    acceptance_length=1.5,
    ended_at=1_700_000_001.5,
)
LEFT = ForkPoint("turn-1", 3, 1, 2, 1, "kept", 2, (7, 8, 9), ({"role": "user", "content": "é"},))

Planes = dict[str, torch.Tensor]


def memory_of(geometry: StateGeometry, pages: int = 12, images: int = 6) -> StateMemory:
    return StateMemory(geometry, target_pages=pages, draft_pages=pages, images=images, clock=lambda: 1_700_000_000.5)


def grow(memory: StateMemory, sequence: SequenceMemory, tokens: int) -> None:
    """Gives a sequence pages for positions [0, tokens), all or nothing (`CapacityError`)."""
    held = [(memory.target, sequence.pages)] + ([(memory.draft, sequence.draft_pages)] if memory.draft else [])
    missing = [(pool, pages, max(0, pages_for(tokens) - len(pages))) for pool, pages in held]
    for pool, _, more in missing:
        if more > pool.free:
            raise CapacityError(pool.name, more, pool.free)
    for pool, pages, more in missing:
        pages += pool.allocate(more)


def advance(memory: StateMemory, sequence: SequenceMemory, tokens: int, seed: int) -> None:
    """Does what prefill and rounds do to memory: new columns, new ring entries, a new image, frontier + tokens.

    Columns beyond the new frontier get garbage, as a verify block leaves it.
    """
    random = torch.Generator().manual_seed(seed)
    start, end = sequence.frontier, sequence.frontier + tokens
    grow(memory, sequence, end)
    pools = [(memory.target, sequence.pages)] + ([(memory.draft, sequence.draft_pages)] if memory.draft else [])
    for pool, pages in pools:
        for index in range(start // PAGE_TOKENS, len(pages)):
            first = index * PAGE_TOKENS
            begin, stop = max(0, start - first), max(0, min(PAGE_TOKENS, end - first))
            for plane in (pool.keys, pool.values):
                columns = plane[pages[index]]
                columns[:, begin:stop] = torch.randn(columns[:, begin:stop].shape, generator=random).to(plane.dtype)
                columns[:, stop:] = 9.0
    rings = memory.images.rings
    if rings.layers:
        written = torch.arange(max(start, end - rings.window), end)
        for plane in (rings.keys, rings.values):
            fresh = torch.randn((rings.layers, len(written), *plane.shape[3:]), generator=random).to(plane.dtype)
            plane[sequence.slot][:, written % rings.window] = fresh
    for plane in (memory.images.gdn, memory.images.conv, memory.images.hidden):
        plane[sequence.slot] = torch.randn(plane[sequence.slot].shape, generator=random)
    sequence.settle(end)
    sequence.context_frontier = end


def planes_of(memory: StateMemory, holder: SequenceMemory | Checkpoint) -> Planes:
    """Everything that is readable at the holder's frontier, in the order of positions, copied."""
    images, frontier = memory.images, holder.frontier
    planes = {"gdn": images.gdn[holder.slot], "conv": images.conv[holder.slot], "hidden": images.hidden[holder.slot]}
    window = memory.geometry.window
    if memory.geometry.ring_layers:
        live = [position % window for position in range(max(0, frontier - window), frontier)]
        planes["ring_keys"] = images.rings.keys[holder.slot][:, live]
        planes["ring_values"] = images.rings.values[holder.slot][:, live]
    pools = [("target", memory.target, holder.pages), ("draft", memory.draft, holder.draft_pages)]
    for name, pool, pages in pools:
        if pool is not None:
            needed = list(pages[: -(-frontier // PAGE_TOKENS)])
            for part, plane in (("keys", pool.keys), ("values", pool.values)):
                planes[f"{name}_{part}"] = plane[needed].movedim(1, 0).flatten(1, 2)[:, :frontier]
    return {name: plane.clone() for name, plane in planes.items()}


def assert_same_planes(found: Planes, wanted: Planes) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype
        assert torch.equal(found[name], wanted[name]), f"{name} differs"


def ledger_of(frontier: int, form: Form = "decode") -> list[int]:
    return [(17 * position + 3) % PUBLIC_ROWS for position in range(frontier + (form == "decode"))]


def checkpoint_at(
    memory: StateMemory, frontier: int, form: Form = "decode", kind: Literal["turn_start", "turn_end"] = "turn_end"
) -> Checkpoint:
    """A checkpoint at `frontier` of a sequence that came there in three steps and then ended."""
    sequence = memory.open(1)
    for step in (frontier // 2, frontier // 3, frontier - frontier // 2 - frontier // 3):
        if step:
            advance(memory, sequence, step, seed=frontier + step)
    checkpoint = memory.capture(sequence, ledger_of(frontier, form), form, kind)
    memory.close(sequence)
    return checkpoint


def everything_free(memory: StateMemory) -> bool:
    pools = [memory.target, memory.draft] if memory.draft else [memory.target]
    return memory.images.free == memory.images.slots and all(pool.free == pool.pages for pool in pools)


def record_of(ledger: Sequence[int]) -> SessionRecord:
    """A session with that ledger, one turn, two points where forks can begin, and text that is not ASCII."""
    return SessionRecord(
        id="s-1",
        ledger=tuple(ledger),
        epoch=(1_795_989_508, 4),
        order=7,
        opener=1,
        frontier=max(0, len(ledger) - 1),
        transcript=({"role": "user", "content": "Grüße, 世界 🌍"}, {"role": "assistant", "content": None, "x": b"\0"}),
        turns=(TURN,),
        fork_points=(*([ForkPoint("turn-1", len(ledger), 2, 0, 1)] if len(ledger) else []), LEFT),
    )
