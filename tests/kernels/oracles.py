"""Oracles in FP64, written from the specification: plain loops, no code of the packages under test."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

PROPOSAL, ACCEPT, TARGET, CORRECTION = 0, 1, 2, 3
POISON = float("nan")


def double(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.double() for t in tensors)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Fails unless |actual - expected| <= tolerance * (1 + |expected|) everywhere; NaN anywhere fails."""
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------ chance


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Philox4x32-10 on Python integers, from the definition in Salmon et al. 2011."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ k[0], second % 2**32, (first >> 32) ^ c[3] ^ k[1], first % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


def random_word(seed: int, position: int, purpose: int, sub: int, token: int = 0) -> int:
    """The 32 random bits of one key; the layout is what existing seeds depend on."""
    seed %= 2**64
    return philox((token >> 2, position % 2**32, purpose, sub % 2**32), (seed % 2**32, seed >> 32))[token & 3]


def uniform(seed: int, position: int, purpose: int, sub: int) -> float:
    return (random_word(seed, position, purpose, sub) >> 8) / 2**24


def noise(seed: int, position: int, purpose: int, sub: int, token: int) -> float:
    """E_v of the race; u_v is FP32 (decision 13), its logarithm is not rounded here."""
    word = np.float32(random_word(seed, position, purpose, sub, token))
    u = min((word + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    return -math.log1p(-float(u))


def race(weights: Sequence[float], seed: int, position: int, purpose: int, sub: int) -> tuple[int, float]:
    """(winner, margin): the margin is the gap of the two best scores log w_v - log E_v, infinite for one runner."""
    scores = sorted(
        (math.log(noise(seed, position, purpose, sub, v)) - math.log(w), v) for v, w in enumerate(weights) if w > 0
    )
    return scores[0][1], scores[1][0] - scores[0][0] if len(scores) > 1 else math.inf


def chi_square(observed: torch.Tensor, law: torch.Tensor) -> float:
    """p-value of counts `observed` [N] under `law` [N]. Cells that expect fewer than 5 are pooled; a count in a cell of
    probability zero gives 0."""
    observed, law = observed.double().flatten(), law.double().flatten()
    if bool((observed[law <= 0] > 0).any()):
        return 0.0
    expected = law / law.sum() * observed.sum()
    small = expected < 5
    if bool(small.any()):
        observed = torch.cat((observed[~small], observed[small].sum()[None]))
        expected = torch.cat((expected[~small], expected[small].sum()[None]))
        observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


# ------------------------------------------------------------------------------------------------ sampling


def descending(scores: Sequence[float]) -> list[int]:
    """Ids by descending score, exact ties by lower id (Python compares +0 and -0 as equal)."""
    return sorted(range(len(scores)), key=lambda v: (-scores[v], v))


def processed(logits: Sequence[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Temperature, top-k, top-p over the kept mass, renormalise (decision 12); a point mass for temperature <= 0."""
    order = descending(logits)
    p = [0.0] * len(logits)
    if temperature <= 0:
        p[order[0]] = 1.0
        return p
    kept = order[:top_k] if top_k > 0 else order
    mass = {v: math.exp((logits[v] - logits[order[0]]) / temperature) for v in kept}
    reach, so_far = top_p * sum(mass.values()), 0.0
    nucleus: list[int] = []
    for v in kept:
        nucleus.append(v)
        so_far += mass[v]
        if top_p < 1 and so_far >= reach:
            break
    for v in nucleus:
        p[v] = mass[v] / sum(mass[w] for w in nucleus)
    return p


# ------------------------------------------------------------------------------------------------ layers


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotate(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Split-half rotation of `x` [..., heads, D] at integer `positions` [...] by complex multiplication. The angle is
    the FP32 product, as the operator's contract says."""
    half = frequencies.shape[0]
    angle = (positions.float()[..., None] * frequencies.float()).double()[..., None, :]
    turned = torch.complex(*double(x[..., :half], x[..., half : 2 * half])) * torch.polar(
        torch.full_like(angle, factor), angle
    )
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :].double()), dim=-1)


def plain_frequencies(dim: int, theta: float) -> torch.Tensor:
    return torch.tensor([theta ** (-2 * j / dim) for j in range(dim // 2)], dtype=torch.float64)


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One query row over the keys that it sees: `q` [Hq, D], `keys`, `values` [L, Hkv, D] -> FP64 [Hq, D]."""
    q, keys, values = double(q, keys, values)
    group = q.shape[0] // keys.shape[1]
    heads = []
    for h in range(q.shape[0]):
        weights = ((keys[:, h // group] @ q[h]) * scale).softmax(0)
        heads.append(weights @ values[:, h // group])
    return torch.stack(heads)


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The serial gated delta rule of one row and one value head: `q`, `k` [T, Dk], `v` [T, Dv], `g`, `beta` [T],
    `state` [Dk, Dv] -> (outputs [T, Dv], state), FP64."""
    q, k, v, g, beta, state = double(q, k, v, g, beta, state)
    outputs = []
    for t in range(v.shape[0]):
        key = k[t] / (k[t].square().sum() + 1e-6).sqrt()
        query = q[t] / (q[t].square().sum() + 1e-6).sqrt() / math.sqrt(q.shape[-1])
        state = math.exp(g[t]) * state
        state = state + torch.outer(key, beta[t] * (v[t] - state.T @ key))
        outputs.append(state.T @ query)
    return torch.stack(outputs), state


def grouped_convolution(x: torch.Tensor, base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """One side of DFlash2's convolution, channel by channel: `x` [W, H], `base` [2, H], `delta` [W, 2, groups]."""
    x, base, delta = double(x, base, delta)
    group = x.shape[-1] // delta.shape[-1]
    out = torch.zeros_like(x)
    for i in range(x.shape[0]):
        for h in range(x.shape[1]):
            out[i, h] = (base[0, h] + delta[i, 0, h // group]) * x[i, h]
            if i >= 1:
                out[i, h] += (base[1, h] + delta[i, 1, h // group]) * x[i - 1, h]
    return out


def walk(
    candidates: torch.Tensor,
    unary: torch.Tensor,
    hidden: torch.Tensor,
    predecessor: torch.Tensor,
    successor: torch.Tensor,
    anchor: int,
    temperature: float,
    uniforms: Sequence[float],
) -> tuple[list[int], torch.Tensor, float]:
    """One row of the conditional path: `candidates`, `unary` [K, C], `hidden` [K, R], codebooks [V, R], one uniform a
    column -> (drafts, q FP64 [K, C], margin: least distance of a uniform to a boundary of its q, or of two scores)."""
    unary, hidden, predecessor, successor = double(unary, hidden, predecessor, successor)
    drafts: list[int] = []
    laws: list[torch.Tensor] = []
    margin, previous = math.inf, anchor
    for i in range(candidates.shape[0]):
        edges = [
            float(unary[i, c] + (predecessor[previous] * hidden[i] * successor[candidates[i, c]]).sum())
            for c in range(candidates.shape[1])
        ]
        if temperature <= 0:
            rank = descending(edges)[0]
            law = torch.zeros(len(edges), dtype=torch.float64)
            law[rank] = 1.0
            best = sorted(edges)[-2:]
            margin = min(margin, best[-1] - best[0] if len(best) > 1 else math.inf)
        else:
            law = (torch.tensor(edges, dtype=torch.float64) / temperature).softmax(0)
            bounds = law.cumsum(0)
            rank = int((bounds <= uniforms[i]).sum())
            margin = min(margin, float((bounds[:-1] - uniforms[i]).abs().min()) if len(edges) > 1 else math.inf)
        previous = int(candidates[i, rank])
        drafts.append(previous)
        laws.append(law)
    return drafts, torch.stack(laws), margin


def rounds_like(actual: torch.Tensor, exact: torch.Tensor, share: float = 0.005) -> None:
    """Fails unless BF16 `actual` is FP64 `exact` rounded to nearest even, but for `share` of the elements (at most one
    step off), where FP32 arithmetic may fall on the other side of a rounding boundary."""
    assert actual.dtype == torch.bfloat16
    expected = exact.float().bfloat16()
    different = actual != expected
    assert float(different.double().mean()) <= share
    close(actual, expected, 2.0**-7)
