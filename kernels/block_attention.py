"""Attention of the drafter's block over its committed context and over itself. Context is read-only.

    local layer   key visible iff |p_key - p_query| < S        context in a ring: position p in slot p mod S
    full layer    every populated context row                  context in pages of 64
    causal flag   additionally p_key <= p_query                (decision 1: a property of the checkpoint, per layer)

Row b has context [0, F) with F = frontier[b], and W block columns at positions F + i, of which valid[b] are live.
Inactive columns are never keys and give exact zeros. A ring of S slots holds one row at distance S from the anchor;
the strict inequality keeps it out.

The kernel splits a row's context evenly over programs, by the frontier on the device; the first of them also takes the
block. Each leaves an unnormalised sum with its largest score, and a second launch adds these up.
Scores and sums are FP32. Softmax weights are at most 1 and are rounded to the dtype of the values that they multiply:
FP16 for cached values (2^-11), BF16 for the block's (2^-9, the output's own step), FP32 for FP32 queries.

Source: specification ("allowed", live intervals, proposal extents).
"""

# A launch takes num_warps and num_stages beside the kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from kernels.block_attention_kernels import combine_parts, partial_attention
from kernels.launch_checks import require, require_contiguous, require_head_dim
from kernels.overlap import overlaps
from kernels.paged_attention import grouped_attention, read_pages
from kernels.ring import read_ring

UNBOUNDED = 2**30
"""Window of a full layer: no two positions are that far apart."""


@dataclass(frozen=True)
class BlockContext:
    """One layer's committed K and V: planes `keys`, `values` [planes, tokens, Hkv, D], and `places` int64 [B, n], the
    planes of each row. Position p lies in plane `places[b, p // tokens mod n]` at p mod tokens: a ring is one plane of
    S tokens. `window`: keys at that distance or beyond are not seen."""

    keys: torch.Tensor
    values: torch.Tensor
    places: torch.Tensor
    window: int


def local_block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ring_keys: torch.Tensor,
    ring_values: torch.Tensor,
    slots: torch.Tensor,
    frontier: torch.Tensor,
    valid: torch.Tensor,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """`q` [B, W, Hq, D]; block `k`, `v` [B, W, Hkv, D]; one layer's rings [slots, S, Hkv, D]; `slots`, `frontier`,
    `valid` int64 [B] -> [B, W, Hq, D]. S is the ring's capacity."""
    context = BlockContext(ring_keys, ring_values, slots[:, None], window=ring_keys.shape[1])
    attention = block_attention_triton if q.is_cuda else block_attention_reference
    return attention(q, k, v, context, frontier, valid, causal, scale)


def full_block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_keys: torch.Tensor,
    page_values: torch.Tensor,
    page_table: torch.Tensor,
    frontier: torch.Tensor,
    valid: torch.Tensor,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """As `local_block_attention`, with one layer's pages [pages, 64, Hkv, D] and `page_table` int64 [B, M]."""
    context = BlockContext(page_keys, page_values, page_table, UNBOUNDED)
    attention = block_attention_triton if q.is_cuda else block_attention_reference
    return attention(q, k, v, context, frontier, valid, causal, scale)


# -------------------------------------------------------------------------------------------------- reference


def block_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: BlockContext,
    frontier: torch.Tensor,
    valid: torch.Tensor,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for row, (end, live) in enumerate(zip(frontier.tolist(), valid.tolist(), strict=True)):
        if live == 0:
            continue
        context_k, context_v = (_populated(plane, context, row, end) for plane in (context.keys, context.values))
        keys = torch.cat((context_k.to(q.dtype), k[row, :live]))
        values = torch.cat((context_v.to(q.dtype), v[row, :live]))
        position = torch.arange(end + live - keys.shape[0], end + live, device=q.device)
        distance = position[None, :] - torch.arange(end, end + live, device=q.device)[:, None]
        visible = distance.abs() < context.window
        if causal:
            visible = visible & (distance <= 0)
        out[row, :live] = grouped_attention(q[row, :live], keys, values, visible, scale)
    return out


def _populated(planes: torch.Tensor, context: BlockContext, row: int, end: int) -> torch.Tensor:
    """What is still held of a row's context [0, end), in logical order: [L, Hkv, D]."""
    if context.window == UNBOUNDED:
        return read_pages(planes, context.places[row], end)
    return read_ring(planes[context.places[row, 0]], end)


# -------------------------------------------------------------------------------------------------- launch


