"""The experts of a mixture: every column through the k experts that its router chose, and through the shared one.

    y = sum over the chosen e and the shared one of weight_e (W_down[e] (SiLU(W_gate[e] x) * W_up[e] x))

Rounding points: as of a dense feed-forward (`kernels/gated_mlp.py`) within an expert; an expert's output and its
product with its weight are each rounded to x's dtype. The products are returned, [T, k + 1, H] with the shared expert's
last: their sum is FP32, rounded once, by whoever adds them to the residual (`kernels/norms.py`).

On a card three kernels do it, none of which waits for the host. Columns are sorted by expert: a program an expert finds
its own among all choices. Then a grid of tiles, at most ROWS columns of one expert each, is sized by the largest number
of tiles that there could be; a program looks up which expert its tile belongs to, and ends at once where there is no
such tile. So an expert that nobody chose is not read, and every weight is read once for each tile of its columns. The
tiles of the shared expert come first. Products with down do not wait for all of those with gate and up: programs of
these are counted by expert as they end.

Source: research of the target's mixture (experts, shared expert).
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from kernels.experts_kernels import down_kernel, gate_up_kernel, sort_kernel
from kernels.gated_mlp import gated_mlp
from kernels.launch_checks import require_contiguous
from kernels.linear import Linear
from kernels.overlap import overlaps
from kernels.router import Routing

_SORTED_AT_ONCE = 4096
"""Choices that a sorting program looks at together."""


@dataclass(frozen=True)
class Experts:
    """`gate_up` [E, 2 I, H], gate rows first, and `down` [E, H, I]; the shared expert's `shared_gate_up` [2 Is, H] and
    `shared_down` [H, Is]. One dtype."""

    gate_up: torch.Tensor
    down: torch.Tensor
    shared_gate_up: torch.Tensor
    shared_down: torch.Tensor

    @property
    def count(self) -> int:
        return self.gate_up.shape[0]


def run_experts_reference(x: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
    parts = x.new_empty(x.shape[0], routing.top_k + 1, x.shape[1])
    for expert in routing.experts.unique().tolist():
        columns, choice = (routing.experts == expert).nonzero(as_tuple=True)
        parts[columns, choice] = gated_mlp(x[columns], Linear(experts.gate_up[expert]), Linear(experts.down[expert]))
    parts[:, -1] = gated_mlp(x, Linear(experts.shared_gate_up), Linear(experts.shared_down))
    return parts * routing.weights[..., None]


# ------------------------------------------------------------------------------------------------ launch


class Tiling(NamedTuple):
    """A program's tile: `rows` columns of one expert times `weights` rows of its matrix, `depth` of a row at a time."""

    rows: int
    weights: int
    depth: int
    stages: int
    warps: int


