"""The drafter's attention: window edges, causality and live intervals, against one FP64 softmax a query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from kernels.block_attention import (
    UNBOUNDED,
    BlockContext,
    Tiling,
    block_attention_reference,
    block_attention_triton,
    full_block_attention,
    local_block_attention,
)
from kernels.ring import read_ring
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, poison_new_memory, there
from tests.kernels.oracles import POISON

KV_HEADS, QUERY_HEADS, DIM, WINDOW, PAGE, SLOTS = 2, 4, 16, 24, 64, 7
SCALE = DIM**-0.5
EDGES = [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW]
SMALL = Tiling(rows=32, keys=16, splits=3, warps=4, stages=2)
"""Tiles so small that these contexts need several, in several shares."""

# Of rows without live columns the kernels compute with unwritten memory, and throw it away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Attention = Callable[..., torch.Tensor]


@pytest.fixture(params=["reference", "triton"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attention:
    """(q, k, v, context, frontier, valid, causal, scale) -> out."""
    poison_new_memory(monkeypatch)
    return block_attention_reference if request.param == "reference" else launch(SMALL)


def launch(tiling: Tiling | None) -> Attention:
    """The kernels, on the card where there is one."""

    def attend(*arguments: object) -> torch.Tensor:
        moved = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in arguments]
        moved[3] = there(moved[3])
        return partial(block_attention_triton, tiling=tiling)(*moved).cpu()  # type: ignore[arg-type]

    return attend


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


def case(
    frontiers: list[int],
    valid: list[int],
    width: int,
    dtype: torch.dtype = torch.float32,
    query_heads: int = QUERY_HEADS,
    dim: int = DIM,
) -> Case:
    batch = len(frontiers)
    past_k = [normal(f, KV_HEADS, dim, seed=10 + b).to(dtype) for b, f in enumerate(frontiers)]
    past_v = [normal(f, KV_HEADS, dim, seed=50 + b).to(dtype) for b, f in enumerate(frontiers)]
    q = normal(batch, width, query_heads, dim, seed=1).to(dtype)
    k, v = (normal(batch, width, KV_HEADS, dim, seed=s).to(dtype) for s in (2, 3))
    for row, live in enumerate(valid):
        for tensor in (q, k, v):
            tensor[row, live:] = POISON
    return Case(past_k, past_v, q, k, v, torch.tensor(frontiers), torch.tensor(valid))


def in_rings(
    c: Case, window: int, dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
) -> BlockContext:
    """Position p in slot p mod S; whatever is not live is NaN. The row at distance S from the anchor is live but seen
    by nobody: it holds 1e30, which would show."""
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(4))[: len(c.past_k)]
    keys, values = (torch.full((SLOTS, window, KV_HEADS, c.q.shape[-1]), POISON, dtype=dtype) for dtype in dtypes)
    for ring, past in zip((keys, values), (c.past_k, c.past_v), strict=True):
        for row, rows in enumerate(past):
            frontier = rows.shape[0]
            for position in range(max(0, frontier - window), frontier):
                ring[slots[row], position % window] = rows[position].to(ring.dtype)
            if frontier >= window:
                ring[slots[row], frontier % window] = 1e30 if ring.dtype == torch.float32 else 3e4
    return BlockContext(keys, values, slots[:, None], window)


def in_pages(c: Case) -> BlockContext:
    """Pages in no order; a table's unused entries must never be followed."""
    pages = 16
    pools = [torch.full((pages, PAGE, KV_HEADS, c.q.shape[-1]), POISON, dtype=c.q.dtype) for _ in range(2)]
    table = torch.full((len(c.past_k), 4), 2**40)
    free = torch.randperm(pages, generator=torch.Generator().manual_seed(6)).tolist()
    for row, rows in enumerate(c.past_k):
        for position in range(rows.shape[0]):
            if position % PAGE == 0:
                table[row, position // PAGE] = free.pop()
            for pool, past in zip(pools, (c.past_k, c.past_v), strict=True):
                pool[table[row, position // PAGE], position % PAGE] = past[row][position]
    return BlockContext(pools[0], pools[1], table, UNBOUNDED)


def run(attention: Attention, c: Case, context: BlockContext, causal: bool) -> torch.Tensor:
    return attention(c.q, c.k, c.v, context, c.frontier, c.valid, causal, SCALE)


@pytest.mark.parametrize("frontier", EDGES)
@pytest.mark.parametrize("width, causal", [(1, False), (8, False), (8, True), (16, True)])
def test_a_local_layer_sees_what_is_nearer_than_the_window(
    attention: Attention, frontier: int, width: int, causal: bool
) -> None:
    c = case([frontier], [width], width)
    c.check(run(attention, c, in_rings(c, WINDOW), causal), WINDOW, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("frontier", [0, 1, 63, 64, 65, 200])
def test_a_full_layer_sees_all_committed_rows_and_the_block(attention: Attention, frontier: int, causal: bool) -> None:
    c = case([frontier], [6], 6)
    c.check(run(attention, c, in_pages(c), causal), None, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_ragged_rows_share_a_batch_and_inactive_columns_are_exact_zeros(attention: Attention, causal: bool) -> None:
    c = case([*EDGES, 40], [8, 3, 1, 0, 8, 5, 2], 8)
    c.check(run(attention, c, in_rings(c, WINDOW), causal), WINDOW, causal)
    c = case([0, 1, 64, 130, 65], [8, 3, 1, 0, 5], 8)
    c.check(run(attention, c, in_pages(c), causal), None, causal)


def test_rows_do_not_influence_each_other(attention: Attention) -> None:
    c = case([5, 30, 24], [4, 4, 4], 4)
    context = in_rings(c, WINDOW)
    together = run(attention, c, context, False)
    for b in range(3):
        one = slice(b, b + 1)
        place = BlockContext(context.keys, context.values, context.places[one], WINDOW)
        alone = attention(c.q[one], c.k[one], c.v[one], place, c.frontier[one], c.valid[one], False, SCALE)
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("query_heads", [KV_HEADS, 3 * KV_HEADS, 8 * KV_HEADS])
def test_query_heads_share_a_key_head_in_consecutive_groups(attention: Attention, query_heads: int) -> None:
    c = case([70], [5], 5, query_heads=query_heads)
    c.check(run(attention, c, in_rings(c, WINDOW), False), WINDOW, False)


def test_the_key_at_distance_s_minus_1_is_seen_and_the_one_at_s_is_not(attention: Attention) -> None:
    """One key stands out by its value; a full window of equal scores shows who takes part."""
    frontier = 3 * WINDOW
    c = case([frontier], [3], 3)
    for tensor in (c.q, c.k, c.v, c.past_k[0], c.past_v[0]):
        tensor.zero_()
    for distance, seen_by in ((WINDOW, []), (WINDOW - 1, [0]), (WINDOW - 2, [0, 1]), (WINDOW - 3, [0, 1, 2])):
        context = in_rings(c, WINDOW)
        slot = int(context.places[0, 0])
        context.keys[slot], context.values[slot] = 0.0, 0.0
        context.values[slot, (frontier - distance) % WINDOW] = 100.0
        got = run(attention, c, context, False)
        assert got[0].abs().amax((-1, -2)).nonzero().flatten().tolist() == seen_by


def test_the_window_also_limits_the_block_where_it_is_narrower_than_the_block(attention: Attention) -> None:
    for causal in (False, True):
        c = case([0, 2, 4, 21], [8, 8, 5, 8], 8)
        c.check(run(attention, c, in_rings(c, 4), causal), 4, causal)


def test_a_share_may_begin_with_keys_that_late_columns_do_not_see() -> None:
    c = case([60], [40], 40)
    whole = launch(Tiling(rows=16, keys=16, splits=1, warps=4, stages=2))
    c.check(run(whole, c, in_rings(c, 48), False), 48, False)


def test_without_causality_a_column_depends_on_later_columns_and_with_it_not(attention: Attention) -> None:
    c = case([10], [6], 6)
    disturbed = Case(c.past_k, c.past_v, c.q, c.k.clone(), c.v.clone(), c.frontier, c.valid)
    disturbed.k[0, 4] += 1.0
    disturbed.v[0, 4] += 1.0
    for context in (in_rings(c, WINDOW), in_pages(c)):
        changed = [
            (run(attention, c, context, causal) != run(attention, disturbed, context, causal))
            .any(-1)
            .any(-1)[0]
            .tolist()
            for causal in (False, True)
        ]
        assert changed == [[True] * 6, [False] * 4 + [True] * 2]


def test_attention_leaves_the_context_as_it_was(attention: Attention) -> None:
    c = case([WINDOW + 5], [8], 8)
    context = in_rings(c, WINDOW)
    before = context.keys.clone(), context.values.clone()
    run(attention, c, context, False)
    for now, then in zip((context.keys, context.values), before, strict=True):
        assert torch.equal(now.view(torch.int32), then.view(torch.int32))


def test_large_scores_do_not_overflow(attention: Attention) -> None:
    c = case([70], [4], 4)
    c.q.mul_(1e3)
    c.check(run(attention, c, in_rings(c, WINDOW), False), WINDOW, False, 1e-4)


def test_a_ring_is_read_in_the_order_of_positions() -> None:
    for frontier in EDGES:
        ring = torch.full((WINDOW, 1, 1), POISON)
        for position in range(frontier):
            ring[position % WINDOW] = float(position)
        assert read_ring(ring, frontier).flatten().tolist() == list(range(max(0, frontier - WINDOW), frontier))


@pytest.mark.parametrize("frontier", [0, 5, WINDOW, 3 * WINDOW])
def test_bfloat16_keys_and_float16_values_are_read_as_they_are(attention: Attention, frontier: int) -> None:
    c = case([frontier], [8], 8, torch.bfloat16)
    context = in_rings(c, WINDOW, (torch.bfloat16, torch.float16))
    c.check(run(attention, c, context, False), WINDOW, False, 2.0**-6)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_take_every_head_dimension_with_the_tiling_of_the_shapes(dim: int, dtype: torch.dtype) -> None:
    c = case([30, 0], [8, 3], 8, dtype, dim=dim)
    tolerance = 2e-6 if dtype == torch.float32 else 2.0**-6
    ring_types = (dtype, dtype if dtype == torch.float32 else torch.float16)
    c.check(run(launch(None), c, in_rings(c, WINDOW, ring_types), False), WINDOW, False, tolerance)
    c.check(run(launch(None), c, in_pages(c), True), None, True, tolerance)


def test_kernels_take_block_columns_out_of_a_wider_projection() -> None:
    c = case([30], [4], 4)
    joined = torch.cat((c.q, c.k, c.v), dim=-2)
    q, k, v = joined.split([QUERY_HEADS, KV_HEADS, KV_HEADS], dim=-2)
    assert not v.is_contiguous()
    apart = Case(c.past_k, c.past_v, q, k, v, c.frontier, c.valid)
    c.check(run(launch(SMALL), apart, in_rings(c, WINDOW), False), WINDOW, False)


def test_the_operators_are_attention_over_a_ring_and_over_pages() -> None:
    c = case([50], [5], 5)
    q, k, v, frontier, valid = (x.to(DEVICE) for x in (c.q, c.k, c.v, c.frontier, c.valid))
    ring, pages = there(in_rings(c, WINDOW)), there(in_pages(c))
    slots = ring.places[:, 0].contiguous()
    got = local_block_attention(q, k, v, ring.keys, ring.values, slots, frontier, valid, False, SCALE)
    c.check(got.cpu(), WINDOW, False)
    got = full_block_attention(q, k, v, pages.keys, pages.values, pages.places, frontier, valid, False, SCALE)
    c.check(got.cpu(), None, False)


@pytest.mark.parametrize(("batch", "at_least", "at_most"), [(1, 132, 264), (8, 132, 264), (64, 264, 528)])
def test_a_launch_fills_the_card_at_every_batch_size(batch: int, at_least: int, at_most: int) -> None:
    tiling = Tiling.of(batch, kv_heads=8, rows=32, head_dim=128, itemsize=2, longest=2048)
    assert at_least <= batch * 8 * tiling.splits <= at_most


def test_a_launch_refuses_what_does_not_fit_by_name() -> None:
    c = case([30], [4], 4)
    context = in_rings(c, WINDOW)
    for name, refused in {
        "k": (c.q, c.k[..., :8], c.v, context, c.frontier, c.valid),
        "v": (c.q, c.k, c.v.bfloat16(), context, c.frontier, c.valid),
        "frontier": (c.q, c.k, c.v, context, c.frontier.int(), c.valid),
        "valid": (c.q, c.k, c.v, context, c.frontier, c.valid[:0]),
        "q": (c.q[:, :, :3], c.k, c.v, context, c.frontier, c.valid),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: .*must be"):
            block_attention_triton(*refused, False, SCALE)