@dataclass(frozen=True)
class Tiling:
    """A launch of the kernel: query rows and keys of a tile, shares of a row's context, warps of a program, stages of
    its loads. `rows`, `keys`: powers of two of at least 16; `keys` divides a page."""

    rows: int
    keys: int
    splits: int
    warps: int
    stages: int

    @classmethod
    def of(cls, batch: int, kv_heads: int, rows: int, head_dim: int, itemsize: int, longest: int) -> Tiling:
        """For `rows` query rows a kv head and at most `longest` context keys of `head_dim` elements.

        A tile holds 16 KB of keys. Two programs fit on a multiprocessor of an H200, and 256 are nearly one for each
        place, as long as a share keeps 64 keys.
        """
        block_rows = min(64, max(16, triton.next_power_of_2(rows)))
        keys = min(64, max(16, 16384 // (head_dim * itemsize)))
        programs = batch * kv_heads * triton.cdiv(rows, block_rows)
        splits = max(1, min(256 // programs, triton.cdiv(longest, 64), 32))
        return cls(block_rows, keys, splits, warps=4 if block_rows * head_dim <= 8192 else 8, stages=3)


def block_attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: BlockContext,
    frontier: torch.Tensor,
    valid: torch.Tensor,
    causal: bool,
    scale: float,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`tiling` follows from the shapes unless it is given. Raises ValueError naming a tensor that does not fit."""
    _check(q, k, v, context, frontier, valid)
    batch, width, query_heads, head_dim = q.shape
    kv_heads, tokens = k.shape[2], context.keys.shape[1]
    group, places = query_heads // kv_heads, context.places.shape[1]
    rows = width * group
    if tiling is None:
        longest = min(places * tokens, context.window)
        tiling = Tiling.of(batch, kv_heads, rows, head_dim, q.element_size(), longest)
    parts = tiling.splits
    best, total = torch.empty((2, batch, kv_heads, rows, parts), dtype=torch.float32, device=q.device)
    mixed = torch.empty((batch, kv_heads, rows, parts, head_dim), dtype=torch.float32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tiles, overlapping = triton.cdiv(rows, tiling.rows), overlaps(q)
    partial_attention[(kv_heads * tiles, parts, batch)](
        q,
        k,
        v,
        context.keys,
        context.values,
        context.places,
        frontier,
        valid,
        best,
        total,
        mixed,
        *(stride for tensor in (q, k, v, context.keys, context.values) for stride in tensor.stride()[:3]),
        places,
        scale * math.log2(math.e),
        WIDTH=width,
        GROUP=group,
        HEAD_DIM=head_dim,
        WINDOW=context.window,
        BOUNDED=context.window < UNBOUNDED,
        PLANE_TOKENS=tokens,
        CAUSAL=causal,
        PARTS=parts,
        TILES=tiles,
        ROWS=tiling.rows,
        KEYS=tiling.keys,
        COLUMNS=max(16, triton.next_power_of_2(width)),
        ONE_PLACE=places == 1,
        STAGES=tiling.stages,
        OVERLAPS=overlapping,
        num_warps=tiling.warps,
        launch_pdl=overlapping,
    )
    combined = min(4, triton.next_power_of_2(rows))
    combine_parts[(triton.cdiv(rows, combined), kv_heads, batch)](
        best,
        total,
        mixed,
        valid,
        out,
        WIDTH=width,
        GROUP=group,
        HEAD_DIM=head_dim,
        PARTS=parts,
        PARTS_PADDED=triton.next_power_of_2(parts),
        ROWS=combined,
        OVERLAPS=overlapping,
        num_warps=2,
        launch_pdl=overlapping,
    )
    return out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: BlockContext,
    frontier: torch.Tensor,
    valid: torch.Tensor,
) -> None:
    batch, width, query_heads, head_dim = q.shape
    planes, tokens, kv_heads, _ = context.keys.shape
    require_head_dim("q", head_dim)
    if query_heads % kv_heads:
        raise ValueError(f"q: {query_heads} heads, must be a multiple of the {kv_heads} key heads")
    require("q", q, (batch, width, query_heads, head_dim), torch.float32, torch.bfloat16)
    require("k", k, (batch, width, kv_heads, head_dim), q.dtype)
    require("v", v, (batch, width, kv_heads, head_dim), q.dtype)
    require("keys", context.keys, (planes, tokens, kv_heads, head_dim))
    require("values", context.values, (planes, tokens, kv_heads, head_dim))
    require_contiguous("places", context.places, (batch, context.places.shape[1]), torch.int64)
    require_contiguous("frontier", frontier, (batch,), torch.int64)
    require_contiguous("valid", valid, (batch,), torch.int64)
