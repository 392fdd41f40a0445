"""A mixture's feed-forward on a card, for `bench/target_kernels.py`: router, experts, and the norm that adds them.

Sizes are 35B-A3B's: 8 of 256 experts of 512, and a shared one, H = 2048. Columns are unlike each other, so that a
random router spreads as a trained one does. The floor counts the experts that the columns chose, each once, the shared
one and the router; with the columns of a prompt products take longer than reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from bench.gpu import norm_error
from bench.target_works import DEVICE, Peer, Work
from kernels.experts import Experts, run_experts
from kernels.norms import add_offset_rms_norm
from kernels.router import Routing, route

MODEL = "35B-A3B"
WIDTH, COUNT, TOP_K, INNER, EPS = 2048, 256, 8, 512, 1e-6
VERIFY = [(1, 8), (1, 16), (2, 8), (4, 8), (8, 8), (8, 16), (16, 8), (32, 8), (32, 16)]
PREFILL = [2048, 8192]
INPUTS = 4
CHECKED = 61
"""Every so many columns of a prompt are compared with the oracle, and its last one."""
ALIKE = 0.9
"""The least share of columns whose choice is the oracle's: a logit may round to either side of a boundary of BF16."""


@dataclass(frozen=True)
class Mixture:
    router: torch.Tensor
    shared_gate: torch.Tensor
    experts: Experts
    norm: torch.Tensor

    @classmethod
    def random(cls) -> Mixture:
        def weight(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(std=shape[-1] ** -0.5)

        shared = weight(2 * INNER, WIDTH), weight(WIDTH, INNER)
        experts = Experts(weight(COUNT, 2 * INNER, WIDTH), weight(COUNT, WIDTH, INNER), *shared)
        return cls(weight(COUNT, WIDTH), weight(1, WIDTH), experts, weight(WIDTH))

    def route(self, x: torch.Tensor) -> Routing:
        return route(x, self.router, self.shared_gate, TOP_K)

    def __call__(self, residual: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = run_experts(x, self.route(x), self.experts)
        return add_offset_rms_norm(residual, parts, self.norm, EPS)

    def read_bytes(self, x: torch.Tensor) -> int:
        one = self.experts.gate_up[0].nbytes + self.experts.down[0].nbytes
        shared = self.experts.shared_gate_up.nbytes + self.experts.shared_down.nbytes
        return len(self.route(x).experts.unique()) * one + shared + self.router.nbytes


def works() -> Iterator[Work]:
    mixture = Mixture.random()
    for batch, width in VERIFY:
        yield mixture_work("mixture_verify", mixture, batch, width)
    for columns in PREFILL:
        yield mixture_work("mixture_prefill", mixture, 1, columns)


def mixture_work(op: str, mixture: Mixture, batch: int, width: int) -> Work:
    inputs = [
        tuple(torch.empty(batch * width, WIDTH, dtype=torch.bfloat16, device=DEVICE).normal_() for _ in range(2))
        for _ in range(INPUTS)
    ]
    size = sum(mixture.read_bytes(x) for _, x in inputs) // INPUTS
    return Work(
        op,
        MODEL,
        batch,
        width,
        0,
        [partial(mixture, residual, x) for residual, x in inputs],
        size,
        partial(error, mixture, inputs[0][1]),
        grouped_peer(mixture, inputs),
    )


def error(mixture: Mixture, x: torch.Tensor) -> float:
    """Of the sum of a column's parts; infinite where a choice is not the oracle's too often."""
    columns = torch.arange(len(x), device=DEVICE)
    if len(x) > 1024:
        columns = columns[(columns % CHECKED == 0) | (columns == len(x) - 1)]
    routing = mixture.route(x)
    total, _ = mixture(torch.zeros_like(x), x)
    logits = (x[columns].double() @ mixture.router.double().T).to(x.dtype).double()
    best, chosen = (found[:, :TOP_K] for found in logits.softmax(-1).sort(descending=True, stable=True))
    same = (routing.experts[columns].long().sort(-1).values == chosen.sort(-1).values).all(-1)
    if float(same.double().mean()) < ALIKE:
        return float("inf")
    expected = exact(mixture, x[columns], best / best.sum(-1, keepdim=True), chosen)
    return norm_error(total[columns][same], expected[same])


def exact(mixture: Mixture, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """In FP64, an expert after the other."""

    def feed_forward(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=-1)
        return (gate * gate.sigmoid() * up) @ down.double().T

    experts = mixture.experts
    shared = (x.double() @ mixture.shared_gate.double().T).sigmoid()
    total = shared * feed_forward(x, experts.shared_gate_up, experts.shared_down)
    for expert in chosen.unique().tolist():
        rows, choice = (chosen == expert).nonzero(as_tuple=True)
        part = feed_forward(x[rows], experts.gate_up[expert], experts.down[expert])
        total.index_add_(0, rows, part * weights[rows, choice, None])
    return total


def grouped_peer(mixture: Mixture, inputs: list[tuple[torch.Tensor, ...]]) -> Peer:
    calls: list[Callable[[], torch.Tensor]] = [partial(grouped, mixture, residual, x) for residual, x in inputs]
    try:
        calls[0]()
    except (RuntimeError, AttributeError, NotImplementedError) as failure:
        return Peer(f"not run: {failure}")
    return Peer("torch.topk, sort and grouped_mm", calls)


def grouped(mixture: Mixture, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The same by torch's own grouped product, as transformers does it, without a number from the device."""
    experts = mixture.experts
    best, chosen = F.linear(x, mixture.router).float().softmax(-1).topk(TOP_K)
    weights = (best / best.sum(-1, keepdim=True)).to(x.dtype)
    by_expert, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(COUNT, device=x.device), right=True).to(torch.int32)
    columns = order // TOP_K
    gate, up = F.grouped_mm(x[columns], experts.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    parts = F.grouped_mm(F.silu(gate) * up, experts.down.transpose(1, 2), offs=ends)
    total = torch.zeros_like(x).index_add_(0, columns, parts * weights.flatten()[order, None])
    gate, up = F.linear(x, experts.shared_gate_up).chunk(2, dim=-1)
    shared = F.linear(F.silu(gate) * up, experts.shared_down)
    total += F.linear(x, mixture.shared_gate).sigmoid() * shared
    return F.rms_norm(residual + total, (WIDTH,), 1.0 + mixture.norm, EPS)
