"""The SwiGLU feed-forward: y = W_down (SiLU(W_gate x) * W_up x), gate and up as one matrix.

Rounding points: the projections, SiLU's value and its product with `up` are each rounded to x's dtype.

Source: specification (draft layers); research of the target's blocks.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.launch_checks import require_contiguous
from kernels.linear import Linear
from kernels.overlap import let_next_start, overlaps, wait_for_earlier

BLOCK = 1024


def silu_product_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@triton.jit
def _silu_product_kernel(gate_up_ptr, out_ptr, inner, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < inner
    gate = tl.load(gate_up_ptr + 2 * row * inner + i, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + (2 * row + 1) * inner + i, mask=inside, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * inner + i, (activated * up.to(tl.float32)).to(dtype), mask=inside)


def silu_product_triton(gate_up: torch.Tensor) -> torch.Tensor:
    require_contiguous("gate_up", gate_up, tuple(gate_up.shape), torch.float32, torch.bfloat16)
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: last axis {gate_up.shape[-1]}, must be even")
    inner = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], inner)
    if out.numel():
        overlapping = overlaps(gate_up)
        _silu_product_kernel[(out.numel() // inner, triton.cdiv(inner, BLOCK))](
            gate_up, out, inner, BLOCK=BLOCK, OVERLAPS=overlapping, num_warps=4, launch_pdl=overlapping
        )
    return out


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate_up` [..., 2 I], gate first -> SiLU(gate) * up [..., I] in its dtype."""
    return silu_product_triton(gate_up) if gate_up.is_cuda else silu_product_reference(gate_up)


def gated_mlp(x: torch.Tensor, gate_up: Linear, down: Linear) -> torch.Tensor:
    """`x` [..., H], `gate_up` [2 I, H] (gate rows first), `down` [H, I] -> [..., H]."""
    return down(silu_product(gate_up(x)))
