"""Plain RMS norm and rotary of the q and k heads of a fused projection, in one pass.

    q[r, h] = rotary(plain_norm(qkv[r, h], q_norm), cos[r], sin[r])               h in [0, Hq)
    k[r, h] = rotary(plain_norm(qkv[r, Hq + h], k_norm), cos[r], sin[r])          h in [0, Hkv)

The v heads behind them are not read. Rounding points are those of `plain_rms_norm` followed by `apply_rotary`: the
normalised value, the gain's product, cosine and sine, both products of the rotation and their sum are each rounded to
qkv's dtype.

Source: specification ("plain_head_rmsnorm", "rope_1d"), decision 10.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch_checks import require, require_contiguous
from kernels.norms import plain_rms_norm_reference, plainly_normalised
from kernels.overlap import let_next_start, overlaps, wait_for_earlier
from kernels.rotary import apply_rotary, partner_of, turned

HEADS_PER_PROGRAM = 8


def head_norm_rotary_reference(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, _ = qkv.split((qkv.shape[-2] - 2 * kv_heads, kv_heads, kv_heads), dim=-2)
    return (
        apply_rotary(plain_rms_norm_reference(q, q_norm, eps), cos, sin),
        apply_rotary(plain_rms_norm_reference(k, k_norm, eps), cos, sin),
    )


@triton.jit
def _head_norm_rotary_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    eps,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, D)[None, :]
    is_query, live = head < QUERIES, head < QUERIES + KEYS
    # the other dimension of each rotated pair is read again rather than moved between threads
    partner = partner_of(d, HALF)
    heads = qkv_ptr + row * (QUERIES + 2 * KEYS) * D + head * D
    x = tl.load(heads + d, mask=live, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    other = tl.load(heads + partner, mask=live, other=0.0).to(tl.float32)
    mean_square = tl.sum(x * x, 1)[:, None] / D
    weight = tl.where(is_query, tl.load(q_norm_ptr + d), tl.load(k_norm_ptr + d)).to(tl.float32)
    weight_of_other = tl.where(is_query, tl.load(q_norm_ptr + partner), tl.load(k_norm_ptr + partner)).to(tl.float32)
    x = plainly_normalised(x, weight, mean_square, eps, dtype).to(dtype).to(tl.float32)
    other = plainly_normalised(other, weight_of_other, mean_square, eps, dtype).to(dtype).to(tl.float32)
    out = turned(x, other, d, cos_ptr + row * HALF, sin_ptr + row * HALF, HALF, dtype)
    tl.store(q_ptr + (row * QUERIES + head) * D + d, out, mask=is_query)
    tl.store(k_ptr + (row * KEYS + head - QUERIES) * D + d, out, mask=live & (head >= QUERIES))


def head_norm_rotary_triton(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    *lead, heads, head_dim = qkv.shape
    queries, half = heads - 2 * kv_heads, cos.shape[-1]
    if queries < 1:
        raise ValueError(f"qkv: {heads} heads, must be more than the 2 * {kv_heads} of k and v")
    if head_dim & (head_dim - 1):
        raise ValueError(f"qkv: head dimension {head_dim}, must be a power of two")
    if 2 * half > head_dim:
        raise ValueError(f"cos: {half} frequencies, must be at most {head_dim // 2} for head dimension {head_dim}")
    require_contiguous("qkv", qkv, tuple(qkv.shape), torch.float32, torch.bfloat16)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        require(name, norm, (head_dim,), qkv.dtype)
    for name, table in (("cos", cos), ("sin", sin)):
        require_contiguous(name, table, (*lead, half), torch.float32)
    q, k = qkv.new_empty(*lead, queries, head_dim), qkv.new_empty(*lead, kv_heads, head_dim)
    rows = cos.numel() // half
    if rows:
        overlapping = overlaps(qkv)
        _head_norm_rotary_kernel[(rows, triton.cdiv(queries + kv_heads, HEADS_PER_PROGRAM))](
            qkv,
            q_norm,
            k_norm,
            cos,
            sin,
            q,
            k,
            eps,
            QUERIES=queries,
            KEYS=kv_heads,
            D=head_dim,
            HALF=half,
            HEADS=HEADS_PER_PROGRAM,
            OVERLAPS=overlapping,
            num_warps=4,
            launch_pdl=overlapping,
        )
    return q, k


def head_norm_rotary(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`qkv` [..., Hq + 2 Hkv, D] (q, k, v heads in this order), `q_norm`, `k_norm` [D], FP32 `cos`, `sin` [..., R/2] of
    the rows' positions -> q [..., Hq, D], k [..., Hkv, D], contiguous, in qkv's dtype."""
    apply = head_norm_rotary_triton if qkv.is_cuda else head_norm_rotary_reference
    return apply(qkv, q_norm, k_norm, cos, sin, kv_heads, eps)
