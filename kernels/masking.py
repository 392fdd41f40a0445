"""Masks over the vocabulary, packed: one bit a token, so that they cross to the device in an eighth of their size."""

from __future__ import annotations

import torch


def unpack(packed: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """`packed` uint8 [..., N], bit v % 8 of byte v // 8 for token v, 8 N >= V -> bool [..., V]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    flags = (packed[..., None] >> shifts) & 1
    return flags.flatten(-2)[..., :vocabulary].to(torch.bool)
