"""Feed-forward halves of a target's blocks: dense, or a mixture of experts with a shared one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.experts import Experts, run_experts
from kernels.gated_mlp import silu_product
from kernels.linear import Linear
from kernels.router import route
from model.config import MoeConfig, TargetConfig
from model.reader import WeightReader


@dataclass(frozen=True)
class DenseMlp:
    """`gate_up` [2 I, H], gate rows first; `down` [H, I]."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class MoeMlp:
    """`router` [E, H] chooses `top_k` of the `experts`; `shared_gate` [1, H] scales the shared one."""

    top_k: int
    router: torch.Tensor
    shared_gate: torch.Tensor
    experts: Experts


def run_mlp(mlp: DenseMlp | MoeMlp, x: torch.Tensor) -> torch.Tensor:
    """`x` [B, T, H], normalised -> what is added to the residual: [B, T, H], or in parts [B, T, P, H] whose sum is
    rounded first."""
    if isinstance(mlp, DenseMlp):
        return mlp.down.parts(silu_product(mlp.gate_up(x)))
    columns = x.flatten(0, 1)
    parts = run_experts(columns, route(columns, mlp.router, mlp.shared_gate, mlp.top_k), mlp.experts)
    return parts.unflatten(0, x.shape[:2])


def read_mlp(reader: WeightReader, prefix: str, config: TargetConfig) -> DenseMlp | MoeMlp:
    """Reads `{prefix}mlp.*`. Fused expert files and files with one tensor an expert are both taken."""
    name = f"{prefix}mlp."
    if config.moe is None:
        return _read_dense(reader, name, config.hidden_size, config.intermediate_size)
    moe, hidden = config.moe, config.hidden_size
    shared = _read_dense(reader, f"{name}shared_expert.", hidden, moe.shared_intermediate_size)
    return MoeMlp(
        top_k=moe.experts_per_token,
        router=reader.tensor(f"{name}gate.weight", moe.num_experts, hidden),
        shared_gate=reader.tensor(f"{name}shared_expert_gate.weight", 1, hidden),
        experts=Experts(
            gate_up=_read_gate_up(reader, name, moe, hidden),
            down=_read_down(reader, name, moe, hidden),
            shared_gate_up=shared.gate_up.weight,
            shared_down=shared.down.weight,
        ),
    )


def _read_dense(reader: WeightReader, name: str, hidden: int, inner: int) -> DenseMlp:
    return DenseMlp(
        Linear(reader.rows(hidden, (f"{name}gate_proj.weight", inner), (f"{name}up_proj.weight", inner))),
        Linear(reader.tensor(f"{name}down_proj.weight", hidden, inner)),
    )


def _read_gate_up(reader: WeightReader, name: str, moe: MoeConfig, hidden: int) -> torch.Tensor:
    inner = moe.intermediate_size
    if f"{name}experts.gate_up_proj" in reader:
        return reader.tensor(f"{name}experts.gate_up_proj", moe.num_experts, 2 * inner, hidden)
    one = f"{name}experts.{{}}.{{}}_proj.weight"
    parts = [[(one.format(e, "gate"), inner), (one.format(e, "up"), inner)] for e in range(moe.num_experts)]
    return reader.stacked(parts, hidden)


def _read_down(reader: WeightReader, name: str, moe: MoeConfig, hidden: int) -> torch.Tensor:
    inner = moe.intermediate_size
    if f"{name}experts.down_proj" in reader:
        return reader.tensor(f"{name}experts.down_proj", moe.num_experts, hidden, inner)
    parts = [[(f"{name}experts.{e}.down_proj.weight", hidden)] for e in range(moe.num_experts)]
    return reader.stacked(parts, inner)
