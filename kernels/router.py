"""The router of a mixture of experts: which experts a column goes to, and with which weights.

    s = softmax(W_router x) over all experts;  the k largest, exact ties to the lower expert;  renormalised to sum 1
    weight of the shared expert, to which every column goes: sigmoid(w_shared . x)

Rounding points: the router's logits and the product w_shared . x are rounded to x's dtype; softmax, renormalisation and
sigmoid are FP32, and the weights that they give are rounded to x's dtype.

On a card one program a column adds the parts of its logits in a fixed order and chooses, while another one multiplies
with w_shared. They ask the host for nothing.

Source: research of the target's mixture (router, shared expert); decision 9 for ties.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.launch_checks import require, require_contiguous
from kernels.linear import Tiling, streamed_parts, streams
from kernels.ordering import top_rows
from kernels.overlap import let_next_start, overlaps, wait_for_earlier

_CHUNK = 2048
"""Elements of x that a program multiplies with w_shared at a time."""


@dataclass(frozen=True)
class Routing:
    """`experts` int32 [T, k], best first; `weights` [T, k + 1] in x's dtype, the last that of the shared expert."""

    experts: torch.Tensor
    weights: torch.Tensor

    @property
    def top_k(self) -> int:
        return self.experts.shape[1]


def route_reference(x: torch.Tensor, router: torch.Tensor, shared_gate: torch.Tensor, top_k: int) -> Routing:
    scores = F.linear(x, router).float().softmax(-1)
    best, experts = top_rows(scores, top_k)
    shared = F.linear(x, shared_gate).float().sigmoid()
    weights = torch.cat((best / best.sum(-1, keepdim=True), shared), dim=-1)
    return Routing(experts.to(torch.int32), weights.to(x.dtype))


# ------------------------------------------------------------------------------------------------ kernel


@triton.jit
def _products(x_ptr, y_ptr, begin, end, CHUNK: tl.constexpr):
    at = begin + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + at, mask=at < end, other=0.0).to(tl.float32)
    return x * tl.load(y_ptr + at, mask=at < end, other=0.0).to(tl.float32)


@triton.jit
def _choose_kernel(
    logits_ptr,
    x_ptr,
    shared_gate_ptr,
    experts_ptr,
    weights_ptr,
    rows,
    experts,
    width,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (row, 0: its experts, 1: the weight of the shared one). `logits` [PARTS, rows, experts] without gaps.
    PLACES: a power of two that is no less than K."""
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    dtype = x_ptr.dtype.element_ty
    weights_ptr += row * (K + 1)
    if tl.program_id(1) == 1:
        products = _products(x_ptr + row * width, shared_gate_ptr, 0, width, CHUNK)
        for begin in range(CHUNK, width, CHUNK):
            products += _products(x_ptr + row * width, shared_gate_ptr, begin, width, CHUNK)
        shared = tl.sum(products, 0).to(dtype).to(tl.float32)
        tl.store(weights_ptr + K, (1.0 / (1.0 + tl.exp(-shared))).to(dtype))
        return
    expert = tl.arange(0, EXPERTS)
    exists = expert < experts
    logits = tl.zeros((EXPERTS,), tl.float32)
    for part in tl.static_range(PARTS):
        logits += tl.load(logits_ptr + (part * rows + row) * experts + expert, mask=exists, other=0.0).to(tl.float32)
    logits = tl.where(exists, logits.to(dtype).to(tl.float32), -float("inf"))
    scores = tl.exp(logits - tl.max(logits, 0))
    # no score is negative, so that their bits are in their order; those of a NaN come first, whatever its sign
    bits = (scores / tl.sum(scores, 0)).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.where(exists, bits, -1)
    place = tl.arange(0, PLACES)
    chosen, ids = tl.zeros((PLACES,), tl.float32), tl.zeros((PLACES,), tl.int32)
    for rank in tl.static_range(K):
        best = tl.max(bits, 0)
        first = tl.min(tl.where(bits == best, expert, EXPERTS), 0)
        bits = tl.where(expert == first, -1, bits)
        chosen = tl.where(place == rank, best.to(tl.float32, bitcast=True), chosen)
        ids = tl.where(place == rank, first, ids)
    tl.store(experts_ptr + row * K + place, ids, mask=place < K)
    tl.store(weights_ptr + place, (chosen / tl.sum(chosen, 0)).to(dtype), mask=place < K)


def _logits(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """Products over parts of the width, [parts, T, E]: a few columns read the router as fast as it can be read."""
    rows, width = x.shape
    if not streams(rows, x.dtype):
        return F.linear(x, router)[None]
    block = max(16, triton.next_power_of_2(rows))
    return streamed_parts(x, router, Tiling(block, 64, 128, triton.cdiv(width, 256), 2, 4))


def route_triton(x: torch.Tensor, router: torch.Tensor, shared_gate: torch.Tensor, top_k: int) -> Routing:
    rows, width = x.shape
    experts = router.shape[0]
    require_contiguous("x", x, (rows, width), torch.float32, torch.bfloat16)
    require_contiguous("router", router, (experts, width), x.dtype)
    require("shared_gate", shared_gate, (1, width), x.dtype)
    if not 0 < top_k <= experts:
        raise ValueError(f"top_k: {top_k}, must be 1 to {experts}, the number of experts")
    chosen = torch.empty((rows, top_k), dtype=torch.int32, device=x.device)
    weights = torch.empty((rows, top_k + 1), dtype=x.dtype, device=x.device)
    if rows:
        logits, overlapping = _logits(x, router), overlaps(x)
        _choose_kernel[(rows, 2)](
            logits,
            x,
            shared_gate,
            chosen,
            weights,
            rows,
            experts,
            width,
            PARTS=len(logits),
            K=top_k,
            PLACES=triton.next_power_of_2(top_k),
            EXPERTS=triton.next_power_of_2(experts),
            CHUNK=_CHUNK,
            OVERLAPS=overlapping,
            num_warps=1 if experts <= 512 else 4,
            launch_pdl=overlapping,
        )
    return Routing(chosen, weights)


def route(x: torch.Tensor, router: torch.Tensor, shared_gate: torch.Tensor, top_k: int) -> Routing:
    """`x` [T, H], `router` [E, H], `shared_gate` [1, H] of one dtype; 1 <= top_k <= E."""
    run = route_triton if x.is_cuda else route_reference
    return run(x, router, shared_gate, top_k)