def tilings(columns: int, top_k: int, experts: int, dtype: torch.dtype) -> tuple[Tiling, Tiling]:
    """Of the products with gate and up, and with down; in BF16 those that were fastest at 35B-A3B's sizes. Rows for
    twice the columns of an expert on average, so that nearly every expert is read once."""
    rows = triton.next_power_of_2(min(max(16, triton.cdiv(2 * columns * top_k, experts)), 128))
    if dtype != torch.bfloat16:
        tiling = Tiling(min(rows, 32), 32, 32, 2, 4)
        return tiling, tiling
    if rows == 16:
        return Tiling(16, 64, 128, 3, 2), Tiling(16, 128, 128, 2, 4)
    if rows == 32:
        return Tiling(32, 128, 64, 4, 4), Tiling(32, 128, 64, 4, 4)
    if rows == 64 or columns * top_k < 128 * experts:
        return Tiling(rows, 128, 64, 3, rows // 16), Tiling(64, 128, 64, 3, 4)
    return Tiling(128, 256, 64, 3, 8), Tiling(128, 256, 64, 3, 8)


def most_tiles(columns: int, top_k: int, experts: int, rows: int) -> int:
    """Of any routing: an expert's last tile may have one column, and the shared expert has all columns."""
    choices = columns * top_k
    touched = min(choices, experts)
    return touched + (choices - touched) // rows + triton.cdiv(columns, rows)


def sort_choices(routing: Routing, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(places int32 [T k] of all choices by expert and then by place, begins int32 [E]: where each expert's do, zeros
    int32 [E + 1]: programs that have ended of each expert, and of the shared one)."""
    chosen = routing.experts
    count, device = chosen.numel(), chosen.device
    places = torch.empty(count, dtype=torch.int32, device=device)
    begins = torch.empty(experts, dtype=torch.int32, device=device)
    ended = torch.empty(experts + 1, dtype=torch.int32, device=device)
    block, overlapping = min(max(16, triton.next_power_of_2(count)), _SORTED_AT_ONCE), overlaps(chosen)
    sort_kernel[(experts,)](
        chosen,
        places,
        begins,
        ended,
        count,
        K=routing.top_k,
        BLOCK=block,
        OVERLAPS=overlapping,
        num_warps=4 if block > 512 else 1,
        launch_pdl=overlapping,
    )
    return places, begins, ended


def _check(x: torch.Tensor, routing: Routing, experts: Experts) -> None:
    columns, width = x.shape
    count, inner, shared_inner = experts.count, experts.down.shape[-1], experts.shared_down.shape[-1]
    require_contiguous("x", x, (columns, width), torch.float32, torch.bfloat16)
    require_contiguous("experts", routing.experts, (columns, routing.top_k), torch.int32)
    require_contiguous("weights", routing.weights, (columns, routing.top_k + 1), x.dtype)
    require_contiguous("gate_up", experts.gate_up, (count, 2 * inner, width), x.dtype)
    require_contiguous("down", experts.down, (count, width, inner), x.dtype)
    require_contiguous("shared_gate_up", experts.shared_gate_up, (2 * shared_inner, width), x.dtype)
    require_contiguous("shared_down", experts.shared_down, (width, shared_inner), x.dtype)


class _Sizes(NamedTuple):
    columns: int
    experts: int
    width: int
    inner: int
    shared_inner: int
    hidden_stride: int


def _launch(
    kernel: Any,
    tensors: tuple[torch.Tensor, ...],
    sizes: _Sizes,
    top_k: int,
    to: Tiling,
    rows: int,
    depths: tuple[int, ...],
    awaited: dict[str, int],
) -> None:
    """The products with matrices of at most `rows` rows, each one of `depths` deep. `awaited`: the tiles of the kernel
    whose programs are waited for, if any."""
    overlapping = overlaps(tensors[0])
    tiles = most_tiles(sizes.columns, top_k, sizes.experts, to.rows)
    kernel[(triton.cdiv(rows, to.weights), tiles)](
        *tensors,
        *sizes,
        K=top_k,
        EXPERTS=triton.next_power_of_2(sizes.experts),
        ROWS=to.rows,
        WEIGHTS=to.weights,
        DEPTH=to.depth,
        WHOLE=all(depth % to.depth == 0 for depth in depths),
        STAGES=to.stages,
        **awaited,
        OVERLAPS=overlapping,
        num_warps=to.warps,
        launch_pdl=overlapping,
    )


def run_experts_triton(
    x: torch.Tensor, routing: Routing, experts: Experts, plan: tuple[Tiling, Tiling] | None = None
) -> torch.Tensor:
    """`plan`: for measurements; by default the tilings that were fastest."""
    _check(x, routing, experts)
    (columns, width), top_k, count = x.shape, routing.top_k, experts.count
    inner, shared_inner = experts.down.shape[-1], experts.shared_down.shape[-1]
    parts = x.new_empty(columns, top_k + 1, width)
    if not columns:
        return parts
    sorted_choices = sort_choices(routing, count)
    hidden = x.new_empty(columns * (top_k + 1), max(inner, shared_inner))
    sizes = _Sizes(columns, count, width, inner, shared_inner, hidden.shape[1])
    gate_up, down = plan or tilings(columns, top_k, count, x.dtype)
    tensors = x, *sorted_choices, experts.gate_up, experts.shared_gate_up, hidden
    _launch(gate_up_kernel, tensors, sizes, top_k, gate_up, 2 * hidden.shape[1], (width,), {})
    tensors = hidden, *sorted_choices, experts.down, experts.shared_down, routing.weights, parts
    awaited = {"GATE_ROWS": gate_up.rows, "GATE_WEIGHTS": gate_up.weights}
    _launch(down_kernel, tensors, sizes, top_k, down, width, (inner, shared_inner), awaited)
    return parts


def run_experts(x: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
    """`x` [T, H] in the experts' dtype -> the products with every chosen expert and the shared one, times their
    weights, [T, k + 1, H]: to be summed."""
    run = run_experts_triton if x.is_cuda else run_experts_reference
    return run(x, routing, experts)
