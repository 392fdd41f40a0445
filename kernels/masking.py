"""Masks over the vocabulary, packed: one bit a token, so that they cross to the device in an eighth of their size, and
only of the lanes that have one."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenMasks:
    """`allowed` uint8 [G, W, N]: bit v % 8 of byte v // 8 for token v, 8 N >= V; `of_lane` int64 [B]: which of the G is
    a lane's, -1 where it may say anything."""

    allowed: torch.Tensor
    of_lane: torch.Tensor

    def forbidden(self, vocabulary: int) -> torch.Tensor:
        """Bool [B, W, V]."""
        unpacked = ~unpack(self.allowed, vocabulary)[self.of_lane.clamp(min=0)]
        return unpacked & (self.of_lane >= 0)[:, None, None]


def unpack(packed: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """`packed` uint8 [..., N] as above -> bool [..., V]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    flags = (packed[..., None] >> shifts) & 1
    return flags.flatten(-2)[..., :vocabulary].to(torch.bool)


def pack(flags: torch.Tensor) -> torch.Tensor:
    """Bool [..., V] -> uint8 [..., N], what `unpack` takes back."""
    bits = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (bits << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(-1, dtype=torch.uint8)
