"""The target's processed distribution p at a position: what verification accepts against and draws from.

Order (decision 12): the controls of `kernels/penalties.py` first; then, here, temperature; top-k; top-p over the mass
that top-k kept; min-p; renormalise. Ties by lower token id throughout. Logits are FP32 from the head on, over public
rows; -inf is a forbidden token.

    weight  w_v = 2^((z_v - max z) log2(e) / T)              0 below 2^-120; the best token's weight is 1
    top-k   the k largest logits; 0 keeps all
    top-p   the shortest prefix, in descending order, whose mass reaches top_p of the kept mass; at least one token
    min-p   tokens of at least min_p times the weight of the best one
    p_v     w_v / Z                                          Z: the mass of what is left

A mass is a sum of whole numbers, each weight counted in units of 2^-40 and rounded down, and what top-p must reach is
rounded down too: sums do not depend on their order, so that every device, and any split of a row, keeps the same
tokens. Weights are computed by the same additions and multiplications everywhere, none of them fused, for the same
reason: a library's exponential differs from one device to another in its last bits, and so at a boundary in a token.

A greedy row (temperature <= 0) has the point mass of its argmax.

Source: decision 12.
"""

# Triton's `where` and `minimum` have no types of their own.
# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ordering import top_rows

LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.4028234663852886e38)
LEAST_EXPONENT = tl.constexpr(-120.0)
MASS_UNITS = tl.constexpr(1099511627776.0)
"""Units of mass in a weight of 1."""
MAX_TOKENS = 1 << 22
"""A row's whole mass must fit 63 bits."""

# (2^f - 1) / f on [-1/2, 1/2] by powers of f, least squares at Chebyshev nodes: 2^f to 1e-7.
_C1, _C2, _C3 = tl.constexpr(0.6931471824645996), tl.constexpr(0.24022650718688965), tl.constexpr(0.055503569543361664)
_C4, _C5 = tl.constexpr(0.009618056938052177), tl.constexpr(0.0013390866806730628)
_C6 = tl.constexpr(0.00015461447765119374)
_POWERS = tuple(c.value for c in (_C6, _C5, _C4, _C3, _C2, _C1))
_NEAREST = tl.constexpr(12582912.0)
"""1.5 2^23: FP32 has no fractions up there, so adding it and taking it off rounds to the nearest whole number."""


def steepness(temperature: torch.Tensor) -> torch.Tensor:
    """log2(e) / T, FP32 [...], of positive temperatures; of those whose quotient overflows the largest number."""
    return (torch.full_like(temperature, LOG2_E.value) / temperature).clamp(max=LARGEST.value)


def weights_of(logits: torch.Tensor, best: torch.Tensor, steep: torch.Tensor) -> torch.Tensor:
    """`logits` FP32 [R, V], `best` FP32 [R], the largest of each row, `steep` FP32 [R] -> w, FP32 [R, V]."""
    exponent = ((logits - best[:, None]) * steep[:, None]).clamp(min=-150.0)
    whole = (exponent + _NEAREST.value) - _NEAREST.value
    rest = exponent - whole
    power = torch.full_like(rest, _POWERS[0])
    for coefficient in _POWERS[1:]:
        power = power * rest + coefficient
    power = power * rest + 1.0
    bits = power.view(torch.int32) + (whole.to(torch.int32) << 23)
    return torch.where(whole < LEAST_EXPONENT.value, 0.0, bits.view(torch.float32))


def processed_distribution(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """`logits` FP32 [R, V], V <= 2^22; `temperature`, `top_p`, `min_p` FP32 [R], `top_k` int64 [R] -> p, FP32 [R, V].

    Each row has at least one token that is not forbidden.
    """
    vocabulary = logits.shape[-1]
    greedy = temperature <= 0
    keep = torch.where(top_k <= 0, vocabulary, top_k.clamp(max=vocabulary))
    keep = torch.where(greedy, 1, keep)
    if bool((keep == vocabulary).all()) and bool((top_p >= 1).all()):
        return _of_whole_rows(logits, temperature, min_p)
    ordered, order = top_rows(logits, int(keep.max()))
    rank = torch.arange(ordered.shape[-1], device=logits.device)
    weight = weights_of(ordered, ordered[:, 0], steepness(torch.where(greedy, 1.0, temperature)))
    weight = weight.masked_fill(rank >= keep[:, None], 0.0)
    mass = (weight * MASS_UNITS.value).to(torch.int64)
    before = mass.cumsum(-1) - mass
    reach = (top_p.double() * mass.sum(-1).double()).to(torch.int64)[:, None]
    beyond = (before >= reach) & (rank > 0) & (top_p < 1)[:, None]
    if min_p is not None:
        beyond |= weight < min_p[:, None]
    return torch.zeros_like(logits).scatter_(-1, order, _shares(weight.masked_fill(beyond, 0.0)))


def _of_whole_rows(logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor | None) -> torch.Tensor:
    """Where neither top-k nor top-p cuts, no token's rank matters: nothing is sorted."""
    weight = weights_of(logits, logits.amax(-1), steepness(temperature))
    return _shares(weight if min_p is None else weight.masked_fill(weight < min_p[:, None], 0.0))


def _shares(weight: torch.Tensor) -> torch.Tensor:
    """`weight` FP32 [R, n] of what is kept -> p, FP32 [R, n]."""
    total = (weight * MASS_UNITS.value).to(torch.int64).sum(-1).float() * (1 / MASS_UNITS.value)
    return weight / total[:, None]


# ------------------------------------------------------------------------------------------------ inside kernels
# To be launched with `enable_fp_fusion=False`: a fused multiplication rounds once where the reference rounds twice.


@triton.jit
def steepness_of(temperature):
    return tl.minimum(tl.div_rn(LOG2_E, temperature), LARGEST)


@triton.jit
def weight_of(logit, best, steep):
    """`weights_of` for FP32 tensors or scalars."""
    exponent = tl.maximum((logit - best) * steep, -150.0)
    whole = (exponent + _NEAREST) - _NEAREST
    rest = exponent - whole
    power = rest * _C6 + _C5
    power = power * rest + _C4
    power = power * rest + _C3
    power = power * rest + _C2
    power = power * rest + _C1
    power = power * rest + 1.0
    bits = power.to(tl.int32, bitcast=True) + (whole.to(tl.int32) << 23)
    return tl.where(whole < LEAST_EXPONENT, 0.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def mass_of(weight):
    """A weight in whole units, int64."""
    return (weight * MASS_UNITS).to(tl.int64)
