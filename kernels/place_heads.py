"""From the target's attention projection to what attention reads: q out, K and V into their pages, in one launch.

    projected[b, i] = (q_0 | gate_0 | q_1 | gate_1 | ...), (k_0 | k_1 | ...), (v_0 | v_1 | ...)      per head D values
    q[b, i, h]      = rotary(offset_norm(q_h, q_norm), cos[b, i], sin[b, i])
    page of start[b] + i, for i < valid[b]:   K = rotary(offset_norm(k_h, k_norm), cos[b, i], sin[b, i]),  V = v_h

Gates are not read. Columns at or beyond valid[b] write nothing; their q is what it comes to. Rounding points are those
of `offset_rms_norm` followed by `apply_rotary`: the gain's product, cosine and sine, both products of the rotation and
their sum are each rounded to the projection's dtype, and pages round to their own.

Source: research of transformers' Qwen3.5 (layout, partial rotary), decision 10.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch_checks import require, require_contiguous
from kernels.norms import offset_normalised, offset_rms_norm
from kernels.overlap import let_next_start, overlaps, wait_for_earlier
from kernels.paged_attention import require_pages, write_pages
from kernels.rotary import apply_rotary, partner_of, turned

HEADS_PER_PROGRAM = 8


def queries_and_gates(projected: torch.Tensor, query_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of q and gate, [..., Hq, D] each, of `projected` [..., 2 Hq D + 2 Hkv D]."""
    heads = projected[..., : 2 * query_heads * head_dim].unflatten(-1, (query_heads, 2 * head_dim))
    return heads[..., :head_dim], heads[..., head_dim:]


