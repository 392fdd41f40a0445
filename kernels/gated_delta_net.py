"""The gated delta rule: verification with records, Fold, and prefill.

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

On a card, one kernel is all three: its step, its tiles of the state and its order of additions do not know which one
runs, how many columns or rows there are, or where a slice of a prompt was cut. A prompt in pieces has the bits of a
prompt in one piece there, and a committed round those of a prefill of its tokens. The reference of prefill evaluates
the recurrence in chunks of 64 columns instead (a triangular solve a chunk), and differs from the serial form by
rounding only.

Source: specification (records, Fold); Yang et al. 2024, "Gated Delta Networks" and "Parallelizing linear transformers
with the delta rule" for the chunked form.
"""

# Triton does not declare its launch options.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.gated_delta_net_kernels import NORM_EPS, recurrence_kernel
from kernels.launch_checks import require, require_contiguous, require_head_dim

CHUNK = 64
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
    return x32.repeat_interleave(heads // x.shape[-2], dim=-2)


def _split(mixed: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mixed` [..., C] -> unit q / sqrt(Dk) and unit k [..., Hv, Dk], v [..., Hv, Dv], FP32."""
    heads, key_dim, value_dim = states.shape[-3:]
    keys = (mixed.shape[-1] - heads * value_dim) // 2
    q, k, v = mixed.split((keys, keys, heads * value_dim), dim=-1)
    q, k = (_unit(x.unflatten(-1, (-1, key_dim)), heads) for x in (q, k))
    return q * key_dim**-0.5, k, v.unflatten(-1, (heads, value_dim)).float()


def _step_reference(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """One column of the recurrence: `state` [..., Hv, Dk, Dv], `k` unit [..., Hv, Dk], `v` FP32 [..., Hv, Dv], `g`,
    `beta` [..., Hv] -> the next state. Verification and Fold both call this and nothing else, which is what makes them
    equal."""
    state = state * g.exp()[..., None, None]
    read = (state * k[..., :, None]).sum(-2)
    u = beta[..., None] * (v - read)
    return state + k[..., :, None] * u[..., None, :]


def _live(mixed: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return torch.arange(mixed.shape[1], device=mixed.device) < valid[:, None]


def verify_reference(
    mixed: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    q, k, v = _split(mixed, states)
    state, outputs = states[slots], torch.empty_like(v)
    for i in range(mixed.shape[1]):
        state = _step_reference(state, k[:, i], v[:, i], g[:, i], beta[:, i])
        outputs[:, i] = (state * q[:, i, :, :, None]).sum(-2)
    return outputs.masked_fill(~_live(mixed, valid)[..., None, None], 0.0).to(mixed.dtype)


def fold_reference(records: Records, states: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor) -> None:
    _, k, v = _split(records.mixed, states)
    state = states[slots].transpose(0, 1)
    for i in range(int(counts.max())):
        after = _step_reference(state, k[:, :, i], v[:, :, i], records.g[:, :, i], records.beta[:, :, i])
        state = torch.where((i < counts)[:, None, None, None], after, state)
    states[slots] = state.transpose(0, 1)


def prefill_reference(
    mixed: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    """With G_t = exp(g_1 + .. + g_t) inside a chunk and the state S at its start, the corrections U solve
    (I + L) U = beta (V - G (K S)), L_ti = beta_t (G_t / G_i) (k_t . k_i) for i < t.
    """
    dead = ~_live(mixed, valid)[..., None]
    # a column that neither decays nor writes
    g, beta = (x.masked_fill(dead, 0.0).transpose(1, 2) for x in (g, beta))
    q, k, v = (x.transpose(1, 2) for x in _split(mixed.masked_fill(dead, 0.0), states))
    state, outputs = states[slots], torch.empty_like(v)
    for start in range(0, mixed.shape[1], CHUNK):
        piece = slice(start, start + CHUNK)
        qc, kc, vc, bc = q[:, :, piece], k[:, :, piece], v[:, :, piece], beta[:, :, piece, None]
        log_decay = g[:, :, piece].cumsum(-1)
        decay = log_decay.exp()[..., None]
        # exp of a difference that is at most 0 on and below the diagonal; the rest is masked before exp can overflow
        between = (log_decay[..., :, None] - log_decay[..., None, :]).tril().exp().tril()
        lower = (bc * between * (kc @ kc.transpose(-1, -2))).tril(-1)
        right = bc * (vc - decay * (kc @ state))
        u = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        outputs[:, :, piece] = decay * (qc @ state) + ((qc @ kc.transpose(-1, -2)) * between) @ u
        to_end = (log_decay[..., -1:] - log_decay).exp()[..., None]
        state = state * decay[..., -1:, :] + (kc * to_end).transpose(-1, -2) @ u
    states[slots] = state
    return outputs.transpose(1, 2).masked_fill(dead[..., None], 0.0).to(mixed.dtype)


# ------------------------------------------------------------------------------------------------ launch


def _launch(
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
    which nothing is written unless the kernel `answers`."""
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
    shape = (layers, batch, width, heads, value_dim)
    out = torch.empty(shape, dtype=mixed.dtype, device=mixed.device) if answers else mixed
    if mixed.numel():
        tile = min(max(_TILE_ELEMENTS // key_dim, 4), value_dim)
        recurrence_kernel[(heads * (value_dim // tile), batch, layers)](
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
            key_dim**-0.5,
            KEY_HEADS=key_heads,
            HEADS=heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            TILE=tile,
            ANSWERS=answers,
            ADVANCES=advances,
            num_warps=1,
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
    return _launch(*one_layer, slots, valid, answers=True, advances=False)[0]


def fold_triton(records: Records, states: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor) -> None:
    _launch(records.mixed, records.g, records.beta, states, slots, counts, answers=False, advances=True)


def prefill_triton(
    mixed: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    one_layer = mixed[None], g[None], beta[None], states[:, None]
    return _launch(*one_layer, slots, valid, answers=True, advances=True)[0]


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


def prefill(
    mixed: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    """As `verify` with any number of columns, and `states` move over the live ones, in place."""
    run = prefill_triton if mixed.is_cuda else prefill_reference
    return run(mixed, g, beta, states, slots, valid)
