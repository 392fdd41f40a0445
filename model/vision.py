"""The vision tower of Qwen3.5: a media item's pixels -> embeddings that stand in place of its placeholders.

    x = patches W + b + positions                          a learned grid, resampled bilinearly to the item's
    x <- x + proj(attention(layer_norm(x)));  x <- x + fc2(gelu_tanh(fc1(layer_norm(x))))            per block
    embeddings = fc2(gelu(fc1(layer_norm(x), merge^2 side by side)))

Attention sees one frame, without a mask; queries and keys are turned over the whole head, its first half of pairs by
the patch's row and the second by its column, in FP32. Patches lie in the order in which the merger takes them: those of
one embedding side by side.

Source: research of transformers' Qwen3.5 (names, order of a patch's values, rotary, norms with an epsilon of 1e-6).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.rotary import apply_rotary, rotary_frequencies, rotary_tables
from model.media import MediaItem
from model.media_rules import MediaRules
from model.reader import WeightReader
from model.vision_config import VisionConfig
from model.weights import WeightFiles

_EPSILON = 1e-6
_MAX_PATCHES = 16384
"""Patches that run together, unless one frame has more: what a long video's activations take stays bounded."""


@dataclass(frozen=True)
class Affine:
    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class VisionBlock:
    norm1: Affine
    qkv: Affine
    projection: Affine
    norm2: Affine
    fc1: Affine
    fc2: Affine


@dataclass(frozen=True)
class Merger:
    norm: Affine
    fc1: Affine
    fc2: Affine


