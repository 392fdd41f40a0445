"""The gated delta rule over a prompt: chunks of 64 columns, counted from the first column of the call.

The recurrence is that of `kernels/gated_delta_net.py`. With D_ti = exp(g_i+1 + .. + g_t) inside a chunk, D_t from its
start and S the state there, unit keys k and scaled unit queries q:

    (I + L) U = beta (V - D_t (K S))        L_ti = beta_t D_ti (k_t . k_i),  i < t
    Y  = D_t (Q S) + P U                    P_ti = D_ti (q_t . k_i),  i <= t
    S <- D_end S + sum_t D_end,t k_t u_t^T

L and P know nothing of the state: one kernel computes P and T = (I + L)^-1 diag(beta) of all chunks at once, and
another takes a tile of a head's state through the chunks, with four products a chunk and no solve.

Rounding. The state is FP32 throughout. Keys and queries enter products raw, so that BF16 ones are exact, and their
norms are factors of rows and columns. An FP32 operand beside BF16 ones is the sum of two BF16 numbers, which keeps 16
of its 24 bits; P and the u beside it are rounded to the columns' dtype, as y is. The sums of g are taken from i + 1 to
t, never as a difference, so that a gate of -1e4 costs the gates after it no digits.

A chunk's arithmetic does not depend on what was before it but for S: calls that cut a prompt at multiples of 64 columns
give the bits of one call. Cut elsewhere, and beside verification and Fold, the difference is rounding.

Source: Yang et al. 2024, "Gated Delta Networks" and "Parallelizing linear transformers with the delta rule".
"""

# Triton does not declare its launch options.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton

from kernels.delta_prefill_kernels import chunks_kernel, states_kernel
from kernels.gated_delta_net import live_columns, require_layout, split_heads

CHUNK = 64
# Of S, one program takes so many elements through the chunks: 64 values of keys of 128.
_STATE_TILE = 8192
# A chunk's operands are asked for two chunks ahead where that fits on a multiprocessor, which heads of 256 do not.
_STAGES, _STAGED_KEY_BYTES = 3, 256
# Preparing a chunk is a chain of small products: three programs on a multiprocessor wait at different links.
_CHUNK_REGISTERS = 168


def prefill_reference(
    mixed: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    dead = ~live_columns(mixed, valid)[..., None]
    # a column that neither decays nor writes
    g, beta = (x.masked_fill(dead, 0.0).transpose(1, 2) for x in (g, beta))
    q, k, v = (x.transpose(1, 2) for x in split_heads(mixed.masked_fill(dead, 0.0), states))
    state, outputs = states[slots], torch.empty_like(v)
    for start in range(0, mixed.shape[1], CHUNK):
        piece = slice(start, start + CHUNK)
        qc, kc, vc, bc = q[:, :, piece], k[:, :, piece], v[:, :, piece], beta[:, :, piece, None]
        from_start = g[:, :, piece].cumsum(-1).exp()[..., None]
        # [t, i]: g_t below the diagonal, summed down each column
        between = g[:, :, piece, None].expand(*g.shape[:2], *[qc.shape[2]] * 2).tril(-1).cumsum(-2)
        decay = between.exp().tril()
        lower = (bc * decay * (kc @ kc.transpose(-1, -2))).tril(-1)
        right = bc * (vc - from_start * (kc @ state))
        u = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        outputs[:, :, piece] = from_start * (qc @ state) + ((qc @ kc.transpose(-1, -2)) * decay) @ u
        state = state * from_start[..., -1:, :] + (kc * decay[..., -1, :, None]).transpose(-1, -2) @ u
    states[slots] = state
    return outputs.transpose(1, 2).masked_fill(dead[..., None], 0.0).to(mixed.dtype)


# ------------------------------------------------------------------------------------------------ launch


def prefill_triton(
    mixed: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    layout = require_layout(mixed[None], g[None], beta[None], states[:, None], slots, valid)
    batch, width, _ = mixed.shape
    out = torch.empty(batch, width, layout.heads, layout.value_dim, dtype=mixed.dtype, device=mixed.device)
    if not mixed.numel():
        return out
    chunks = triton.cdiv(width, CHUNK)
    parts = 2 if mixed.dtype == torch.bfloat16 else 1
    per_chunk = (batch, layout.heads, chunks)
    inverse = torch.empty(*per_chunk, parts, CHUNK, CHUNK, dtype=mixed.dtype, device=mixed.device)
    pairs = torch.empty(*per_chunk, CHUNK, CHUNK, dtype=mixed.dtype, device=mixed.device)
    factors = torch.empty(*per_chunk, 4, CHUNK, dtype=torch.float32, device=mixed.device)
    heads = {"KEY_HEADS": layout.key_heads, "HEADS": layout.heads}
    dims = {"KEY_DIM": layout.key_dim, "VALUE_DIM": layout.value_dim, "CHUNK": CHUNK}
    chunks_kernel[(chunks, layout.heads, batch)](
        *(mixed, g, beta, valid, inverse, pairs, factors, width, layout.key_dim**-0.5),
        **heads,
        **dims,
        num_warps=4,
        maxnreg=_CHUNK_REGISTERS,
    )
    tile = min(max(_STATE_TILE // layout.key_dim, 16), 64, layout.value_dim)
    staged = layout.key_dim * mixed.element_size() <= _STAGED_KEY_BYTES
    states_kernel[(layout.heads * (layout.value_dim // tile), batch)](
        *(mixed, states, slots, valid, inverse, pairs, factors, out, width, states.stride(0)),
        **heads,
        **dims,
        TILE=tile,
        STAGES=_STAGES if staged else 1,
        num_warps=4,
    )
    return out


def prefill(
    mixed: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    """As `gated_delta_net.verify` with any number of columns, and `states` move over the live ones, in place."""
    run = prefill_triton if mixed.is_cuda else prefill_reference
    return run(mixed, g, beta, states, slots, valid)
