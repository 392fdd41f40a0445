"""Rows of a plane from their places into one buffer, and back: how images and pages of checkpoints move on a device.

    gather     rows[i] = plane[index[i]]
    scatter    plane[index[i]] = rows[i]

A row is everything one place holds: a page over all layers, a slot's state, one position of a ring. Bytes move as they
are. No place may be named twice in a scatter.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch_checks import require_contiguous

TILE_WORDS = 4096
"""Of 4 bytes, that a program moves: enough loads at once for the memory's latency, and programs enough for the card."""


def image_gather_reference(plane: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    torch.index_select(plane, 0, index, out=rows)


def image_scatter_reference(plane: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    plane.index_copy_(0, index, rows)


@triton.jit(do_not_specialize=["count"])
def move_rows(
    plane_ptr, index_ptr, rows_ptr, count, words, GATHER: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr
):
    """Program (tile of rows, tile of a row's words), the words of one row first."""
    tiles = tl.cdiv(words, WORDS)
    row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(0) % tiles * WORDS + tl.arange(0, WORDS)
    place = tl.load(index_ptr + row, mask=row < count, other=0)
    at_plane = plane_ptr + place[:, None] * words + word[None, :]
    at_rows = rows_ptr + row[:, None].to(tl.int64) * words + word[None, :]
    there = (row < count)[:, None] & (word < words)[None, :]
    if GATHER:
        tl.store(at_rows, tl.load(at_plane, mask=there), mask=there)
    else:
        tl.store(at_plane, tl.load(at_rows, mask=there), mask=there)


def _words(x: torch.Tensor) -> torch.Tensor:
    """`x` as words of 4 bytes, or as bytes where its rows or its place have none."""
    start, row = x.storage_offset() * x.element_size(), x.shape[1] * x.element_size()
    return x.view(torch.int32 if start % 4 == 0 and row % 4 == 0 else torch.uint8)


def _move(plane: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, gather: bool) -> None:
    require_contiguous("plane", plane, tuple(plane.shape[:2]))
    require_contiguous("index", index, (len(index),), torch.int64)
    require_contiguous("rows", rows, (len(index), plane.shape[1]), plane.dtype)
    if not rows.numel():
        return
    plane, rows = _words(plane), _words(rows)
    if plane.dtype != rows.dtype:
        plane, rows = plane.view(torch.uint8), rows.view(torch.uint8)
    words = plane.shape[1]
    block = min(TILE_WORDS, triton.next_power_of_2(words))
    each = TILE_WORDS // block
    grid = (triton.cdiv(len(index), each) * triton.cdiv(words, block),)
    move_rows[grid](plane, index, rows, len(index), words, GATHER=gather, ROWS=each, WORDS=block, num_warps=4)


def image_gather_triton(plane: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """Raises ValueError naming a tensor that does not fit."""
    _move(plane, index, rows, gather=True)


def image_scatter_triton(plane: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """Raises ValueError naming a tensor that does not fit."""
    _move(plane, index, rows, gather=False)


def image_gather(plane: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes `rows` [n, R]: row i of it is `plane` [N, R] at `index`[i]. One dtype; `index` int64 [n], each below N."""
    (image_gather_triton if plane.is_cuda else image_gather_reference)(plane, index, rows)


def image_scatter(plane: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes `plane` [N, R] at `index`[i] from row i of `rows` [n, R]. `index` int64 [n], no place twice, each below
    N; all other places stay as they are."""
    (image_scatter_triton if plane.is_cuda else image_scatter_reference)(plane, index, rows)
