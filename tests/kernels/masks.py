"""Masks as the operators take them, from plain ones."""

from __future__ import annotations

import torch

from kernels.masking import TokenMasks, pack


def masks_of(forbidden: torch.Tensor) -> TokenMasks:
    """Bool [B, W, V] -> a mask for every lane."""
    return TokenMasks(pack(~forbidden), torch.arange(len(forbidden)))