class Tower:
    """Weights and the one pass, on one device, in one dtype. `positions` [side * side, D], by rows."""

    def __init__(
        self,
        config: VisionConfig,
        rules: MediaRules,
        patch: Affine,
        positions: torch.Tensor,
        blocks: tuple[VisionBlock, ...],
        merger: Merger,
    ) -> None:
        self.config = config
        self.patch = patch
        self.positions = positions
        self.blocks = blocks
        self.merger = merger
        device = positions.device
        self._frequencies = rotary_frequencies(config.head_dim // 2, config.rotary_theta, device)
        self._mean, self._std = (255 * torch.tensor(v, device=device)[:, None, None] for v in (rules.mean, rules.std))

    @staticmethod
    def is_in(files: WeightFiles) -> bool:
        """Whether a checkpoint whose config has a tower holds one: some are converted for text alone."""
        return any(name.startswith("visual.") for name in files.names())

    @classmethod
    def load(
        cls, files: WeightFiles, config: VisionConfig, rules: MediaRules, device: torch.device, dtype: torch.dtype
    ) -> Tower:
        """Reads all `visual.` tensors by their Hugging Face names. Raises ModelError for a missing or misshapen one."""

        def affine(name: str, *shape: int) -> Affine:
            weight = reader.tensor(f"visual.{name}.weight", *shape)
            return Affine(weight, reader.tensor(f"visual.{name}.bias", shape[0]))

        width, inner, merged = config.hidden_size, config.intermediate_size, config.hidden_size * config.merge**2

        def block(i: int) -> VisionBlock:
            name = f"blocks.{i}"
            return VisionBlock(
                norm1=affine(f"{name}.norm1", width),
                qkv=affine(f"{name}.attn.qkv", 3 * width, width),
                projection=affine(f"{name}.attn.proj", width, width),
                norm2=affine(f"{name}.norm2", width),
                fc1=affine(f"{name}.mlp.linear_fc1", inner, width),
                fc2=affine(f"{name}.mlp.linear_fc2", width, inner),
            )

        with WeightReader(files, device, dtype) as reader:
            patch = affine("patch_embed.proj", width, 3, config.temporal_patch, config.patch, config.patch)
            positions = reader.tensor("visual.pos_embed.weight", config.position_side**2, width)
            blocks = tuple(block(i) for i in range(config.depth))
            merger = Merger(
                affine("merger.norm", width),
                affine("merger.linear_fc1", merged, merged),
                affine("merger.linear_fc2", config.output_size, merged),
            )
        return cls(config, rules, Affine(patch.weight.flatten(1), patch.bias), positions, blocks, merger)

    def encode(self, item: MediaItem) -> torch.Tensor:
        """[item.embeddings, H]: frame by frame, each by rows. A pure function of the item."""
        config = self.config
        rows, columns = config.merge * item.rows, config.merge * item.columns
        positions = self._positions(rows, columns)
        tables = self._tables(rows, columns)
        together = max(1, _MAX_PATCHES // (rows * columns)) * config.temporal_patch
        parts = [self._encode(self.patches(frames), positions, tables) for frames in item.pixels.split(together)]
        return torch.cat(parts)

    def patches(self, frames: torch.Tensor) -> torch.Tensor:
        """uint8 `frames` [n, 3, H, W] -> FP32 [ceil(n / temporal patch), patches of a frame, values of a patch],
        normalised. The last frame is repeated where the last group lacks one: an image is its own next frame."""
        config = self.config
        frames = frames.to(self.positions.device)
        frames = torch.cat((frames, frames[-1:].expand(-len(frames) % config.temporal_patch, -1, -1, -1)))
        values = (frames.float() - self._mean) / self._std
        values = values.unflatten(0, (-1, config.temporal_patch))
        values = values.unflatten(4, (-1, config.merge, config.patch)).unflatten(3, (-1, config.merge, config.patch))
        # [time, frame, channel, rows, merged row, y, columns, merged column, x]
        return values.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).flatten(5).flatten(1, 4)

    def _encode(
        self, patches: torch.Tensor, positions: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        x = _linear(patches.to(self.positions.dtype), self.patch) + positions
        for block in self.blocks:
            x = x + self._attention(block, _norm(x, block.norm1), tables)
            inner = F.gelu(_linear(_norm(x, block.norm2), block.fc1), approximate="tanh")
            x = x + _linear(inner, block.fc2)
        merged = _norm(x, self.merger.norm).reshape(-1, self.merger.fc1.weight.shape[1])
        return _linear(F.gelu(_linear(merged, self.merger.fc1)), self.merger.fc2)

    def _attention(
        self, block: VisionBlock, n: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        heads = _linear(n, block.qkv).unflatten(-1, (3, self.config.num_heads, self.config.head_dim))
        q, k, v = heads.unbind(2)  # [frames, patches, heads, head_dim] each
        q, k = (apply_rotary(x.float(), *tables).to(v.dtype) for x in (q, k))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return _linear(out.transpose(1, 2).flatten(2), block.projection)

    def _positions(self, rows: int, columns: int) -> torch.Tensor:
        """The learned grid, corners on corners, in FP32 until it is added: [rows * columns, D]."""
        side = self.config.position_side
        grid = self.positions.float().T.unflatten(1, (side, side))[None]
        grid = F.interpolate(grid, size=(rows, columns), mode="bilinear", align_corners=True)[0]
        return self._in_merge_order(grid.permute(1, 2, 0)).to(self.positions.dtype)

    def _tables(self, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, FP32 [rows * columns, head_dim / 2]."""
        y, x = (torch.arange(n, device=self.positions.device) for n in (rows, columns))
        places = self._in_merge_order(torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1))
        cos, sin = rotary_tables(places.contiguous(), self._frequencies)
        return cos.flatten(1), sin.flatten(1)

    def _in_merge_order(self, grid: torch.Tensor) -> torch.Tensor:
        """[rows, columns, n] -> [rows * columns, n]."""
        merge = self.config.merge
        blocks = grid.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))
        return blocks.transpose(1, 2).flatten(0, 3)


def _linear(x: torch.Tensor, affine: Affine) -> torch.Tensor:
    return F.linear(x, affine.weight, affine.bias)


def _norm(x: torch.Tensor, affine: Affine) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], affine.weight, affine.bias, _EPSILON)
