"""DFlash2's dynamic grouped convolution around a branch: two sides, two taps, groups of `group` channels.

    delta = reshape(W_delta X, [B, W, sides, taps, H / group])
    Conv_s(X)[b, i, h] = (base[s, 0, h] + delta[b, i, s, 0, h / group]) X[b, i, h]
                       + 1{i >= 1} (base[s, 1, h] + delta[b, i, s, 1, h / group]) X[b, i - 1, h]

Side 0 prepares a branch's normalised input; side 1 finishes its output with the delta of that same input. There is no
history across rounds, and column 0 has no preceding tap. `prepare` rounds its two outputs to x's dtype; coefficients
are summed and applied in FP32, with one rounding at the end.

Source: specification (DFlash2 convolution).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

SIDES = 2


def _convolve(x: torch.Tensor, base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """`x` [B, W, H], `base` [taps, H], `delta` [B, W, taps, H / group] -> FP32 [B, W, H]."""
    x32 = x.float()
    coefficients = base.float() + delta.float().repeat_interleave(x.shape[-1] // delta.shape[-1], dim=-1)
    out = coefficients[:, :, 0] * x32
    for tap in range(1, base.shape[0]):
        out[:, tap:] += coefficients[:, tap:, tap] * x32[:, :-tap]
    return out


def prepare(x: torch.Tensor, base: torch.Tensor, projection: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [B, W, H] normalised branch input, `base` [2, taps, H], `projection` [2 taps H / group, H] -> the prepared
    input [B, W, H] and the finish delta [B, W, taps, H / group], both in x's dtype."""
    taps = base.shape[1]
    delta = F.linear(x, projection).unflatten(-1, (SIDES, taps, -1))
    return _convolve(x, base[0], delta[:, :, 0]).to(x.dtype), delta[:, :, 1]


def finish(z: torch.Tensor, base: torch.Tensor, finish_delta: torch.Tensor) -> torch.Tensor:
    """`z` [B, W, H] branch output, `base` [2, taps, H], `finish_delta` [B, W, taps, H / group] -> [B, W, H] in z's
    dtype, to be added to the residual."""
    return _convolve(z, base[1], finish_delta).to(z.dtype)
