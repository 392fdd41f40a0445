"""Context K/V against FP64 projections with their rounding points, and rings that wrap, fill and overflow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.context_kv import context_features, context_keys_values
from kernels.ring import write_ring
from kernels.rotary import rotary_frequencies, rotary_tables
from tests.kernels import oracles
from tests.kernels.oracles import POISON

HIDDEN, TAPS, KV_HEADS, DIM, EPS = 32, 3, 2, 16, 1e-6
UNTOUCHED = -12345.0


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------ projections


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-6)])
def test_features_are_projected_then_normalised(dtype: torch.dtype, tolerance: float) -> None:
    features, weight = normal(2, 7, TAPS * HIDDEN, seed=1).to(dtype), normal(HIDDEN, TAPS * HIDDEN, seed=2).to(dtype)
    norm = normal(HIDDEN, seed=3).to(dtype)
    c = context_features(features, weight, norm, EPS)
    assert c.dtype == dtype
    oracles.close(c, norm.double() * oracles.rms(features.double() @ weight.double().T, EPS), tolerance)


def projected(dtype: torch.dtype) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """((K, V), FP64 (K, V without any rounding)) of two rows at positions of their own."""
    c = normal(2, 5, HIDDEN, seed=4).to(dtype)
    key_weight, value_weight = (normal(KV_HEADS * DIM, HIDDEN, seed=s).to(dtype) for s in (5, 6))
    key_norm = normal(DIM, seed=7).to(dtype)
    positions = torch.tensor([[0, 1, 2, 3, 4], [2047, 2048, 2049, 2050, 2051]])
    frequencies = rotary_frequencies(DIM, 1e7)
    got = context_keys_values(c, key_weight, value_weight, key_norm, EPS, *rotary_tables(positions, frequencies))
    raw = (c.double() @ key_weight.double().T).unflatten(-1, (KV_HEADS, DIM))
    keys = oracles.rotate(key_norm.double() * oracles.rms(raw, EPS), positions, frequencies)
    return got, (keys, (c.double() @ value_weight.double().T).unflatten(-1, (KV_HEADS, DIM)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_normalised_and_turned_without_a_cast_on_the_way(dtype: torch.dtype) -> None:
    """Also in BF16 the tolerance is FP32's: a raw key that was rounded before its norm would be off by 2^-9."""
    (keys, _), (expected, _) = projected(dtype)
    assert keys.dtype == torch.float32
    oracles.close(keys, expected, 1e-5)


def test_values_are_plain_projections_rounded_to_the_models_dtype() -> None:
    (_, values), (_, expected) = projected(torch.float32)
    oracles.close(values, expected, 1e-5)
    (_, values), (_, expected) = projected(torch.bfloat16)
    oracles.rounds_like(values, expected)


# ------------------------------------------------------------------------------------------------ rings


def write(
    window: int,
    rows: torch.Tensor,
    slots: list[int],
    start: list[int],
    counts: list[int],
    ring: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes `rows` [B, T, D], poisoned at and beyond its count, into rings of one head -> [slots, S, D]."""
    if ring is None:
        ring = torch.full((max(slots) + 2, window, 1, rows.shape[-1]), UNTOUCHED)
    rows = rows.clone()
    for row, count in enumerate(counts):
        rows[row, count:] = POISON
    write_ring(ring, rows[:, :, None], torch.tensor(slots), torch.tensor(start), torch.tensor(counts))
    return ring[:, :, 0]


@pytest.mark.parametrize(
    ("start", "count"),
    [(0, 1), (0, 7), (0, 8), (5, 3), (5, 4), (7, 1), (8, 8), (13, 6), (0, 9), (3, 30), (8, 16), (1000, 0)],
)
def test_the_live_window_lies_at_positions_modulo_the_ring(start: int, count: int) -> None:
    """Wraps in one append, exact fits, and chunks longer than the ring of 8."""
    window = 8
    rows = normal(1, 30, 4, seed=8)
    ring = write(window, rows, [1], [start], [count])
    expected = torch.full_like(ring, UNTOUCHED)
    for i in range(count):  # position by position, as if each came alone
        expected[1, (start + i) % window] = rows[0, i]
    assert torch.equal(ring, expected)


def test_ragged_rows_write_to_their_own_slots() -> None:
    window = 6
    rows = normal(4, 20, 4, seed=9)
    slots, start, counts = [3, 0, 5, 1], [4, 0, 100, 17], [20, 0, 5, 6]
    ring = write(window, rows, slots, start, counts)
    expected = torch.full_like(ring, UNTOUCHED)
    for row in range(4):
        for i in range(counts[row]):
            expected[slots[row], (start[row] + i) % window] = rows[row, i]
    assert torch.equal(ring, expected)


def test_appending_in_pieces_leaves_the_ring_that_one_append_leaves() -> None:
    rows = normal(1, 50, 4, seed=10)
    whole = write(16, rows, [0], [0], [50])
    ring = torch.full((2, 16, 1, 4), UNTOUCHED)
    start = 0
    for count in (1, 15, 16, 0, 17, 1):
        write(16, rows[:, start : start + count], [0], [start], [count], ring)
        start += count
    assert start == 50
    assert torch.equal(ring[:, :, 0], whole)


def test_values_in_float16_are_the_bfloat16_value_rounded_to_nearest_even() -> None:
    """BF16 has fewer mantissa bits, so that only small numbers round: float16 has steps of 2^-24 below 2^-14."""
    generator = torch.Generator().manual_seed(11)
    scale = 2.0 ** torch.randint(-27, 15, (4096,), generator=generator).float()
    value = (torch.randn(4096, generator=generator) * scale).bfloat16()
    value[:4] = torch.tensor([1.5 * 2**-24, 2.5 * 2**-24, 0.5 * 2**-24, 1.5 * 2**-25])
    ring = torch.zeros(1, 1, 1, 4096, dtype=torch.float16)
    zero = torch.zeros(1, dtype=torch.int64)
    write_ring(ring, value.view(1, 1, 1, -1), zero, zero, zero + 1)
    expected = value.double().numpy().astype(np.float16)
    assert np.array_equal(ring.flatten().numpy().view(np.uint16), expected.view(np.uint16))
    assert ring.flatten()[:4].tolist() == [2 * 2**-24, 2 * 2**-24, 0.0, 2**-24]


def test_keys_in_bfloat16_are_rounded_to_nearest_even() -> None:
    ring = torch.zeros(1, 4, 1, 1, dtype=torch.bfloat16)
    keys = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1 - 3 * 2.0**-8])
    zero = torch.zeros(1, dtype=torch.int64)
    write_ring(ring, keys.view(1, 4, 1, 1), zero, zero, zero + 4)
    assert ring.flatten().tolist() == [1.0, 1 + 2.0**-6, 1 + 2.0**-7, -1 - 2.0**-6]
