"""Rotary frequencies of a model, as its config asks for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.rotary import rotary_frequencies, rotary_tables, yarn_frequencies
from model.config import RotaryConfig


@dataclass(frozen=True)
class Rotary:
    """`frequencies` FP32 [dim / 2]; `factor` multiplies sine and cosine (YaRN's attention factor, else 1); `axes` int64
    [dim / 2], the axis whose position turns each frequency."""

    frequencies: torch.Tensor
    factor: float
    axes: torch.Tensor

    @classmethod
    def of(cls, config: RotaryConfig, device: torch.device | str) -> Rotary:
        axes = torch.tensor(config.axes, device=device)
        yarn = config.yarn
        if yarn is None:
            return cls(rotary_frequencies(config.dim, config.theta, device), 1.0, axes)
        frequencies = yarn_frequencies(
            config.dim,
            config.theta,
            yarn.factor,
            yarn.original_positions,
            yarn.beta_fast,
            yarn.beta_slow,
            yarn.truncate,
            device,
        )
        return cls(frequencies, yarn.attention_factor, axes)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`positions` int64 [B, T], or [B, T, 3] where the axes differ -> (cos, sin), FP32 [B, T, dim / 2]."""
        cos, sin = rotary_tables(positions, self.frequencies, self.factor)
        if positions.dim() == 2:
            return cos, sin
        axis = self.axes.expand(*positions.shape[:2], 1, -1)
        return cos.gather(2, axis)[:, :, 0], sin.gather(2, axis)[:, :, 0]
