"""The gated delta rule: chunked prefill, verification with records, and Fold.

State S [Dk, Dv], FP32, one a value head. Value head h uses the q and k of head h // (Hv / Hk).

    k <- k / sqrt(sum k^2 + 1e-6)      q <- q / sqrt(sum q^2 + 1e-6) / sqrt(Dk)
    S <- exp(g) S                      decay first
    u  = beta (v - S^T k)              then read
    S <- S + k u^T                     then the rank-1 update
    y  = S^T q
    g  = -exp(A_log) softplus(a + dt_bias)        beta = sigmoid(b)         both FP32

Verification runs this column by column from the committed state without changing it, and records raw k, raw v, g and
beta of each column. Fold replays the first N records with the very same function, so that its state is bit-equal to the
one that the verification had after column N - 1; N = 0 changes nothing. Records cost 2 Dk + 2 Dv + 2 floats a head
and column, where K + 1 copies of the state would cost Dk Dv each.

Prefill evaluates the same recurrence in chunks of 64 columns (a triangular solve a chunk); it differs from the serial
form by rounding only.

Source: specification (records, Fold); Yang et al. 2024, "Gated Delta Networks" and "Parallelizing linear transformers
with the delta rule" for the chunked form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

CHUNK = 64
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Records:
    """What Fold needs of one layer's verification: `k` [B, W, Hk, Dk], `v` [B, W, Hv, Dv] raw, in the model's dtype;
    `g`, `beta` FP32 [B, W, Hv]; `columns` [B, W, C], the projected convolution inputs."""

    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    columns: torch.Tensor


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`a`, `b` [B, T, Hv], `a_log`, `dt_bias` [Hv] -> (g, beta), FP32 [B, T, Hv]."""
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def _unit(x: torch.Tensor, heads: int) -> torch.Tensor:
    """L2-normalises [..., Hk, D] in FP32 and repeats each head for its group of value heads -> [..., heads, D]."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + _NORM_EPS)
    return x32.repeat_interleave(heads // x.shape[-2], dim=-2)


def _step(state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """One column of the recurrence: `state` [B, Hv, Dk, Dv], `k` unit [B, Hv, Dk], `v` FP32 [B, Hv, Dv], `g`, `beta`
    [B, Hv] -> the next state. Verification and Fold both call this and nothing else, which is what makes them equal."""
    state = state * g.exp()[..., None, None]
    read = (state * k[..., :, None]).sum(-2)
    u = beta[..., None] * (v - read)
    return state + k[..., :, None] * u[..., None, :]


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    """Outputs of up to W columns from the committed `state` FP32 [B, Hv, Dk, Dv], which is not changed.

    `q`, `k` [B, W, Hk, Dk], `v` [B, W, Hv, Dv], `g`, `beta` FP32 [B, W, Hv], `valid` int64 [B] -> [B, W, Hv, Dv] in
    v's dtype. Columns at or beyond valid[b] are exact zeros.
    """
    heads = v.shape[-2]
    q32, k32, v32 = _unit(q, heads) * q.shape[-1] ** -0.5, _unit(k, heads), v.float()
    outputs: list[torch.Tensor] = []
    for i in range(v.shape[1]):
        state = _step(state, k32[:, i], v32[:, i], g[:, i], beta[:, i])
        outputs.append((state * q32[:, i, :, :, None]).sum(-2))
    out = torch.stack(outputs, dim=1)
    live = torch.arange(v.shape[1], device=v.device) < valid[:, None]
    return out.masked_fill(~live[..., None, None], 0.0).to(v.dtype)


def fold(records: Records, state: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The state after the first counts[b] recorded columns: `state` FP32 [B, Hv, Dk, Dv], `counts` int64 [B] ->
    FP32 [B, Hv, Dk, Dv]. counts[b] = 0 returns row b unchanged; records at or beyond counts[b] are not used."""
    heads = records.v.shape[-2]
    k32, v32 = _unit(records.k, heads), records.v.float()
    for i in range(int(counts.max())):
        after = _step(state, k32[:, i], v32[:, i], records.g[:, i], records.beta[:, i])
        state = torch.where((i < counts)[:, None, None, None], after, state)
    return state


def prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All T columns, in chunks: shapes as in `verify`, every column live -> ([B, T, Hv, Dv] in v's dtype, new state).

    With G_t = exp(g_1 + .. + g_t) inside a chunk and the state S at its start, the corrections U solve
    (I + L) U = beta (V - G (K S)), L_ti = beta_t (G_t / G_i) (k_t . k_i) for i < t.
    """
    heads = v.shape[-2]
    q32, k32 = (_unit(q, heads) * q.shape[-1] ** -0.5).transpose(1, 2), _unit(k, heads).transpose(1, 2)
    v32, g, beta = v.float().transpose(1, 2), g.transpose(1, 2), beta.transpose(1, 2)
    outputs: list[torch.Tensor] = []
    for start in range(0, v.shape[1], CHUNK):
        piece = slice(start, start + CHUNK)
        qc, kc, vc, bc = q32[:, :, piece], k32[:, :, piece], v32[:, :, piece], beta[:, :, piece, None]
        log_decay = g[:, :, piece].cumsum(-1)
        decay = log_decay.exp()[..., None]
        # exp of a difference that is at most 0 on and below the diagonal; the rest is masked before exp can overflow
        between = (log_decay[..., :, None] - log_decay[..., None, :]).tril().exp().tril()
        lower = (bc * between * (kc @ kc.transpose(-1, -2))).tril(-1)
        right = bc * (vc - decay * (kc @ state))
        u = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        outputs.append(decay * (qc @ state) + ((qc @ kc.transpose(-1, -2)) * between) @ u)
        to_end = (log_decay[..., -1:] - log_decay).exp()[..., None]
        state = state * decay[..., -1:, :] + (kc * to_end).transpose(-1, -2) @ u
    return torch.cat(outputs, dim=2).transpose(1, 2).to(v.dtype), state
