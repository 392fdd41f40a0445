"""Cyclic storage of a draft layer's context: position p lies in slot p mod S of a ring of S slots.

At a context frontier F the live interval is [max(0, F - S), F); bytes outside it are unreachable, whatever they are. A
ring is written only with committed positions, so it has no undo.

Source: specification (ring intervals and slots; chunks longer than a ring).
"""

from __future__ import annotations

import torch


def live_interval(frontier: int, window: int) -> tuple[int, int]:
    """Positions [start, end) that a ring of `window` slots holds at `frontier`."""
    return max(0, frontier - window), frontier


def ring_slots(start: int, end: int, window: int, device: torch.device | str) -> torch.Tensor:
    """Slots of positions [start, end), in logical order: int64 [end - start], end - start <= window."""
    return torch.arange(start, end, device=device) % max(window, 1)


def read_ring(ring: torch.Tensor, frontier: int) -> torch.Tensor:
    """The live interval of one layer of one sequence, in logical order: `ring` [S, Hkv, D] -> [min(F, S), Hkv, D]."""
    window = ring.shape[0]
    return ring[ring_slots(*live_interval(frontier, window), window, ring.device)]


def write_ring(
    ring: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, start: torch.Tensor, counts: torch.Tensor
) -> None:
    """Writes the first counts[b] of `rows` [B, T, Hkv, D] at positions start[b] + i of one layer's rings
    [sequences, S, Hkv, D]; of more than S rows only the last S, so that no two go to one slot. `slots` (the rows'
    sequences), `start`, `counts` int64 [B]. Rounds to the ring's dtype. In place."""
    window = ring.shape[1]
    column = torch.arange(rows.shape[1], device=rows.device)
    live = (column < counts[:, None]) & (column >= counts[:, None] - window)
    batch, column = live.nonzero(as_tuple=True)
    ring[slots[batch], (start[batch] + column) % window] = rows[batch, column].to(ring.dtype)
