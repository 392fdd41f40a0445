"""Targets of the official geometries and their drafters with random weights, made where they lie, and their lanes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from bench.proposal_models import DFLASH2_27B, DFLASH_35B, PUBLIC, VOCABULARY
from kernels.linear import Linear
from model.config import DraftConfig, MoeConfig, RotaryConfig, TargetConfig
from model.drafter import DraftContext, Drafter, DraftRows
from model.heads import ProposalHead
from model.mlp import MoeMlp
from model.target import Columns, Target, TargetState
from state.geometry import PAGE_TOKENS, pages_for

DEVICE = "cuda"
DTYPE = torch.bfloat16
STD = 0.02
GAIN = "linear_attn.norm.weight"
"""A gain that is applied as it is: all others of a target are added to one."""

TARGET_27B = TargetConfig(
    vocab_size=VOCABULARY,
    hidden_size=5120,
    intermediate_size=17408,
    num_layers=64,
    layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention") * 16,
    num_heads=24,
    num_kv_heads=4,
    head_dim=256,
    rms_norm_eps=1e-6,
    rotary=RotaryConfig(theta=1e7, dim=64, sections=(11, 11, 10), interleaved=True, yarn=None),
    gdn_key_heads=16,
    gdn_value_heads=48,
    gdn_key_dim=128,
    gdn_value_dim=128,
    conv_kernel=4,
    max_positions=262144,
    tie_embeddings=False,
    eos_ids=(),
)
TARGET_35B = replace(
    TARGET_27B,
    hidden_size=2048,
    intermediate_size=0,
    num_layers=40,
    layer_types=TARGET_27B.layer_types[:40],
    num_heads=16,
    num_kv_heads=2,
    gdn_value_heads=32,
    moe=MoeConfig(num_experts=256, experts_per_token=8, intermediate_size=512, shared_intermediate_size=512),
)


@dataclass(frozen=True)
class Pair:
    """A target, its drafter, and the K whose rounds are timed."""

    target: TargetConfig
    draft: DraftConfig
    drafts: tuple[int, ...]


MODELS = {"27B": Pair(TARGET_27B, DFLASH2_27B, (7,)), "35B-A3B": Pair(TARGET_35B, DFLASH_35B, (7, 15))}


class RandomWeights:
    """A source of tensors of every name: normal numbers, made where they are to lie."""

    def __contains__(self, name: str) -> bool:
        return True

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        pass

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        destination.normal_(mean=1.0 if name.endswith(GAIN) else 0.0, std=STD)


def random_models(target_config: TargetConfig, draft_config: DraftConfig):
    """(target, drafter) of these geometries; a tiny vocabulary has no rows that are not public."""
    source, public_rows = RandomWeights(), min(PUBLIC, target_config.vocab_size)
    target = Target.load(source, target_config, public_rows, torch.device(DEVICE), DTYPE)
    causal = (False,) * draft_config.num_layers
    return target, Drafter.load(source, draft_config, causal, target.embedding, ProposalHead.full(target))


def product_weights(target: Target) -> list[tuple[torch.Tensor, int]]:
    """All matrices that a column of a forward is multiplied with, and how many such products it has: one expert stands
    for as many as are chosen. The head is not among them."""
    found: list[tuple[torch.Tensor, int]] = []
    for block in target.blocks:
        parts = [block.mixer] if isinstance(block.mlp, MoeMlp) else [block.mixer, block.mlp]
        found += [(value.weight, 1) for part in parts for value in vars(part).values() if isinstance(value, Linear)]
        if isinstance(block.mlp, MoeMlp):
            mlp, experts = block.mlp, block.mlp.experts
            found += [(mlp.router, 1), (mlp.shared_gate, 1), (experts.shared_gate_up, 1), (experts.shared_down, 1)]
            found += [(experts.gate_up[0], mlp.top_k), (experts.down[0], mlp.top_k)]
    return found


@dataclass(frozen=True)
class Lanes:
    """Rows of a batch at one frontier, each with pages and an image of its own; every number is random."""

    state: TargetState
    page_table: torch.Tensor
    slots: torch.Tensor
    frontier: torch.Tensor

    @classmethod
    def at(cls, config: TargetConfig, batch: int, frontier: int, room: int) -> Lanes:
        """`room`: columns that may follow the frontier."""
        width = pages_for(frontier + room)
        planes = (batch * width, len(config.full_layers), PAGE_TOKENS, config.num_kv_heads, config.head_dim)
        images = (batch, len(config.gdn_layers))
        delta = (config.gdn_value_heads, config.gdn_key_dim, config.gdn_value_dim)
        state = TargetState(
            keys=torch.randn(planes, dtype=DTYPE, device=DEVICE),
            values=torch.randn(planes, dtype=DTYPE, device=DEVICE),
            recurrent=torch.randn(*images, *delta, device=DEVICE) / 4,
            history=torch.randn(*images, config.conv_channels, config.conv_kernel - 1, dtype=DTYPE, device=DEVICE),
        )
        return cls(
            state,
            torch.randperm(batch * width, device=DEVICE).view(batch, width),
            torch.randperm(batch, device=DEVICE),
            torch.full((batch,), frontier, device=DEVICE),
        )

    def columns(self, token_ids: torch.Tensor, start: torch.Tensor | None = None) -> Columns:
        """All of `token_ids` [B, T] live, from `start` on, or from the frontier."""
        valid = torch.full_like(self.slots, token_ids.shape[1])
        return Columns(token_ids, self.frontier if start is None else start, valid, self.page_table, self.slots)


def draft_context(config: DraftConfig, lanes: Lanes) -> DraftContext:
    """Empty rings, and empty pages if a layer of the drafter has them."""
    heads = config.num_kv_heads, config.head_dim

    def planes(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.zeros(*shape, *heads, dtype=DTYPE, device=DEVICE)
        return keys, keys.to(torch.float16)

    rings = planes(len(lanes.slots), len(config.sliding_layers), config.window or 0)
    if not config.full_layers:
        return DraftContext(*rings, None, None)
    return DraftContext(*rings, *planes(lanes.page_table.numel(), len(config.full_layers), PAGE_TOKENS))


def draft_rows(config: DraftConfig, lanes: Lanes) -> DraftRows:
    return DraftRows(lanes.slots, lanes.page_table if config.full_layers else lanes.page_table[:, :0])
