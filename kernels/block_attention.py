"""Attention of the drafter's block over its committed context and over itself. Context is read-only.

    local layer   key visible iff |p_key - p_query| < S        context in a ring: position p in slot p mod S
    full layer    every populated context row                  context in pages of 64
    causal flag   additionally p_key <= p_query                (decision 1: a property of the checkpoint, per layer)

Row b has context [0, F) with F = frontier[b], and W block columns at positions F + i, of which valid[b] are live.
Inactive columns are never keys and give exact zeros. A ring of S slots holds one row at distance S from the anchor;
the strict inequality keeps it out.

Source: specification ("allowed", live intervals, proposal extents).
"""

from __future__ import annotations

import torch

from kernels.paged_attention import grouped_attention, read_pages
from kernels.ring import read_ring


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
    window = ring_keys.shape[1]
    out = torch.zeros_like(q)
    for row, (slot, end, live) in enumerate(_rows(slots, frontier, valid)):
        if live == 0:
            continue
        context_k, context_v = read_ring(ring_keys[slot], end), read_ring(ring_values[slot], end)
        first = end - context_k.shape[0]
        keys = torch.arange(first, end + live, device=q.device)
        distance = keys[None, :] - torch.arange(end, end + live, device=q.device)[:, None]
        visible = distance.abs() < window
        out[row, :live] = _attend(q[row], k[row], v[row], context_k, context_v, visible, distance, live, causal, scale)
    return out


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
    out = torch.zeros_like(q)
    for row, (_, end, live) in enumerate(_rows(frontier, frontier, valid)):
        if live == 0:
            continue
        context_k = read_pages(page_keys, page_table[row], end)
        context_v = read_pages(page_values, page_table[row], end)
        keys = torch.arange(end + live, device=q.device)
        distance = keys[None, :] - torch.arange(end, end + live, device=q.device)[:, None]
        visible = torch.ones_like(distance, dtype=torch.bool)
        out[row, :live] = _attend(q[row], k[row], v[row], context_k, context_v, visible, distance, live, causal, scale)
    return out


def _rows(slots: torch.Tensor, frontier: torch.Tensor, valid: torch.Tensor) -> zip[tuple[int, int, int]]:
    return zip(slots.tolist(), frontier.tolist(), valid.tolist(), strict=True)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    visible: torch.Tensor,
    distance: torch.Tensor,
    live: int,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """One row: `q`, `k`, `v` [W, heads, D], context [L, Hkv, D], `visible`, `distance` [live, L + live]."""
    if causal:
        visible = visible & (distance <= 0)
    keys = torch.cat((context_k.to(q.dtype), k[:live]))
    values = torch.cat((context_v.to(q.dtype), v[:live]))
    return grouped_attention(q[:live], keys, values, visible, scale)
