"""FP64 oracles of the drafting operators, on the card: written from the specification, no code of `kernels`.

They take the represented inputs (BF16, FP16) and round nothing.
"""

from __future__ import annotations

import torch


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotate(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """`x` [..., heads, D] at `positions` [...]; the angle is the FP32 product, as the operator's contract says."""
    angle = (positions.float()[..., None] * frequencies).double()[..., None, :]
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def context_features(features: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    return plain_norm(features.double() @ weight.double().T, norm, eps)


def context_keys(
    c: torch.Tensor,
    weight: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
) -> torch.Tensor:
    """`c` [T, H] as represented, one layer's `weight` [Hkv D, H] -> [T, Hkv, D]."""
    raw = (c.double() @ weight.double().T).unflatten(-1, (-1, norm.shape[0]))
    return rotate(plain_norm(raw, norm, eps), positions, frequencies)


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    frontier: int,
    live: torch.Tensor,
    window: int | None,
    causal: bool,
) -> torch.Tensor:
    """`q` [B, W, Hq, D], `k`, `v` [B, W, Hkv, D], K and V of the context in logical order, ending at `frontier`,
    [B, L, Hkv, D], `live` [B] -> [B, W, Hq, D]; a row's columns from `live` on are zero."""
    width, heads, past = q.shape[1], k.shape[2], context[0].shape[1]
    keys, values = (torch.cat((old.double(), new.double()), 1) for old, new in zip(context, (k, v), strict=True))
    column = torch.arange(width, device=q.device)
    distance = torch.arange(-past, width, device=q.device) - column[:, None]
    hidden = distance > 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        hidden = hidden | (distance.abs() >= window)
    dead = column >= live[:, None]
    hidden = hidden | torch.cat((dead.new_zeros(len(live), past), dead), 1)[:, None]
    scores = torch.einsum("bwhgd,blhd->bhgwl", q.double().unflatten(2, (heads, -1)), keys) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
    out = torch.einsum("bhgwl,blhd->bwhgd", weights, values).flatten(2, 3)
    return out.masked_fill(dead[:, :, None, None], 0.0)


def convolution(x: torch.Tensor, base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """One side: `x` [B, W, H], `base` [2, H], `delta` [B, W, 2, H / group]."""
    x, group = x.double(), x.shape[-1] // delta.shape[-1]
    coefficient = base.double() + delta.double().repeat_interleave(group, dim=-1)
    out = coefficient[:, :, 0] * x
    out[:, 1:] += coefficient[:, 1:, 1] * x[:, :-1]
    return out


def scores(hidden: torch.Tensor, weight: torch.Tensor, rows: int = 1 << 15) -> torch.Tensor:
    """`hidden` [R, H], `weight` [V, H] -> [R, V], a part of the head at a time."""
    return torch.cat([hidden.double() @ part.double().T for part in weight.split(rows)], dim=-1)


def walk(
    candidates: torch.Tensor,
    unary: torch.Tensor,
    hidden: torch.Tensor,
    predecessor: torch.Tensor,
    successor: torch.Tensor,
    anchors: torch.Tensor,
    drafts: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Along the path of `drafts`: the law of each column [B, K, C], and the gap of its two best edges [B, K]."""
    previous = torch.cat((anchors[:, None], drafts[:, :-1]), dim=1)
    query = predecessor[previous].double() * hidden.double()
    edges = unary.double() + torch.einsum("bkr,bkcr->bkc", query, successor[candidates].double())
    best = edges.topk(2, dim=-1).values
    law = torch.nn.functional.one_hot(edges.argmax(-1), edges.shape[-1]).double()
    return (edges / temperature).softmax(-1) if temperature > 0 else law, best[..., 0] - best[..., 1]


def silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(gate) * up
