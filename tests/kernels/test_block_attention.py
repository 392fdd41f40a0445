"""The drafter's attention: window edges, causality and live intervals, against one FP64 softmax a query."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.block_attention import full_block_attention, local_block_attention
from kernels.ring import read_ring
from tests.kernels import oracles
from tests.kernels.oracles import POISON

KV_HEADS, QUERY_HEADS, DIM, WINDOW, PAGE, SLOTS = 2, 4, 8, 24, 64, 7
SCALE = DIM**-0.5
EDGES = [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """Rows with their whole past `past_k[b]`, `past_v[b]` [F, Hkv, D] and a block of W columns."""

    past_k: list[torch.Tensor]
    past_v: list[torch.Tensor]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    frontier: torch.Tensor
    valid: torch.Tensor

    def expected(self, row: int, column: int, window: int | None, causal: bool) -> torch.Tensor:
        """By the rule: every committed position and every live column, filtered by distance."""
        frontier, live = int(self.frontier[row]), int(self.valid[row])
        query = frontier + column
        seen_k, seen_v = [], []
        for position in range(frontier + live):
            if window is not None and abs(position - query) >= window:
                continue
            if causal and position > query:
                continue
            past = position < frontier
            seen_k.append(self.past_k[row][position] if past else self.k[row, position - frontier])
            seen_v.append(self.past_v[row][position] if past else self.v[row, position - frontier])
        return oracles.attention(self.q[row, column], torch.stack(seen_k), torch.stack(seen_v), SCALE)

    def check(self, got: torch.Tensor, window: int | None, causal: bool, tolerance: float = 2e-6) -> None:
        assert got.shape == self.q.shape and got.dtype == self.q.dtype
        for row, live in enumerate(self.valid.tolist()):
            for column in range(live):
                oracles.close(got[row, column], self.expected(row, column, window, causal), tolerance)
            assert bool((got[row, live:] == 0).all())


def case(frontiers: list[int], valid: list[int], width: int, dtype: torch.dtype = torch.float32) -> Case:
    batch = len(frontiers)
    past_k = [normal(f, KV_HEADS, DIM, seed=10 + b).to(dtype) for b, f in enumerate(frontiers)]
    past_v = [normal(f, KV_HEADS, DIM, seed=50 + b).to(dtype) for b, f in enumerate(frontiers)]
    q = normal(batch, width, QUERY_HEADS, DIM, seed=1).to(dtype)
    k, v = (normal(batch, width, KV_HEADS, DIM, seed=s).to(dtype) for s in (2, 3))
    for row, live in enumerate(valid):
        for tensor in (q, k, v):
            tensor[row, live:] = POISON
    return Case(past_k, past_v, q, k, v, torch.tensor(frontiers), torch.tensor(valid))


def in_rings(
    c: Case, window: int, dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ring keys, ring values, slots): position p in slot p mod S; whatever is not live is NaN. The row at distance S
    from the anchor is live but seen by nobody: it holds 1e30, which would show."""
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(4))[: len(c.past_k)]
    keys, values = (torch.full((SLOTS, window, KV_HEADS, DIM), POISON, dtype=dtype) for dtype in dtypes)
    for ring, past in zip((keys, values), (c.past_k, c.past_v), strict=True):
        for row, rows in enumerate(past):
            frontier = rows.shape[0]
            for position in range(max(0, frontier - window), frontier):
                ring[slots[row], position % window] = rows[position].to(ring.dtype)
            if frontier >= window:
                ring[slots[row], frontier % window] = 1e30 if ring.dtype == torch.float32 else 3e4
    return keys, values, slots


def local(c: Case, window: int, causal: bool) -> torch.Tensor:
    keys, values, slots = in_rings(c, window)
    return local_block_attention(c.q, c.k, c.v, keys, values, slots, c.frontier, c.valid, causal, SCALE)


