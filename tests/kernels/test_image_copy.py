"""Rows of checkpoints' planes on their way: every byte to its place, and to no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.image_copy import (
    image_gather_reference,
    image_gather_triton,
    image_scatter_reference,
    image_scatter_triton,
)
from tests.kernels.devices import DEVICE

Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
SHAPES = [(7, 5), (40, 64), (6, 4096), (4, 10_000), (3, 1)]
"""Rows shorter than a tile, as long, longer, and of an odd number of bytes."""


def plane(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bytes, so with NaN of all kinds among the numbers."""
    size = rows * width * dtype.itemsize
    random = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    return random.to(DEVICE).view(dtype).view(rows, width)


def places(rows: int) -> torch.Tensor:
    """All but one of them, in no order."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(rows))[:-1].to(DEVICE)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("gather", [image_gather_reference, image_gather_triton])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_gathered_rows_are_the_bytes_of_their_places(gather: Move, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    source, index = plane(*shape, dtype), places(shape[0])
    rows = torch.empty(len(index), shape[1], dtype=dtype, device=DEVICE)
    gather(source, index, rows)
    assert torch.equal(bits(rows), bits(source[index]))


@pytest.mark.parametrize("scatter", [image_scatter_reference, image_scatter_triton])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_scattered_rows_reach_their_places_and_change_no_other(
    scatter: Move, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    target, index = torch.zeros(shape, dtype=dtype, device=DEVICE), places(shape[0])
    rows = plane(len(index), shape[1], dtype)
    scatter(target, index, rows)
    expected = torch.zeros_like(target)
    for place, row in zip(index.tolist(), rows, strict=True):
        expected[place] = row
    assert torch.equal(bits(target), bits(expected))


def test_rows_may_lie_where_no_word_of_four_bytes_begins() -> None:
    source, index = plane(5, 6, torch.bfloat16), places(5)
    buffer = torch.zeros(1 + 4 * 6 + 1, dtype=torch.bfloat16, device=DEVICE)
    image_gather_triton(source, index, buffer[1:-1].view(4, 6))
    assert torch.equal(bits(buffer[1:-1].view(4, 6)), bits(source[index]))
    assert not bool(buffer[0]) and not bool(buffer[-1])


def test_no_rows_move_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    source = plane(3, 4, torch.float32)
    before = bits(source).clone()
    image_scatter_triton(source, none, source[:0])
    assert torch.equal(bits(source), before)


def test_what_does_not_fit_together_is_refused_by_name() -> None:
    source, index = plane(3, 4, torch.float32), torch.tensor([0, 2], device=DEVICE)
    with pytest.raises(ValueError, match=r"rows: shape \(3, 4\), must be \(2, 4\)"):
        image_gather_triton(source, index, torch.empty_like(source))
    with pytest.raises(ValueError, match=r"rows: torch\.bfloat16, must be torch\.float32"):
        image_scatter_triton(source, index, source[:2].bfloat16())
    with pytest.raises(ValueError, match=r"plane: strides \(8, 1\), must be contiguous"):
        image_gather_triton(torch.zeros(3, 8, device=DEVICE)[:, :4], index, source[:2])


@pytest.mark.gpu
def test_on_a_card_a_graph_moves_the_pages_that_the_index_names_when_it_runs() -> None:
    page = 16 * 64 * 4 * 256
    source, target = plane(20, page, torch.bfloat16), torch.zeros(20, page, dtype=torch.bfloat16, device=DEVICE)
    index, rows = torch.arange(4, device=DEVICE), torch.empty(4, page, dtype=torch.bfloat16, device=DEVICE)
    image_gather_triton(source, index, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        image_gather_triton(source, index, rows)
        image_scatter_triton(target, index, rows)
    for places_of_replay in ([3, 19, 0, 7], [8, 1, 2, 18]):
        index.copy_(torch.tensor(places_of_replay))
        target.zero_()
        graph.replay()
        expected = torch.zeros_like(target)
        expected[index] = source[index]
        assert torch.equal(bits(rows), bits(source[index]))
        assert torch.equal(bits(target), bits(expected))
