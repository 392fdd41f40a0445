"""Target attention at 27B's sizes on a card: long contexts, what a captured graph reads from the device, and chunks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.paged_attention import paged_attention, read_pages, write_pages
from tests.kernels import oracles
from tests.kernels.oracles import POISON

pytestmark = pytest.mark.gpu

QUERY_HEADS, KV_HEADS, DIM, PAGE = 24, 4, 256, 64
SCALE = DIM**-0.5
CONTEXTS = [0, 1, 63, 64, 65, 4096, 131_072]
BF16_ERROR = 2.0**-7
"""Of a column, in norm: weights, mixture, gate and product are each rounded to 8 bits."""


@dataclass(frozen=True)
class Rows:
    """Sequences of random K and V in pools that hold NaN everywhere else, with room for `width` columns each."""

    keys: torch.Tensor
    values: torch.Tensor
    page_table: torch.Tensor


def rows(contexts: list[int], width: int) -> Rows:
    most = -(-(max(contexts) + width) // PAGE)
    needed = [-(-(context + width) // PAGE) for context in contexts]
    shape = (sum(needed) + 1, PAGE, KV_HEADS, DIM)
    keys, values = torch.full((2, *shape), POISON, dtype=torch.bfloat16, device="cuda")
    free = torch.randperm(sum(needed), device="cuda").split(needed)
    table = torch.full((len(contexts), most), sum(needed), device="cuda")
    for row, pages in enumerate(free):
        table[row, : len(pages)] = pages
    r = Rows(keys, values, table)
    for row, context in enumerate(contexts):
        fill(r, row, context + width)
    return r


def fill(r: Rows, row: int, tokens: int) -> None:
    zero, count = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.tensor([tokens], device="cuda")
    for pool in (r.keys, r.values):
        data = torch.randn(1, tokens, KV_HEADS, DIM, device="cuda")
        write_pages(pool, data, r.page_table[row : row + 1], zero, count)


def check(
    out: torch.Tensor, q: torch.Tensor, gate: torch.Tensor, r: Rows, row: int, context: int, columns: list[int]
) -> None:
    for i in columns:
        k, v = (read_pages(pool, r.page_table[row], context + i + 1) for pool in (r.keys, r.values))
        expected = oracles.attention(q[row, i], k, v, SCALE) * gate[row, i].double().sigmoid()
        error = (out[row, i].double() - expected).norm() / expected.norm()
        assert float(error) < BF16_ERROR, (context, i, float(error))


def random_q(batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q, and gates between the columns of a wider tensor."""
    both = torch.randn(batch, width, QUERY_HEADS, 2 * DIM, device="cuda").bfloat16()
    return both[..., :DIM].contiguous(), both[..., DIM:]


@pytest.mark.parametrize("width", [8, 16])
def test_short_and_long_contexts_share_a_batch(width: int) -> None:
    torch.manual_seed(width)
    live = [width, width, 1, 3, 0, width, width]
    r = rows(CONTEXTS, width)
    q, gate = random_q(len(CONTEXTS), width)
    for row, count in enumerate(live):
        q[row, count:] = POISON
    start, valid = torch.tensor(CONTEXTS, device="cuda"), torch.tensor(live, device="cuda")
    out = paged_attention(q, gate, r.keys, r.values, r.page_table, start, valid, SCALE)
    for row, (context, count) in enumerate(zip(CONTEXTS, live, strict=True)):
        check(out, q, gate, r, row, context, list(range(count)))
        assert bool((out[row, count:] == 0).all())


def test_one_graph_serves_every_context_length_and_every_number_of_columns() -> None:
    torch.manual_seed(1)
    width, long = 8, CONTEXTS[-1]
    r = rows([long, 4096], width)
    q, gate = random_q(2, width)
    start, valid = torch.tensor([1, 1], device="cuda"), torch.tensor([8, 8], device="cuda")
    arguments = (q, gate, r.keys, r.values, r.page_table, start, valid, SCALE)
    paged_attention(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*arguments)
    for contexts, live in (((long, 0), (8, 8)), ((65, 4096), (3, 8)), ((64, 63), (0, 1)), ((1, 4096), (8, 0))):
        start.copy_(torch.tensor(contexts))
        valid.copy_(torch.tensor(live))
        out.fill_(POISON)
        graph.replay()
        for row in range(2):
            check(out, q, gate, r, row, contexts[row], list(range(live[row])))
            assert bool((out[row, live[row] :] == 0).all())


@pytest.mark.parametrize("context", [0, 65, 8192])
def test_a_chunk_sees_its_context_and_itself(context: int) -> None:
    torch.manual_seed(context)
    width, live = 2048, 2000
    r = rows([context], live)
    q, gate = random_q(1, width)
    q[:, live:] = POISON
    start, valid = torch.tensor([context], device="cuda"), torch.tensor([live], device="cuda")
    out = paged_attention(q, gate, r.keys, r.values, r.page_table, start, valid, SCALE)
    check(out, q, gate, r, 0, context, [0, 1, 20, 21, 22, 63, 64, 500, 1023, 1999])
    assert bool((out[0, live:] == 0).all())


def test_rows_of_a_batch_have_the_bits_that_a_graph_of_the_same_batch_gives() -> None:
    torch.manual_seed(3)
    contexts = [4096, 65, 1000, 1]
    r = rows(contexts, 8)
    q, gate = random_q(4, 8)
    start, valid = torch.tensor(contexts, device="cuda"), torch.full((4,), 8, device="cuda")
    arguments = (q, gate, r.keys, r.values, r.page_table, start, valid, SCALE)
    eager = paged_attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*arguments)
    for _ in range(3):
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out, eager)