def full(c: Case, causal: bool) -> torch.Tensor:
    pages = 16
    pools = [torch.full((pages, PAGE, KV_HEADS, DIM), POISON) for _ in range(2)]
    table = torch.full((len(c.past_k), 4), 2**40)
    free = torch.randperm(pages, generator=torch.Generator().manual_seed(6)).tolist()
    for row, rows in enumerate(c.past_k):
        for position in range(rows.shape[0]):
            if position % PAGE == 0:
                table[row, position // PAGE] = free.pop()
            for pool, past in zip(pools, (c.past_k, c.past_v), strict=True):
                pool[table[row, position // PAGE], position % PAGE] = past[row][position]
    return full_block_attention(c.q, c.k, c.v, pools[0], pools[1], table, c.frontier, c.valid, causal, SCALE)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("frontier", EDGES)
@pytest.mark.parametrize("width", [1, 8, 16])
def test_a_local_layer_sees_what_is_nearer_than_the_window(frontier: int, width: int, causal: bool) -> None:
    c = case([frontier], [width], width)
    c.check(local(c, WINDOW, causal), WINDOW, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("frontier", [0, 1, 63, 64, 65, 200])
def test_a_full_layer_sees_all_committed_rows_and_the_block(frontier: int, causal: bool) -> None:
    c = case([frontier], [6], 6)
    c.check(full(c, causal), None, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_ragged_rows_share_a_batch_and_inactive_columns_are_exact_zeros(causal: bool) -> None:
    c = case([*EDGES, 40], [8, 3, 1, 0, 8, 5, 2], 8)
    c.check(local(c, WINDOW, causal), WINDOW, causal)
    c = case([0, 1, 64, 130, 65], [8, 3, 1, 0, 5], 8)
    c.check(full(c, causal), None, causal)


def test_the_key_at_distance_s_minus_1_is_seen_and_the_one_at_s_is_not() -> None:
    """One key stands out by its value; a full window of equal scores shows who takes part."""
    frontier = 3 * WINDOW
    c = case([frontier], [3], 3)
    for tensor in (c.q, c.k, c.v, c.past_k[0], c.past_v[0]):
        tensor.zero_()
    for distance, seen_by in ((WINDOW, []), (WINDOW - 1, [0]), (WINDOW - 2, [0, 1]), (WINDOW - 3, [0, 1, 2])):
        keys, values, slots = in_rings(c, WINDOW)
        keys[slots], values[slots] = 0.0, 0.0
        values[slots[0], (frontier - distance) % WINDOW] = 100.0
        got = local_block_attention(c.q, c.k, c.v, keys, values, slots, c.frontier, c.valid, False, SCALE)
        assert got[0].abs().amax((-1, -2)).nonzero().flatten().tolist() == seen_by


def test_the_window_also_limits_the_block_where_it_is_narrower_than_the_block() -> None:
    for causal in (False, True):
        c = case([0, 2, 4, 21], [8, 8, 5, 8], 8)
        c.check(local(c, 4, causal), 4, causal)


def test_without_causality_a_column_depends_on_later_columns_and_with_it_not() -> None:
    c = case([10], [6], 6)
    disturbed = Case(c.past_k, c.past_v, c.q, c.k.clone(), c.v.clone(), c.frontier, c.valid)
    disturbed.k[0, 4] += 1.0
    disturbed.v[0, 4] += 1.0
    for run in (lambda x, causal: local(x, WINDOW, causal), full):
        changed = [(run(c, causal) != run(disturbed, causal)).any(-1).any(-1)[0].tolist() for causal in (False, True)]
        assert changed == [[True] * 6, [False] * 4 + [True] * 2]


def test_attention_leaves_the_context_as_it_was() -> None:
    c = case([WINDOW + 5], [8], 8)
    keys, values, slots = in_rings(c, WINDOW)
    before = keys.clone(), values.clone()
    local_block_attention(c.q, c.k, c.v, keys, values, slots, c.frontier, c.valid, False, SCALE)
    for now, then in zip((keys, values), before, strict=True):
        assert torch.equal(now.view(torch.int32), then.view(torch.int32))


def test_a_ring_is_read_in_the_order_of_positions() -> None:
    for frontier in EDGES:
        ring = torch.full((WINDOW, 1, 1), POISON)
        for position in range(frontier):
            ring[position % WINDOW] = float(position)
        assert read_ring(ring, frontier).flatten().tolist() == list(range(max(0, frontier - WINDOW), frontier))


@pytest.mark.parametrize("frontier", [5, WINDOW, 3 * WINDOW])
def test_bfloat16_keys_and_float16_values_are_read_as_they_are(frontier: int) -> None:
    c = case([frontier], [8], 8, torch.bfloat16)
    keys, values, slots = in_rings(c, WINDOW, (torch.bfloat16, torch.float16))
    got = local_block_attention(c.q, c.k, c.v, keys, values, slots, c.frontier, c.valid, False, SCALE)
    c.check(got, WINDOW, False, 2.0**-6)
