"""The two gates of the gated delta rule, of each column and value head: how much of the state is kept, and how much of
the correction is written.

    g    = -exp(A_log) softplus(a + dt_bias)          the state is multiplied by exp(g)
    beta = sigmoid(b)

Both are FP32. They are written where they are to be kept: verification's records hold them exactly as they were used.

Source: specification (records); research of the target's layer.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.launch_checks import require, require_contiguous
from kernels.overlap import let_next_start, overlaps, wait_for_earlier


def gates_reference(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> None:
    g.copy_(-a_log.float().exp() * F.softplus(a.float() + dt_bias.float()))
    beta.copy_(b.float().sigmoid())


@triton.jit
def _gates_kernel(
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    g_ptr,
    beta_ptr,
    a_row,
    b_row,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)
    inside = head < HEADS
    a = tl.load(a_ptr + row * a_row + head, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_row + head, mask=inside, other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + head, mask=inside, other=0.0)
    x = a + tl.load(dt_bias_ptr + head, mask=inside, other=0.0)
    # Kahan's log1p: a decay that is all but 1 would lose its digits, and a long memory its length
    small = tl.exp(-tl.abs(x))
    grown = 1.0 + small
    lost = tl.where(grown == 1.0, 1.0, grown - 1.0)
    log1p = tl.where(grown == 1.0, small, tl.log(grown) * tl.div_rn(small, lost))
    tl.store(g_ptr + row * HEADS + head, -tl.exp(a_log) * (tl.maximum(x, 0.0) + log1p), mask=inside)
    tl.store(beta_ptr + row * HEADS + head, 1.0 / (1.0 + tl.exp(-b)), mask=inside)


def gates_triton(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> None:
    heads = a.shape[-1]
    for name, x in (("a", a), ("b", b)):
        require(name, x, tuple(g.shape), torch.float32, torch.bfloat16)
    for name, x in (("a_log", a_log), ("dt_bias", dt_bias)):
        require_contiguous(name, x, (heads,), torch.float32)
    for name, x in (("g", g), ("beta", beta)):
        require_contiguous(name, x, tuple(a.shape), torch.float32)
    a, b = a.reshape(-1, heads), b.reshape(-1, heads)
    if a.numel():
        block, overlapping = triton.next_power_of_2(heads), overlaps(a)
        _gates_kernel[(a.shape[0],)](
            *(a, b, a_log, dt_bias, g, beta, a.stride(0), b.stride(0)),
            HEADS=heads,
            BLOCK=block,
            OVERLAPS=overlapping,
            num_warps=1,
            launch_pdl=overlapping,
        )


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> None:
    """`a`, `b` [B, T, Hv], `a_log`, `dt_bias` FP32 [Hv]; fills `g` and `beta`, FP32 [B, T, Hv]."""
    run = gates_triton if a.is_cuda else gates_reference
    run(a, b, a_log, dt_bias, g, beta)
