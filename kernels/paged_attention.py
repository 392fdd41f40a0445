"""Causal grouped-query attention of the target over paged K/V, with its output gate; and what pages hold.

    row b, column i (i < valid[b]) sits at position F = start[b] + i and sees rows [0, F]
    out[b, i, h] = sigmoid(gate[b, i, h]) * sum_t softmax_t(q[b, i, h] . K[t, h / G] * scale) V[t, h / G]
    inactive columns (i >= valid[b]) are exact zeros

Pages hold 64 tokens: position t of row b lies in page `page_table[b, t // 64]`, at row `t % 64`. A page at or beyond
the last visible row is never read. K and V of the columns themselves are in the pages already. One kernel runs verify
blocks of a few columns and prefill chunks of thousands.

Scores and sums are FP32. Softmax weights are rounded to q's dtype before they multiply values; the attention output,
the gate's sigmoid and their product are each rounded to it.

Source: specification (target attention, extents); decision 10 for the gate.
"""

# A launch takes num_warps and num_stages beside the kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton

from kernels.launch_checks import require, require_contiguous, require_head_dim
from kernels.overlap import overlaps
from kernels.paged_attention_gate import combine_gated_parts, gate_rows
from kernels.paged_attention_kernels import attend_parts, attend_rows

# -------------------------------------------------------------------------------------------------- pages


def write_pages(
    pool: torch.Tensor, rows: torch.Tensor, page_table: torch.Tensor, start: torch.Tensor, valid: torch.Tensor
) -> None:
    """Writes `rows` [B, T, Hkv, D] into one layer of a pool, `pool` [pages, 64, Hkv, D], at positions start + i.

    `page_table` int64 [B, M], `start`, `valid` int64 [B]. Rounds to the pool's dtype. In place. The reference of a
    write: on a card `place_heads` and `store_context_kv` write what attention reads.
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


def require_pages(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raises ValueError unless both are one layer of a pool, [pages, tokens, Hkv, D], without gaps in a page and with
    the same steps from page to page."""
    for name, pool in (("keys", keys), ("values", values)):
        require(name, pool, tuple(keys.shape), torch.float32, torch.bfloat16)
        steps = (keys.stride(0), keys.shape[2] * keys.shape[3], keys.shape[3], 1)
        if pool.stride() != steps:
            raise ValueError(f"{name}: strides {pool.stride()}, must be {steps}")


# -------------------------------------------------------------------------------------------------- reference


