"""The target's causal attention over pages: who sees what, against one FP64 softmax a query, in poisoned pools."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.paged_attention import paged_attention, read_pages, write_pages
from tests.kernels import oracles
from tests.kernels.oracles import POISON

PAGE, PAGES, KV_HEADS, QUERY_HEADS, DIM = 64, 24, 2, 6, 16
SCALE = DIM**-0.5
NO_PAGE = 2**40  # an entry of a page table that must never be followed


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


def rows(contexts: list[int], valid: list[int], dtype: torch.dtype = torch.float32) -> Rows:
    batch = len(contexts)
    pools = [torch.full((PAGES, PAGE, KV_HEADS, DIM), POISON, dtype=dtype) for _ in range(2)]
    table = torch.full((batch, 6), NO_PAGE)
    free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(5)).tolist()
    planes: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for b, (context, live) in enumerate(zip(contexts, valid, strict=True)):
        total = context + live
        for page in range(-(-total // PAGE)):
            table[b, page] = free.pop()
        for plane, (pool, kept) in enumerate(zip(pools, planes, strict=True)):
            data = normal(total, KV_HEADS, DIM, seed=1000 * plane + b).to(dtype)
            for position in range(total):
                pool[table[b, position // PAGE], position % PAGE] = data[position]
            kept.append(data.double())
    return Rows(pools[0], pools[1], table, torch.tensor(contexts), torch.tensor(valid), *planes)


def attend(r: Rows, q: torch.Tensor) -> torch.Tensor:
    return paged_attention(q, r.pool_keys, r.pool_values, r.page_table, r.start, r.valid, SCALE)


def check(r: Rows, q: torch.Tensor, tolerance: float) -> torch.Tensor:
    for b, live in enumerate(r.valid.tolist()):
        q[b, live:] = POISON
    got = attend(r, q)
    assert got.shape == q.shape and got.dtype == q.dtype
    for b, (context, live) in enumerate(zip(r.start.tolist(), r.valid.tolist(), strict=True)):
        for i in range(live):
            seen = context + i + 1
            expected = oracles.attention(q[b, i], r.keys[b][:seen], r.values[b][:seen], SCALE)
            oracles.close(got[b, i], expected, tolerance)
        assert bool((got[b, live:] == 0).all())
    return got


@pytest.mark.parametrize("context", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("width", [1, 5, 16])
def test_a_column_sees_its_context_and_the_columns_up_to_itself(context: int, width: int) -> None:
    check(rows([context], [width]), normal(1, width, QUERY_HEADS, DIM, seed=width), 2e-6)


def test_ragged_rows_share_a_batch_and_inactive_columns_are_exact_zeros() -> None:
    check(rows([0, 200, 63, 64, 1, 65], [8, 3, 1, 0, 5, 8]), normal(6, 8, QUERY_HEADS, DIM, seed=3), 2e-6)


@pytest.mark.parametrize("query_heads", [KV_HEADS, 2 * KV_HEADS, 8 * KV_HEADS])
def test_query_heads_share_a_key_head_in_consecutive_groups(query_heads: int) -> None:
    check(rows([70], [4]), normal(1, 4, query_heads, DIM, seed=4), 2e-6)


def test_large_scores_do_not_overflow() -> None:
    check(rows([100], [4]), normal(1, 4, QUERY_HEADS, DIM, seed=5) * 1e3, 1e-4)


def test_bfloat16_stays_within_its_precision() -> None:
    r = rows([130], [8], torch.bfloat16)
    check(r, normal(1, 8, QUERY_HEADS, DIM, seed=6).bfloat16(), 2.0**-6)


def test_rows_do_not_influence_each_other() -> None:
    r, q = rows([0, 130, 64], [4, 4, 4]), normal(3, 4, QUERY_HEADS, DIM, seed=7)
    together = attend(r, q)
    for b in range(3):
        one = slice(b, b + 1)
        alone = paged_attention(
            q[one], r.pool_keys, r.pool_values, r.page_table[one], r.start[one], r.valid[one], SCALE
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
