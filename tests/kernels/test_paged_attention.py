"""The target's causal attention over pages: who sees what, against one FP64 softmax a query, in poisoned pools."""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl

from kernels.paged_attention import (
    MULTIPROCESSORS,
    Tiling,
    paged_attention_reference,
    paged_attention_triton,
    read_pages,
    write_pages,
)
from kernels.paged_attention_kernels import parts_of_rows
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, poison_new_memory
from tests.kernels.oracles import POISON

PAGE, PAGES, KV_HEADS, QUERY_HEADS, DIM = 64, 24, 2, 6, 16
SCALE = DIM**-0.5
NO_PAGE = 2**40  # an entry of a page table that must never be followed
WHOLE = Tiling(rows=32, keys=64, slots=1, warps=4, stages=2, summed=1)
SHARED = Tiling(rows=64, keys=32, slots=5, warps=4, stages=2, summed=16)
"""Tiles of half a page, and programs that share the rows' contexts."""

# Query rows of columns that are not live are computed from poison, and thrown away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Attention = Callable[..., torch.Tensor]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Rows:
    """B sequences written into a pool that holds NaN everywhere else; `keys[b]`, `values[b]` are FP64 copies."""

    pool_keys: torch.Tensor
    pool_values: torch.Tensor
    page_table: torch.Tensor
    start: torch.Tensor
    valid: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def rows(contexts: list[int], valid: list[int], dtype: torch.dtype = torch.float32, dim: int = DIM) -> Rows:
    batch = len(contexts)
    pools = [torch.full((PAGES, PAGE, KV_HEADS, dim), POISON, dtype=dtype) for _ in range(2)]
    table = torch.full((batch, 6), NO_PAGE)
    free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(5)).tolist()
    planes: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for b, (context, live) in enumerate(zip(contexts, valid, strict=True)):
        total = context + live
        for page in range(-(-total // PAGE)):
            table[b, page] = free.pop()
        for plane, (pool, kept) in enumerate(zip(pools, planes, strict=True)):
            data = normal(total, KV_HEADS, dim, seed=1000 * plane + b).to(dtype)
            for position in range(total):
                pool[table[b, position // PAGE], position % PAGE] = data[position]
            kept.append(data.double())
    return Rows(pools[0], pools[1], table, torch.tensor(contexts), torch.tensor(valid), *planes)


@pytest.fixture(params=["reference", "triton", "triton, contexts shared"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attention:
    """(q, gate, keys, values, page_table, start, valid, scale) -> out."""
    poison_new_memory(monkeypatch)
    if request.param == "reference":
        return paged_attention_reference
    return launch(WHOLE if request.param == "triton" else SHARED)


def launch(tiling: Tiling | None) -> Attention:
    """The kernels, on the card where there is one."""

    def attend(*arguments: object) -> torch.Tensor:
        moved = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in arguments]
        return paged_attention_triton(*moved, tiling=tiling).cpu()  # type: ignore[arg-type]

    return attend


def gates(q: torch.Tensor) -> torch.Tensor:
    """Gates as a view into a wider tensor, as the projection has them, of the same dtype and shape as `q`."""
    both = normal(*q.shape[:-1], 2 * q.shape[-1], seed=9).to(q.dtype)
    return both[..., q.shape[-1] :]


def check(attention: Attention, r: Rows, q: torch.Tensor, tolerance: float) -> None:
    gate = gates(q)
    for b, live in enumerate(r.valid.tolist()):
        q[b, live:] = POISON
        gate[b, live:] = POISON
    got = attention(q, gate, r.pool_keys, r.pool_values, r.page_table, r.start, r.valid, SCALE)
    assert got.shape == q.shape and got.dtype == q.dtype
    for b, (context, live) in enumerate(zip(r.start.tolist(), r.valid.tolist(), strict=True)):
        for i in range(live):
            seen = context + i + 1
            expected = oracles.attention(q[b, i], r.keys[b][:seen], r.values[b][:seen], SCALE)
            oracles.close(got[b, i], expected * gate[b, i].double().sigmoid(), tolerance)
        assert bool((got[b, live:] == 0).all())


@pytest.mark.parametrize("width", [1, 5, 16])
def test_a_column_sees_its_context_and_the_columns_up_to_itself(attention: Attention, width: int) -> None:
    contexts = [0, 1, 63, 64, 65, 200]
    check(attention, rows(contexts, [width] * 6), normal(6, width, QUERY_HEADS, DIM, seed=width), 2e-6)


def test_ragged_rows_share_a_batch_and_inactive_columns_are_exact_zeros(attention: Attention) -> None:
    check(attention, rows([0, 200, 63, 64, 1, 65], [8, 3, 1, 0, 5, 8]), normal(6, 8, QUERY_HEADS, DIM, seed=3), 2e-6)


@pytest.mark.parametrize("query_heads", [KV_HEADS, 2 * KV_HEADS, 8 * KV_HEADS])
def test_query_heads_share_a_key_head_in_consecutive_groups(attention: Attention, query_heads: int) -> None:
    check(attention, rows([70], [4]), normal(1, 4, query_heads, DIM, seed=4), 2e-6)


def test_large_scores_do_not_overflow(attention: Attention) -> None:
    check(attention, rows([100], [4]), normal(1, 4, QUERY_HEADS, DIM, seed=5) * 1e3, 1e-4)


def test_bfloat16_stays_within_its_precision(attention: Attention) -> None:
    r = rows([130], [8], torch.bfloat16)
    check(attention, r, normal(1, 8, QUERY_HEADS, DIM, seed=6).bfloat16(), 2.0**-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_launch_of_each_head_dimension_is_right(dim: int, dtype: torch.dtype) -> None:
    r, q = rows([70, 0], [4, 1], dtype, dim), normal(2, 4, QUERY_HEADS, dim, seed=dim).to(dtype)
    check(launch(None), r, q, 2e-6 if dtype == torch.float32 else 2.0**-6)


@pytest.mark.parametrize("tiling", [WHOLE, SHARED])
def test_no_column_of_a_chunk_of_many_tiles_sees_the_columns_after_it(tiling: Tiling) -> None:
    check(launch(tiling), rows([65], [90]), normal(1, 90, QUERY_HEADS, DIM, seed=12), 2e-6)


def test_keys_may_lie_between_those_of_other_layers() -> None:
    r, q = rows([100, 3], [3, 2]), normal(2, 3, QUERY_HEADS, DIM, seed=13)
    layers = [torch.stack((torch.full_like(pool, POISON), pool), dim=1) for pool in (r.pool_keys, r.pool_values)]
    check(launch(SHARED), replace(r, pool_keys=layers[0][:, 1], pool_values=layers[1][:, 1]), q, 2e-6)


@triton.jit
def _leave_parts(start_ptr, valid_ptr, share_ptr, parts_ptr, batch, slots, KEYS: tl.constexpr, LANES: tl.constexpr):
    share, parts = parts_of_rows(start_ptr, valid_ptr, batch, slots, KEYS, LANES)
    tl.store(share_ptr, share)
    tl.store(parts_ptr + tl.arange(0, LANES), parts)


def parts_on_the_device(lengths: list[int], slots: int) -> tuple[int, list[int]]:
    """(keys of a part, parts of each row), with tiles of 64 keys."""
    lanes = triton.next_power_of_2(len(lengths))
    length = torch.tensor(lengths, device=DEVICE)
    share, parts = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.full((lanes,), -1, device=DEVICE)
    start, valid = (length - 1).clamp(min=0), length.clamp(max=1)
    _leave_parts[(1,)](start, valid, share, parts, len(lengths), slots, KEYS=64, LANES=lanes)  # pyright: ignore
    assert parts.tolist()[len(lengths) :] == [0] * (lanes - len(lengths))
    return int(share), parts.tolist()[: len(lengths)]


@pytest.mark.parametrize("slots", [1, 3, 33, 264])
@pytest.mark.parametrize(
    "lengths", [[131_072], [0], [193], [64 * 33 + 5], [131_072, 10, 500], [900] * 32, [1, 0, 64, 65, 0, 128, 4096]]
)
def test_programs_share_all_contexts_evenly_whichever_row_they_belong_to(lengths: list[int], slots: int) -> None:
    keys, parts = parts_on_the_device(lengths, slots)
    assert parts == [-(-n // keys) for n in lengths]
    tiles = sum(-(-n // 64) for n in lengths)
    assert keys % 64 == 0 and keys // 64 <= max(1, 1.5 * -(-tiles // slots))
    assert sum(parts) <= slots + len(lengths) - 1 and max(parts) <= slots


@pytest.mark.parametrize("lengths", [[4104] * 8, [4104] * 32, [131_080, *[1032] * 7]])
def test_parts_are_a_little_longer_where_then_none_waits_for_another_to_end(lengths: list[int]) -> None:
    _, parts = parts_on_the_device(lengths, slots=33)
    assert sum(parts) <= 33


def test_a_long_row_among_as_many_short_ones_as_there_are_slots_is_still_cut() -> None:
    _, parts = parts_on_the_device([131_072, *[1024] * 31], slots=33)
    assert parts[0] > 20


def test_a_launch_fills_the_card_and_a_chunk_takes_whole_contexts() -> None:
    def slots(columns: int, longest: int = 131_072) -> int:
        return Tiling.of(1, kv_heads=4, rows=columns * 6, head_dim=256, itemsize=2, longest=longest).slots

    assert slots(8) == slots(16) == 33  # times 4 kv heads
    assert slots(8, longest=130) == 3
    assert slots(2048) == 1


def test_slices_of_a_chunk_leave_few_multiprocessors_without_a_program() -> None:
    """A slot takes its share of the contexts: so many waves of programs, each as long as that share."""

    def length(columns: int) -> float:
        tiling = Tiling.of(1, kv_heads=4, rows=columns * 6, head_dim=256, itemsize=2, longest=131_072)
        tiles = 4 * -(-columns * 6 // tiling.rows)
        return -(-tiles * tiling.slots // MULTIPROCESSORS) / tiling.slots / (tiles / MULTIPROCESSORS)

    assert all(length(columns) < 1.25 for columns in range(64, 1025, 64))


def test_what_does_not_fit_together_is_refused_by_name() -> None:
    r, q = rows([3], [2]), normal(1, 2, QUERY_HEADS, DIM, seed=14)
    rest = (r.page_table, r.start, r.valid, SCALE)
    with pytest.raises(ValueError, match="q: 3 heads, must be a multiple of the 2 key heads"):
        paged_attention_triton(q[:, :, :3], q[:, :, :3], r.pool_keys, r.pool_values, *rest)
    with pytest.raises(ValueError, match=r"gate: torch\.bfloat16, must be torch\.float32"):
        paged_attention_triton(q, q.bfloat16(), r.pool_keys, r.pool_values, *rest)
    with pytest.raises(ValueError, match="values: strides"):
        paged_attention_triton(q, q, r.pool_keys, r.pool_values.transpose(1, 2).contiguous().transpose(1, 2), *rest)
    with pytest.raises(ValueError, match=r"page_table: torch\.int32, must be torch\.int64"):
        paged_attention_triton(q, q, r.pool_keys, r.pool_values, r.page_table.int(), *rest[1:])
    with pytest.raises(ValueError, match="q: head dimension 12"):
        paged_attention_triton(q[..., :12].contiguous(), q[..., :12], r.pool_keys, r.pool_values, *rest)


def test_rows_do_not_influence_each_other() -> None:
    r, q = rows([0, 130, 64], [4, 4, 4]), normal(3, 4, QUERY_HEADS, DIM, seed=7)
    for attention in (paged_attention_reference, launch(WHOLE)):
        together = attention(q, q, r.pool_keys, r.pool_values, r.page_table, r.start, r.valid, SCALE)
        for b in range(3):
            one = slice(b, b + 1)
            alone = attention(
                q[one], q[one], r.pool_keys, r.pool_values, r.page_table[one], r.start[one], r.valid[one], SCALE
            )
            assert torch.equal(alone, together[one])


@pytest.mark.parametrize("start", [0, 1, 60, 63, 64, 100])
def test_a_write_lands_at_its_positions_and_nowhere_else(start: int) -> None:
    table = torch.tensor([[7, 2, 9, NO_PAGE], [1, 0, NO_PAGE, NO_PAGE]])
    pool = torch.full((12, PAGE, KV_HEADS, DIM), POISON)
    data, valid = normal(2, 9, KV_HEADS, DIM, seed=start), torch.tensor([9, 4])
    data[1, 4:] = 1e30
    write_pages(pool, data, table, torch.tensor([start, 62]), valid)
    expected = torch.full_like(pool, POISON)
    for b, first in enumerate((start, 62)):
        for i in range(int(valid[b])):
            expected[table[b, (first + i) // PAGE], (first + i) % PAGE] = data[b, i]
    assert torch.equal(pool.nan_to_num(nan=-7.0), expected.nan_to_num(nan=-7.0))


def test_what_is_written_is_what_is_read() -> None:
    pool = torch.full((4, PAGE, KV_HEADS, DIM), POISON)
    table = torch.tensor([[3, 1, NO_PAGE]])
    data = normal(1, 100, KV_HEADS, DIM, seed=8)
    for start, end in ((0, 1), (1, 64), (64, 65), (65, 100)):
        write_pages(pool, data[:, start:end], table, torch.tensor([start]), torch.tensor([end - start]))
    for tokens in (0, 1, 63, 64, 65, 100):
        assert torch.equal(read_pages(pool, table[0], tokens), data[0, :tokens])


def test_a_write_rounds_to_the_pools_dtype() -> None:
    pool = torch.zeros(1, PAGE, 1, 4, dtype=torch.bfloat16)
    value = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1.0 + 2.0**-8 + 2.0**-16, -1.0 - 2.0**-8])
    write_pages(pool, value.view(1, 1, 1, 4), torch.tensor([[0]]), torch.tensor([5]), torch.tensor([1]))
    assert pool[0, 5, 0].tolist() == [1.0, 1.0 + 2.0**-6, 1.0 + 2.0**-7, -1.0]
