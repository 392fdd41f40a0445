"""Rotary frequencies of a model, as its config asks for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.rotary import rotary_frequencies, rotary_tables, yarn_frequencies
from model.config import RotaryConfig


@dataclass(frozen=True)
class Rotary:
    """`frequencies` FP32 [dim / 2]; `factor` multiplies sine and cosine (YaRN's attention factor, else 1)."""

    frequencies: torch.Tensor
    factor: float

    @classmethod
    def of(cls, config: RotaryConfig, device: torch.device | str) -> Rotary:
        yarn = config.yarn
        if yarn is None:
            return cls(rotary_frequencies(config.dim, config.theta, device), 1.0)
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
        return cls(frequencies, yarn.attention_factor)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`positions` int64 [...] -> (cos, sin), FP32 [..., dim / 2]."""
        return rotary_tables(positions, self.frequencies, self.factor)
