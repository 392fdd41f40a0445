"""DFlash2's conditional path: a left-to-right walk over the shortlist of each mask column.

    E_i[c]  = u_i[c] + sum_r W_pred[previous, r] g_i[r] W_succ[C_i[c], r]      previous = anchor for i = 0, else d_i
    T <= 0: j_i = lowest rank of the maximum, q_i = one-hot
    T >  0: q_i = softmax(E_i / T), j_i drawn from q_i by inverse CDF with the `proposal` uniform under position F + i
    d_(i+1) = C_i[j_i]
    reproducible rows draw j_i by the race over q_i with the `target` noise under F + i: the same that decides over p_i,
    so that a draft is right wherever q and p agree, and nothing but p decides what is generated

It is a walk that conditions on the token actually picked, not a search for the best path. q is FP32 and is exactly the
distribution that acceptance needs. No other sampling control applies.

Source: specification (selector, temperature rule, RNG key); decisions 9 and 13.
"""

from __future__ import annotations

import torch

from kernels.randomness import PROPOSAL, TARGET, exponential, uniform


def select_path(
    candidates: torch.Tensor,
    unary: torch.Tensor,
    hidden: torch.Tensor,
    predecessor: torch.Tensor,
    successor: torch.Tensor,
    anchors: torch.Tensor,
    frontier: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    sub: torch.Tensor,
    reproducible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`candidates` int64 [B, K, C], `unary` FP32 [B, K, C], projected `hidden` [B, K, R], codebooks [V, R], `anchors`,
    `frontier`, `seeds`, `sub` int64 [B], `temperature` FP32 [B], `reproducible` bool [B] -> drafts int64 [B, K], q FP32
    [B, K, C]."""
    greedy = temperature <= 0
    divisor = torch.where(greedy, 1.0, temperature)[:, None]
    columns = torch.arange(candidates.shape[1], device=candidates.device)
    u = uniform(seeds[:, None], frontier[:, None] + columns, PROPOSAL, sub[:, None])
    previous = anchors
    drafts: list[torch.Tensor] = []
    laws: list[torch.Tensor] = []
    for i in range(candidates.shape[1]):
        query = predecessor[previous].float() * hidden[:, i].float()
        edges = unary[:, i] + (successor[candidates[:, i]].float() * query[:, None, :]).sum(-1)
        # the maximum is taken off first, so that a tiny temperature overflows to no mass and not to NaN
        law = ((edges - edges.max(-1, keepdim=True).values) / divisor).softmax(-1)
        best = torch.nn.functional.one_hot(edges.argmax(-1), edges.shape[-1]).to(law.dtype)
        law = torch.where(greedy[:, None], best, law)
        rank = draw_rank(law, u[:, i])
        if reproducible is not None:
            noise = exponential(seeds[:, None], (frontier + i)[:, None], TARGET, sub[:, None], candidates[:, i])
            raced = torch.where(law > 0, noise / law, torch.inf).argmin(-1)
            rank = torch.where(reproducible, raced, rank)
        previous = candidates[:, i].gather(-1, rank[:, None])[:, 0]
        drafts.append(previous)
        laws.append(law)
    return torch.stack(drafts, dim=1), torch.stack(laws, dim=1)


def draw_rank(law: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Inverse CDF: the first rank whose cumulative probability exceeds u times the total. `law` FP32 [B, C], `u` FP32
    [B] in [0, 1) -> int64 [B]. A rank of probability 0 is never drawn."""
    cumulative = law.cumsum(-1)
    below = (cumulative <= u[:, None] * cumulative[:, -1:]).sum(-1)
    last_possible = (law > 0).to(torch.int64) * torch.arange(law.shape[-1], device=law.device)
    return torch.minimum(below, last_possible.max(-1).values)
