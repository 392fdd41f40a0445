"""The gated delta rule: verification with records, and Fold. Prefill is `kernels/delta_prefill.py`.

State S [Dk, Dv], FP32, one a value head. Value head h uses the q and k of head h // (Hv / Hk).

    k <- k / sqrt(sum k^2 + 1e-6)      q <- q / sqrt(sum q^2 + 1e-6) / sqrt(Dk)
    S <- exp(g) S                      decay first
    u  = beta (v - S^T k)              then read
    S <- S + k u^T                     then the rank-1 update
    y  = S^T q
    g, beta                            FP32, of `kernels/delta_gates.py`

Verification runs this column by column from the committed state without changing it, and keeps what it used of each
column: raw q, k and v, g and beta. Fold replays the first N records with the very same step, so that its state is
bit-equal to the one that the verification had after column N - 1; N = 0 changes nothing. K + 1 copies of the state
would cost Dk Dv floats a head and column instead.

On a card, one kernel is both: its step, its tiles of the state and its order of additions do not know which one runs,
nor how many columns or rows there are. Prefill evaluates the same recurrence in chunks, and differs by rounding.

Source: specification (records, Fold); Yang et al. 2024, "Gated Delta Networks".
"""

# Triton does not declare its launch options.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.gated_delta_net_kernels import NORM_EPS, recurrence_kernel
from kernels.launch_checks import require, require_contiguous, require_head_dim
from kernels.overlap import overlaps

# Of S, one warp holds so many elements: 64 a thread, of 255 registers. It depends on nothing but Dk, because the order
# of additions does.
_TILE_ELEMENTS = 2048


