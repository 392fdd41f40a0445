"""The target's processed distribution p at a position: what verification accepts against and draws from.

Order (decision 12): the controls of `kernels/penalties.py` first; then, here, temperature; top-k; top-p over the mass
that top-k kept; min-p; renormalise. Ties by lower token id throughout. Logits are FP32 from the head on, over public
rows; -inf is a forbidden token.

    top-k   the k largest logits; 0 keeps all
    top-p   the shortest prefix, in descending order, whose mass reaches top_p of the kept mass; at least one token
    min-p   tokens of at least min_p times the probability of the best one

A greedy row (temperature <= 0) has the point mass of its argmax.
"""

from __future__ import annotations

import torch

from kernels.ordering import top_rows


def processed_distribution(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """`logits` FP32 [R, V]; `temperature`, `top_p`, `min_p` FP32 [R], `top_k` int64 [R] -> p, FP32 [R, V].

    Each row has at least one token that is not forbidden.
    """
    vocabulary = logits.shape[-1]
    greedy = temperature <= 0
    keep = torch.where(top_k <= 0, vocabulary, top_k.clamp(max=vocabulary))
    keep = torch.where(greedy, 1, keep)
    ordered, order = top_rows(logits, int(keep.max()))
    rank = torch.arange(ordered.shape[-1], device=logits.device)
    # the maximum is taken off first: a quotient by a tiny temperature may overflow, to -inf and so to no mass
    scaled = (ordered - ordered[:, :1]) / torch.where(greedy, 1.0, temperature)[:, None]
    mass = scaled.exp().masked_fill(rank >= keep[:, None], 0.0)
    before = mass.cumsum(-1) - mass
    reach = top_p[:, None] * mass.sum(-1, keepdim=True)
    # at top-p 1 nothing is cut, though a running sum in FP32 may reach the whole mass before its end
    beyond = (before >= reach) & (rank > 0) & (top_p < 1)[:, None]
    mass = mass.masked_fill(beyond, 0.0)
    if min_p is not None:
        mass = mass.masked_fill(mass < min_p[:, None], 0.0)  # the best token's mass is 1
    return torch.zeros_like(logits).scatter_(-1, order, mass / mass.sum(-1, keepdim=True))
