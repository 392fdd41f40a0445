"""RMS normalisation, in the three forms the model family uses.

    plain   w * x / sqrt(mean(x^2) + eps)          drafter norms, and inside the gated form
    offset  (1 + w) * x / sqrt(mean(x^2) + eps)    target block, final, q and k norms
    gated   plain(x) * SiLU(z)                     output of a gated delta net layer, before its projection

The mean is over the last axis, in FP32. Rounding points: `plain` and the inner norm of `gated` round the normalised
value to x's dtype before the gain is applied; `offset` applies the gain in FP32 and rounds once; `gated` multiplies by
the gate in FP32 and rounds once at the end.

Source: specification ("plain_rmsnorm"), decision 10.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    x32 = x.float()
    return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` [..., D], `weight` [D] -> [..., D] in x's dtype."""
    return weight * _normalise(x, eps).to(x.dtype)


def offset_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` [..., D], `weight` [D], gain 1 + weight -> [..., D] in x's dtype."""
    return (_normalise(x, eps) * (1.0 + weight.float())).to(x.dtype)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x`, `gate` [..., D], `weight` [D] -> [..., D] in x's dtype. Normalisation comes before the gate."""
    normed = plain_rms_norm(x, weight, eps)
    return (normed.float() * F.silu(gate.float())).to(x.dtype)
