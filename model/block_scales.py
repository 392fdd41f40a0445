"""Block-scaled FP8 checkpoints: a matrix of float8 values, and one scale for each block of them.

    W[r, c] = float8[r, c] * scale_inv[r // block rows, c // block columns]          in FP32, then rounded to the dtype

Which tensors are stored so, the files say: `x.weight` of F8_E4M3 has `x.weight_scale_inv` beside it. Weights are
computed with in the model's dtype: activations are never rounded to FP8.

Source: research of the family's FP8 checkpoints (`quantization_config` with quant_method fp8, 128 x 128 blocks).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from model.fields import Fields, read_json

FP8 = "F8_E4M3"


@dataclass(frozen=True)
class BlockScales:
    """How many rows and columns of a matrix share one scale."""

    rows: int
    columns: int

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a weight [..., R, C]: the last block of an axis may be cut."""
        *leading, rows, columns = weight
        return (*leading, -(-rows // self.rows), -(-columns // self.columns))

    def dequantise(self, weight: torch.Tensor, scales: torch.Tensor, destination: torch.Tensor) -> None:
        """`weight` [..., R, C] times its `scales`, into `destination` of its shape, one row of blocks at a time."""
        columns = weight.shape[-1]
        for i in range(scales.shape[-2]):
            rows = slice(i * self.rows, (i + 1) * self.rows)
            scale = scales[..., i : i + 1, :].float().repeat_interleave(self.columns, dim=-1)[..., :columns]
            destination[..., rows, :] = weight[..., rows, :].float() * scale


def read_block_scales(fields: Fields) -> BlockScales | None:
    """`quantization_config`; None without one. Raises ModelError for every other way to quantise."""
    given = fields.mapping("quantization_config")
    if given is None:
        return None
    quantisation = Fields(f"{fields.label}: quantization_config", given)
    if quantisation.text("quant_method") != "fp8":
        quantisation.fail(f"quant_method is {quantisation.raw('quant_method')!r}, but must be 'fp8'")
    quantisation.refuse("fmt", ("e4m3",), "weights are float8 e4m3")
    quantisation.refuse("scale_fmt", ("float",), "scales are floating-point numbers")
    quantisation.refuse("expert_dtype", ("fp8",), "experts are stored as all other weights are")
    quantisation.refuse("activation_scheme", ("dynamic",), "activations are not quantised, and have no scales")
    block = quantisation.ids("weight_block_size")
    if block is None or len(block) != 2 or 0 in block:
        shown = quantisation.raw("weight_block_size")
        quantisation.fail(f"weight_block_size is {shown!r}, but must be two whole numbers above 0")
    return BlockScales(*block)


def load_block_scales(directory: Path) -> BlockScales | None:
    """The block of a directory's FP8 weights; None where its config does not speak of any. Raises ModelError."""
    path = directory / "config.json"
    if not path.exists():
        return None
    top = read_json(path)
    label = f"target config ({path})"
    return read_block_scales(Fields(label, top, Fields(label, top).mapping("text_config") or {}))
