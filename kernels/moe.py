"""Mixture-of-experts feed-forward: top-k routed experts and one shared expert.

    s = softmax(W_router x) over all experts, FP32;  the k largest, ties to the lower expert;  renormalised to sum 1
    y = sum_e s_e W_down[e] (SiLU(W_gate[e] x) * W_up[e] x)
      + sigmoid(w_shared . x) W_down (SiLU(W_gate x) * W_up x)

Router logits are in x's dtype, the softmax and the renormalisation in FP32; routing weights and the sigmoid are rounded
to x's dtype before they are applied.

Source: research of the target's mixture (router, shared expert); decision 9 for ties.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.gated_mlp import gated_mlp
from kernels.linear import Linear
from kernels.ordering import top_rows


def route(x: torch.Tensor, router: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [T, H], `router` [E, H] -> (weights [T, k] in x's dtype, experts int64 [T, k]), best first."""
    scores = F.linear(x, router).float().softmax(-1)
    best, experts = top_rows(scores, top_k)
    return (best / best.sum(-1, keepdim=True)).to(x.dtype), experts


def routed_experts(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """`x` [T, H], `weights`, `experts` [T, k], `gate_up` [E, 2 I, H], `down` [E, H, I] -> [T, H]."""
    out = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        tokens, choice = (experts == expert).nonzero(as_tuple=True)
        part = gated_mlp(x[tokens], Linear(gate_up[expert]), Linear(down[expert]))
        out.index_add_(0, tokens, part * weights[tokens, choice, None])
    return out