@dataclass(frozen=True)
class Records:
    """What Fold needs of a verification's L layers: `mixed` [L, B, T, C], raw q | k | v after the short convolution,
    and its inputs `columns` [L, B, T, C], in the model's dtype; `g`, `beta` FP32 [L, B, T, Hv]."""

    mixed: torch.Tensor
    columns: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def empty(
        cls,
        layers: int,
        batch: int,
        width: int,
        channels: int,
        heads: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Records:
        mixed, columns = (torch.empty(layers, batch, width, channels, dtype=dtype, device=device) for _ in range(2))
        g, beta = (torch.empty(layers, batch, width, heads, dtype=torch.float32, device=device) for _ in range(2))
        return cls(mixed, columns, g, beta)


def _unit(x: torch.Tensor, heads: int) -> torch.Tensor:
    """L2-normalises [..., Hk, D] in FP32 and repeats each head for its group of value heads -> [..., heads, D]."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + NORM_EPS.value)
    return x32[..., None, :].expand(*x.shape[:-1], heads // x.shape[-2], x.shape[-1]).flatten(-3, -2)


def split_heads(mixed: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mixed` [..., C] -> unit q / sqrt(Dk) and unit k [..., Hv, Dk], v [..., Hv, Dv], FP32."""
    heads, key_dim, value_dim = states.shape[-3:]
    keys = (mixed.shape[-1] - heads * value_dim) // 2
    q, k, v = mixed.split((keys, keys, heads * value_dim), dim=-1)
    q, k = (_unit(x.unflatten(-1, (-1, key_dim)), heads) for x in (q, k))
    return q * key_dim**-0.5, k, v.unflatten(-1, (heads, value_dim)).float()


def _step_reference(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> None:
    """One column of the recurrence, in place: `state` [..., Hv, Dk, Dv], `k` unit [..., Hv, Dk, 1], `v` FP32 [..., Hv,
    Dv], `decay` exp(g) [..., Hv, 1, 1], `beta` [..., Hv, 1]. Verification and Fold both call this and nothing else:
    that makes them equal."""
    state.mul_(decay)
    u = beta * (v - (state * k).sum(-2))
    state.add_(k * u[..., None, :])


def live_columns(mixed: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return torch.arange(mixed.shape[1], device=mixed.device) < valid[:, None]


def verify_reference(
    mixed: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    q, k, v = split_heads(mixed, states)
    state, outputs = states[slots], torch.empty_like(v)
    columns = q[..., None], k[..., None], v, g.exp()[..., None, None], beta[..., None], outputs
    for q_i, k_i, v_i, decay, beta_i, output in zip(*(x.unbind(1) for x in columns), strict=True):
        _step_reference(state, k_i, v_i, decay, beta_i)
        output.copy_((state * q_i).sum(-2))
    return outputs.masked_fill(~live_columns(mixed, valid)[..., None, None], 0.0).to(mixed.dtype)


def fold_reference(records: Records, states: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor) -> None:
    """Rows with more columns come first, so that those which a column still moves are a slice."""
    kept = sorted(((count, row) for row, count in enumerate(counts.tolist()) if count), reverse=True)
    if not kept:
        return
    rows = torch.tensor([row for _, row in kept], device=slots.device)
    mixed, g, beta = (x[:, rows, : kept[0][0]].transpose(0, 1) for x in (records.mixed, records.g, records.beta))
    _, k, v = split_heads(mixed, states)
    state = states[slots[rows]]
    columns = k[..., None], v, g.exp()[..., None, None], beta[..., None]
    for i, column in enumerate(zip(*(x.unbind(2) for x in columns), strict=True)):
        moved = sum(count > i for count, _ in kept)
        _step_reference(state[:moved], *(x[:moved] for x in column))
    states[slots[rows]] = state


# ------------------------------------------------------------------------------------------------ launch


@dataclass(frozen=True)
class Layout:
    """Hk, Hv, Dk and Dv of an operator's arguments."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int


def require_layout(
    mixed: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
) -> Layout:
    """Raises ValueError unless these are the arguments of L layers' kernel: `mixed` [L, B, T, C], `g`, `beta`
    [L, B, T, Hv], `states` [slots, L, Hv, Dk, Dv], `slots`, `counts` [B]."""
    layers, batch, width, channels = mixed.shape
    heads, key_dim, value_dim = states.shape[2:]
    key_heads, rest = divmod(channels - heads * value_dim, 2 * key_dim)
    if key_heads < 1 or rest or heads % key_heads:
        raise ValueError(
            f"mixed: {channels} channels, must be those of {heads} heads of v ({value_dim} each) and of q and k heads "
            f"({key_dim} each) whose number divides {heads}"
        )
    require_head_dim("states", key_dim)
    require_head_dim("states", value_dim)
    require_contiguous("mixed", mixed, (layers, batch, width, channels), torch.float32, torch.bfloat16)
    for name, gate in (("g", g), ("beta", beta)):
        require_contiguous(name, gate, (layers, batch, width, heads), torch.float32)
    require("states", states, (states.shape[0], layers, heads, key_dim, value_dim), torch.float32)
    if not states[:1, :1].is_contiguous():
        raise ValueError(f"states: strides {states.stride()}, a layer's heads must be contiguous")
    require_contiguous("slots", slots, (batch,), torch.int64)
    require_contiguous("counts", counts, (batch,), torch.int64)
    return Layout(key_heads, heads, key_dim, value_dim)


def recurrence_triton(
    mixed: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    answers: bool,
    advances: bool,
) -> torch.Tensor:
    """`mixed` [L, B, T, C], `g`, `beta` [L, B, T, Hv], `states` [slots, L, Hv, Dk, Dv] -> y [L, B, T, Hv, Dv], of
    which nothing is written unless the kernel `answers`. Verification answers and Fold `advances`; a kernel that does
    both leaves the state that a verification had after counts[b] columns, for those who want to compare."""
    layout = require_layout(mixed, g, beta, states, slots, counts)
    layers, batch, width, _ = mixed.shape
    shape = (layers, batch, width, layout.heads, layout.value_dim)
    out = torch.empty(shape, dtype=mixed.dtype, device=mixed.device) if answers else mixed
    if mixed.numel():
        tile, overlapping = min(max(_TILE_ELEMENTS // layout.key_dim, 4), layout.value_dim), overlaps(mixed)
        recurrence_kernel[(layout.heads * (layout.value_dim // tile), batch, layers)](
            mixed,
            g,
            beta,
            states,
            slots,
            counts,
            out,
            width,
            states.stride(0),
            states.stride(1),
            layout.key_dim**-0.5,
            KEY_HEADS=layout.key_heads,
            HEADS=layout.heads,
            KEY_DIM=layout.key_dim,
            VALUE_DIM=layout.value_dim,
            TILE=tile,
            ANSWERS=answers,
            ADVANCES=advances,
            OVERLAPS=overlapping,
            num_warps=1,
            launch_pdl=overlapping,
        )
    return out


def verify_triton(
    mixed: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    one_layer = mixed[None], g[None], beta[None], states[:, None]
    return recurrence_triton(*one_layer, slots, valid, answers=True, advances=False)[0]


def fold_triton(records: Records, states: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor) -> None:
    recurrence_triton(records.mixed, records.g, records.beta, states, slots, counts, answers=False, advances=True)


# ------------------------------------------------------------------------------------------------ public


def verify(
    mixed: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    """Outputs of up to W columns from the committed states, which are not changed.

    `mixed` [B, W, C], q | k | v of Hk, Hk and Hv heads; `g`, `beta` FP32 [B, W, Hv]; `states` FP32 [slots, Hv, Dk, Dv];
    `slots`, `valid` int64 [B] -> [B, W, Hv, Dv] in mixed's dtype. Columns at or beyond valid[b] are exact zeros.
    """
    run = verify_triton if mixed.is_cuda else verify_reference
    return run(mixed, g, beta, states, slots, valid)


def fold(records: Records, states: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor) -> None:
    """Moves `states` FP32 [slots, L, Hv, Dk, Dv] over the first counts[b] recorded columns, in place.

    `slots` (distinct), `counts` int64 [B]. counts[b] = 0 touches no byte; records at or beyond counts[b] are not read.
    """
    run = fold_triton if records.mixed.is_cuda else fold_reference
    run(records, states, slots, counts)