def paged_attention_reference(
    q: torch.Tensor,
    gate: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    start: torch.Tensor,
    valid: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    out = torch.zeros_like(q)
    for row, (first, live) in enumerate(zip(start.tolist(), valid.tolist(), strict=True)):
        if live == 0:
            continue
        total = first + live
        k = read_pages(keys, page_table[row], total).to(q.dtype)
        v = read_pages(values, page_table[row], total).to(q.dtype)
        position = torch.arange(total, device=q.device)
        visible = position[None, :] <= position[first:, None]
        out[row, :live] = grouped_attention(q[row, :live], k, v, visible, scale) * gate[row, :live].sigmoid()
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


# -------------------------------------------------------------------------------------------------- launch

MULTIPROCESSORS = 132
"""Of an H200: what a launch is cut for."""
SHARING = 1.25
"""How much longer a program's share takes where contexts of 64k are shared, with the kernel that sums the parts: 384 to
1,024 columns of 27B over two to five slots. Over contexts of a few pages it is more, and little beside the products."""


@dataclass(frozen=True)
class Tiling:
    """A launch of the kernels: query rows and keys of a tile, programs that share all contexts for one tile of query
    rows, warps of a program, stages of its loads; query rows whose parts one program sums. `rows`, `keys`, `summed`:
    powers of two, the first two of at least 16; `keys` divides a page. One slot: no contexts are shared."""

    rows: int
    keys: int
    slots: int
    warps: int
    stages: int
    summed: int

    @classmethod
    def of(cls, batch: int, kv_heads: int, rows: int, head_dim: int, itemsize: int, longest: int) -> Tiling:
        """For `batch` rows of `rows` query rows a kv head, and at most `longest` tokens in all contexts together.

        A matrix instruction takes 64 rows, or 16 at half the speed; 128 halve what is read. Keys wait in as many stages
        as shared memory has room for. The programs at one time are as many as it and registers take.
        """
        large = head_dim > 128 or itemsize == 4
        block_rows = 16 if rows <= 16 or itemsize == 4 else 64 if rows <= 64 else 128
        keys, stages = (32, 1) if itemsize == 4 else (32, 3) if block_rows == 128 else (64, 3)
        at_once = MULTIPROCESSORS if large else 2 * MULTIPROCESSORS
        slots = cls._slots(kv_heads * triton.cdiv(rows, block_rows), at_once)
        slots = max(1, min(slots, triton.cdiv(longest, keys)))
        if slots == 1 and block_rows == 128:
            keys, stages = 64, 2
        summed = min(8, triton.next_power_of_2(max(1, batch * kv_heads * rows // (4 * MULTIPROCESSORS))))
        return cls(block_rows, keys, slots, 8 if large or block_rows == 128 else 4, stages, summed)

    @staticmethod
    def _slots(tiles: int, at_once: int) -> int:
        """For so many tiles of query rows, where `at_once` programs run together: as many as do, unless some more leave
        fewer multiprocessors without a program at the end. 384 columns of 27B have 72 tiles: five slots each make three
        waves of a fifth, 0.6 of the time of one wave that fills half of the card. With more tiles there is less to win,
        and more memory to write."""
        few = max(1, at_once // tiles)
        if tiles > 2 * at_once:
            return few

        def waves(slots: int) -> float:
            return triton.cdiv(tiles * slots, at_once) / slots * (SHARING if slots > 1 else 1)

        return min(range(few, few + 5), key=waves)


def paged_attention_triton(
    q: torch.Tensor,
    gate: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    start: torch.Tensor,
    valid: torch.Tensor,
    scale: float,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`tiling` follows from the shapes unless it is given. Raises ValueError naming a tensor that does not fit."""
    _check(q, gate, keys, values, page_table, start, valid)
    batch, width, query_heads, head_dim = q.shape
    page_tokens, kv_heads = keys.shape[1:3]
    group, table_width = query_heads // kv_heads, page_table.shape[1]
    rows = width * group
    if tiling is None:
        tiling = Tiling.of(batch, kv_heads, rows, head_dim, q.element_size(), batch * table_width * page_tokens)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.numel():
        return out
    sizes = {"KV_HEADS": kv_heads, "GROUP": group, "HEAD_DIM": head_dim}
    tile = {"PAGE_TOKENS": page_tokens, "ROWS": tiling.rows, "KEYS": tiling.keys, "STAGES": tiling.stages}
    steps = keys.stride(0), table_width
    row_tiles = kv_heads * triton.cdiv(rows, tiling.rows)
    base2 = scale * math.log2(math.e)
    if tiling.slots == 1:
        attend_rows[(row_tiles, batch)](
            *(q, keys, values, page_table, start, valid, out, *steps, width, base2),
            **sizes,
            **tile,
            num_warps=tiling.warps,
        )
        gated = triton.next_power_of_2(4096 // head_dim)
        gate_rows[(triton.cdiv(width * query_heads, gated), batch)](
            *(gate, valid, out, *gate.stride()[:3], width),
            HEADS=query_heads,
            HEAD_DIM=head_dim,
            ROWS=gated,
            num_warps=4,
        )
        return out
    lanes, parts = triton.next_power_of_2(batch), tiling.slots + batch - 1
    kept = (kv_heads, parts, rows)
    overlapping, at_once = overlaps(q), 32 // tiling.summed
    best, total = torch.empty((2, *kept), dtype=torch.float32, device=q.device)
    mixed = torch.empty((*kept, head_dim), dtype=torch.float32, device=q.device)
    attend_parts[(row_tiles, parts)](
        *(q, keys, values, page_table, start, valid, best, total, mixed, *steps, batch, width, tiling.slots, base2),
        **sizes,
        **tile,
        LANES=lanes,
        OVERLAPS=overlapping,
        num_warps=tiling.warps,
        launch_pdl=overlapping,
    )
    combine_gated_parts[(triton.cdiv(rows, tiling.summed), kv_heads, batch)](
        *(gate, start, valid, best, total, mixed, out, *gate.stride()[:3], batch, width, tiling.slots, parts),
        **sizes,
        LANES=lanes,
        KEYS=tiling.keys,
        ROWS=tiling.summed,
        STEP=min(triton.next_power_of_2(max(tiling.slots // batch, 1)), 64 if tiling.summed == 1 else at_once),
        OVERLAPS=overlapping,
        num_warps=4,
        launch_pdl=overlapping,
    )
    return out


def _check(
    q: torch.Tensor,
    gate: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    start: torch.Tensor,
    valid: torch.Tensor,
) -> None:
    batch, _, query_heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    require_head_dim("q", head_dim)
    if query_heads % kv_heads:
        raise ValueError(f"q: {query_heads} heads, must be a multiple of the {kv_heads} key heads")
    require_contiguous("q", q, tuple(q.shape), torch.float32, torch.bfloat16)
    require("gate", gate, tuple(q.shape), q.dtype)
    require_pages(keys, values)
    require_contiguous("page_table", page_table, (batch, page_table.shape[1]), torch.int64)
    for name, extent in (("start", start), ("valid", valid)):
        require_contiguous(name, extent, (batch,), torch.int64)


# -------------------------------------------------------------------------------------------------- public


def paged_attention(
    q: torch.Tensor,
    gate: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    start: torch.Tensor,
    valid: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`q`, `gate` [B, T, Hq, D]; one layer's `keys`, `values` [pages, 64, Hkv, D]; `page_table` int64 [B, M]; `start`,
    `valid` int64 [B] -> [B, T, Hq, D] in q's dtype."""
    attend = paged_attention_triton if q.is_cuda else paged_attention_reference
    return attend(q, gate, keys, values, page_table, start, valid, scale)
