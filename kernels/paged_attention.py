"""Causal grouped-query attention of the target over paged K/V, and the page write that goes before it.

    row b, column i (i < valid[b]) sits at position F = start[b] + i and sees rows [0, F]
    out[b, i, h] = sum_t softmax_t(q[b, i, h] . K[t, h / G] * scale) V[t, h / G]
    inactive columns (i >= valid[b]) are exact zeros and write nothing

Pages hold 64 tokens: position t of row b lies in page `page_table[b, t // 64]`, at row `t % 64`. A page at or beyond
the last visible row is never read. Softmax is in FP32 for FP32 inputs and in the library's accumulation type below.

Source: specification (target attention, extents); decision 10 for the gate, which the caller applies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def write_pages(
    pool: torch.Tensor, rows: torch.Tensor, page_table: torch.Tensor, start: torch.Tensor, valid: torch.Tensor
) -> None:
    """Writes `rows` [B, T, Hkv, D] into one layer of a pool, `pool` [pages, 64, Hkv, D], at positions start + i.

    `page_table` int64 [B, M], `start`, `valid` int64 [B]. Rounds to the pool's dtype. In place.
    """
    page_tokens = pool.shape[1]
    column = torch.arange(rows.shape[1], device=rows.device)
    batch, column = (column < valid[:, None]).nonzero(as_tuple=True)
    position = start[batch] + column
    pool[page_table[batch, position // page_tokens], position % page_tokens] = rows[batch, column].to(pool.dtype)


def read_pages(pool: torch.Tensor, page_table: torch.Tensor, tokens: int) -> torch.Tensor:
    """The first `tokens` rows of one sequence: `pool` [pages, 64, Hkv, D], `page_table` [M] -> [tokens, Hkv, D]."""
    page_tokens = pool.shape[1]
    pages = page_table[: -(-tokens // page_tokens)]
    return pool[pages].flatten(0, 1)[:tokens]


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    start: torch.Tensor,
    valid: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`q` [B, T, Hq, D]; one layer's `keys`, `values` [pages, 64, Hkv, D]; `page_table` int64 [B, M]; `start`, `valid`
    int64 [B] -> [B, T, Hq, D] in q's dtype. The rows of the columns themselves are in the pages already."""
    out = torch.zeros_like(q)
    for row, (first, live) in enumerate(zip(start.tolist(), valid.tolist(), strict=True)):
        if live == 0:
            continue
        total = first + live
        k = read_pages(keys, page_table[row], total).to(q.dtype)
        v = read_pages(values, page_table[row], total).to(q.dtype)
        position = torch.arange(total, device=q.device)
        visible = position[None, :] <= position[first:, None]
        out[row, :live] = grouped_attention(q[row, :live], k, v, visible, scale)
    return out


def grouped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention of one row: `q` [T, Hq, D], `k`, `v` [L, Hkv, D], bool `visible` [T, L] -> [T, Hq, D]."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=visible,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)
