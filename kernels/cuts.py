"""Where does each row's processed distribution end? Top-k, top-p and min-p without a sort (`kernels/sampling.py`).

What a row keeps are its first tokens in the one order of `kernels/ordering.py`, so that its last one's key, the *cut*,
says it all. Both top-k and top-p ask for the largest key whose tokens down to it reach a target: k tokens, or top_p of
the mass that top-k kept. The search keeps a bracket [low, high) of logits for each of the two:

    best      the best key of each chunk of a row                                      reads the row
    open      the first brackets, and the logits to try in them; k chunks whose best tokens reach a logit hold k tokens
              that do
    measure   tokens and mass down to each of them, mass in FP32                       reads the row, up to ROUNDS times
    narrow    the brackets that follow; FP32 sums are not believed within TRUST, so a bracket never loses its end
    gather    exact tokens and masses above the brackets, and the keys within          reads the row
    close     the cut among those keys, four tries at a time; what is left is the mass Z

Later rounds skip chunks whose best token is below all that is tried, and rows whose brackets hold few enough keys.
Where a bracket stays wider than that after all rounds (thousands of equal logits, or a top-p next to 1), `close` looks
through the row itself, exact as ever and slower. All of this is data of the device: nothing is asked by the host, and
a row does not depend on its neighbours.

Source: decision 12; `kernels/sampling.py` is the rule.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kernels.cut_close import close_kernel, gather_kernel
from kernels.cut_search import FIELDS, HELD, TRIES, best_kernel, measure_kernel, narrow_kernel, open_kernel
from kernels.launch_checks import require
from kernels.logit_rows import CHUNK, span_of
from kernels.sampling import MAX_TOKENS

ROUNDS = 4


@dataclass(frozen=True)
class RowControls:
    """`temperature`, `top_p` FP32 [B], `top_k` int64 [B], `min_p` FP32 [B] or None, of lanes with W columns each, of
    which the first `extent[b]` + 1 are looked at."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor | None
    extent: torch.Tensor


@dataclass(frozen=True)
class Cuts:
    """Of each row b W + i: `best` int64 [R, chunks], the best keys; `state` FP32 [R, 12], of which BEST and STEEP
    give weights; `cut` int64 [R], the last kept key before min-p; `total` FP32 [R], Z. Rows that are greedy or beyond
    their lane's extent have only `best`."""

    best: torch.Tensor
    state: torch.Tensor
    cut: torch.Tensor
    total: torch.Tensor


def find_cuts(logits: torch.Tensor, controls: RowControls) -> Cuts:
    """`logits` FP32 [B, W, V], V <= 2^22, on a card (or in Triton's interpreter)."""
    batch, width, count = logits.shape
    require("logits", logits, (batch, width, count), torch.float32)
    if not 0 < count <= MAX_TOKENS:
        raise ValueError(f"logits: {count} columns, must be 1 to {MAX_TOKENS}")
    rows, chunks = batch * width, triton.cdiv(count, CHUNK)
    span = span_of(rows, chunks)
    spans = triton.cdiv(chunks, span)
    padded = triton.next_power_of_2(spans)

    def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    cuts = Cuts(
        buffer(chunks, dtype=torch.int64),
        buffer(FIELDS.value, dtype=torch.float32),
        buffer(dtype=torch.int64),
        buffer(dtype=torch.float32),
    )
    if rows == 0:
        return cuts
    tries, wanted = buffer(TRIES.value, dtype=torch.float32), buffer(dtype=torch.int32)
    tokens, masses = (buffer(spans, TRIES.value, dtype=torch.float32) for _ in range(2))
    above, held = buffer(spans, 4, dtype=torch.int64), buffer(2, dtype=torch.int32)
    keys = buffer(2, HELD.value, dtype=torch.int64)
    place = logits.stride(0), logits.stride(1), width, count
    k, p = controls.top_k, controls.top_p
    best_kernel[(chunks, rows)](logits, cuts.best, controls.extent, *place, num_warps=1)
    open_kernel[(rows,)](
        *(cuts.best, controls.temperature, k, p, controls.extent, cuts.state, tries, wanted, held, width, chunks),
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=1,
    )
    for _ in range(ROUNDS):
        measure_kernel[(spans, rows)](
            *(logits, cuts.best, cuts.state, tries, wanted, tokens, masses),
            *place,
            chunks,
            span,
            num_warps=1,
            enable_fp_fusion=False,
        )
        narrow_kernel[(rows,)](cuts.state, tries, wanted, tokens, masses, k, p, width, spans, SPANS=padded, num_warps=4)
    gather_kernel[(spans, rows)](
        *(logits, cuts.best, cuts.state, wanted, k, p, controls.min_p, above, held, keys),
        *place,
        chunks,
        span,
        num_warps=1,
        enable_fp_fusion=False,
    )
    close_kernel[(rows,)](
        *(logits, cuts.state, wanted, k, p, controls.min_p, above, keys, cuts.cut, cuts.total),
        *place,
        spans,
        SPANS=padded,
        TILE=HELD.value,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return cuts
