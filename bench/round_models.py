"""A target of 27B's geometry and its DFlash2 drafter with random weights, made where they lie, and lanes for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.proposal_models import DFLASH2_27B, PUBLIC, VOCABULARY
from kernels.linear import Linear
from model.config import DraftConfig, RotaryConfig, TargetConfig
from model.drafter import DraftContext, Drafter, DraftRows
from model.heads import ProposalHead
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


class RandomWeights:
    """A source of tensors of every name: normal numbers, made where they are to lie."""

    def __contains__(self, name: str) -> bool:
        return True

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        pass

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        destination.normal_(mean=1.0 if name.endswith(GAIN) else 0.0, std=STD)


def random_models(target_config: TargetConfig = TARGET_27B, draft_config: DraftConfig = DFLASH2_27B):
    """(target, drafter) of these geometries; a tiny vocabulary has no rows that are not public."""
    source, public_rows = RandomWeights(), min(PUBLIC, target_config.vocab_size)
    target = Target.load(source, target_config, public_rows, torch.device(DEVICE), DTYPE)
    causal = (False,) * draft_config.num_layers
    return target, Drafter.load(source, draft_config, causal, target.embedding, ProposalHead.full(target))


def product_weights(target: Target) -> list[torch.Tensor]:
    """All matrices that a column of a forward is multiplied with, the head not among them."""
    parts = [part for block in target.blocks for part in (block.mixer, block.mlp)]
    return [value.weight for part in parts for value in vars(part).values() if isinstance(value, Linear)]


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


def draft_context(config: DraftConfig, batch: int) -> DraftContext:
    """Empty rings of a drafter whose layers are all local."""
    rings = (batch, len(config.sliding_layers), config.window or 0, config.num_kv_heads, config.head_dim)
    keys = torch.zeros(rings, dtype=DTYPE, device=DEVICE)
    return DraftContext(keys, torch.zeros(rings, dtype=torch.float16, device=DEVICE), None, None)


def draft_rows(lanes: Lanes) -> DraftRows:
    return DraftRows(lanes.slots, lanes.page_table[:, :0])
