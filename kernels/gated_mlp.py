"""The SwiGLU feed-forward: y = W_down (SiLU(W_gate x) * W_up x), gate and up as one matrix.

Source: specification (draft layers); research of the target's blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """`x` [..., H], `gate_up` [2 I, H] (gate rows first), `down` [H, I] -> [..., H]."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)