def place_heads_reference(
    projected: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    start: torch.Tensor,
    valid: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    kv_heads, head_dim = keys.shape[2:]
    query_heads = _query_heads(projected, kv_heads, head_dim)
    q, _ = queries_and_gates(projected, query_heads, head_dim)
    k, v = projected[..., 2 * query_heads * head_dim :].unflatten(-1, (2 * kv_heads, head_dim)).chunk(2, dim=-2)
    write_pages(keys, apply_rotary(offset_rms_norm(k, k_norm, eps), cos, sin), page_table, start, valid)
    write_pages(values, v, page_table, start, valid)
    return apply_rotary(offset_rms_norm(q, q_norm, eps), cos, sin)


def _query_heads(projected: torch.Tensor, kv_heads: int, head_dim: int) -> int:
    width = projected.shape[-1]
    heads, left = divmod(width - 2 * kv_heads * head_dim, 2 * head_dim)
    if heads < 1 or left:
        raise ValueError(
            f"projected: {width} values a column, must be 2 * {head_dim} for each query head"
            f" and for each of {kv_heads} kv heads"
        )
    return heads


@triton.jit
def _place_heads_kernel(
    projected_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    table_ptr,
    start_ptr,
    valid_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    table_width,
    page_stride,
    width,
    eps,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (column of a row, tile of heads): queries first, then keys, then values."""
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    lane, column = token // width, token % width
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, D)[None, :]
    is_query, is_key = head < QUERIES, (head >= QUERIES) & (head < QUERIES + KEYS)
    is_value = (head >= QUERIES + KEYS) & (head < QUERIES + 2 * KEYS)
    # a gate lies behind each query head
    at = projected_ptr + token * (2 * (QUERIES + KEYS) * D) + tl.where(is_query, 2 * head, QUERIES + head) * D
    x = tl.load(at + d, mask=is_query | is_key | is_value, other=0.0)
    dtype = x.dtype

    normed = is_query | is_key
    partner = partner_of(d, HALF)
    x32 = x.to(tl.float32)
    # the other dimension of each rotated pair is read again rather than moved between threads
    other = tl.load(at + partner, mask=normed, other=0.0).to(tl.float32)
    mean_square = tl.sum(x32 * x32, 1)[:, None] / D
    weight = tl.where(is_query, tl.load(q_norm_ptr + d), tl.load(k_norm_ptr + d)).to(tl.float32)
    weight_of_other = tl.where(is_query, tl.load(q_norm_ptr + partner), tl.load(k_norm_ptr + partner)).to(tl.float32)
    normal = offset_normalised(x32, weight, mean_square, eps).to(dtype).to(tl.float32)
    normal_other = offset_normalised(other, weight_of_other, mean_square, eps).to(dtype).to(tl.float32)
    out = turned(normal, normal_other, d, cos_ptr + token * HALF, sin_ptr + token * HALF, HALF, dtype)
    tl.store(q_ptr + (token * QUERIES + head) * D + d, out, mask=is_query)

    live = column < tl.load(valid_ptr + lane)
    position = tl.load(start_ptr + lane) + column
    page = tl.load(table_ptr + lane * table_width + position // PAGE_TOKENS, mask=live, other=0)
    at_page = page * page_stride + position % PAGE_TOKENS * (KEYS * D)
    at_key = keys_ptr + at_page + (head - QUERIES) * D + d
    at_value = values_ptr + at_page + (head - QUERIES - KEYS) * D + d
    tl.store(at_key, out.to(keys_ptr.dtype.element_ty), mask=live & is_key)
    tl.store(at_value, x.to(values_ptr.dtype.element_ty), mask=live & is_value)


def place_heads_triton(
    projected: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    start: torch.Tensor,
    valid: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Raises ValueError naming a tensor that does not fit."""
    batch, width, _ = projected.shape
    page_tokens, kv_heads, head_dim = keys.shape[1:]
    query_heads, half = _query_heads(projected, kv_heads, head_dim), cos.shape[-1]
    if head_dim & (head_dim - 1):
        raise ValueError(f"keys: head dimension {head_dim}, must be a power of two")
    if 2 * half > head_dim:
        raise ValueError(f"cos: {half} frequencies, must be at most {head_dim // 2} for head dimension {head_dim}")
    require_contiguous("projected", projected, tuple(projected.shape), torch.float32, torch.bfloat16)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        require(name, norm, (head_dim,), projected.dtype)
    for name, table in (("cos", cos), ("sin", sin)):
        require_contiguous(name, table, (batch, width, half), torch.float32)
    require_pages(keys, values)
    require_contiguous("page_table", page_table, (batch, page_table.shape[1]), torch.int64)
    for name, extent in (("start", start), ("valid", valid)):
        require_contiguous(name, extent, (batch,), torch.int64)
    q = projected.new_empty(batch, width, query_heads, head_dim)
    if batch * width:
        overlapping = overlaps(projected)
        _place_heads_kernel[(batch * width, triton.cdiv(query_heads + 2 * kv_heads, HEADS_PER_PROGRAM))](
            projected,
            q_norm,
            k_norm,
            cos,
            sin,
            page_table,
            start,
            valid,
            q,
            keys,
            values,
            page_table.shape[1],
            keys.stride(0),
            width,
            eps,
            QUERIES=query_heads,
            KEYS=kv_heads,
            D=head_dim,
            HALF=half,
            PAGE_TOKENS=page_tokens,
            HEADS=HEADS_PER_PROGRAM,
            OVERLAPS=overlapping,
            num_warps=4,
            launch_pdl=overlapping,
        )
    return q


def place_heads(
    projected: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    start: torch.Tensor,
    valid: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`projected` [B, T, 2 Hq D + 2 Hkv D]; `q_norm`, `k_norm` [D]; FP32 `cos`, `sin` [B, T, R/2] of the columns'
    positions; one layer's `keys`, `values` [pages, 64, Hkv, D], written in place; `page_table` int64 [B, M]; `start`,
    `valid` int64 [B] -> q [B, T, Hq, D] in the projection's dtype."""
    place = place_heads_triton if projected.is_cuda else place_heads_reference
    return place(projected, q_norm, k_norm, cos, sin, keys, values, page_table, start, valid, eps)
