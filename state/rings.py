"""What does a draft ring hold? Context K and V of a local draft layer: the last S positions, cyclic."""

from __future__ import annotations

import torch

from kernels.ring import live_interval, ring_slots
from state.errors import StateError


class DraftRings:
    """The rings of all local draft layers, one set a slot. Position p lies at index p mod S.

    `keys`, `values`: [slots, layers, S, Hkv, D]. For a context frontier F the live interval is [max(0, F-S), F);
    bytes outside it are unreachable, whatever they are. Without local layers, layers and S are 0.
    """

    def __init__(
        self,
        slots: int,
        layers: int,
        window: int,
        kv_heads: int,
        head_dim: int,
        key_dtype: torch.dtype,
        value_dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = layers
        self.window = window if layers else 0
        shape = (slots, layers, self.window, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=key_dtype, device=device)
        self.values = torch.zeros(shape, dtype=value_dtype, device=device)

    def live(self, frontier: int) -> tuple[int, int]:
        """The positions [start, end) that are readable at a context frontier."""
        return live_interval(frontier, self.window)

    def indices(self, start: int, end: int) -> torch.Tensor:
        """Ring indices of positions [start, end), in logical order: int64 [end - start], on the rings' device.

        At most S positions, since two of them must not lie at one index (`StateError`).
        """
        if end - start > self.window:
            raise StateError(f"ring: positions [{start}, {end}) are {end - start}, more than the window {self.window}")
        return ring_slots(start, end, self.window, self.keys.device)

    def export_slot(self, slot: int, frontier: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the live interval in logical order, copied: [layers, n, Hkv, D] each, n = min(F, S)."""
        indices = self.indices(*self.live(frontier))
        return self.keys[slot].index_select(1, indices), self.values[slot].index_select(1, indices)

    def import_slot(self, slot: int, frontier: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes what `export_slot` gave at the same frontier; bytes outside the live interval stay as they are."""
        indices = self.indices(*self.live(frontier))
        device = self.keys.device
        self.keys[slot].index_copy_(1, indices, keys.to(device))
        self.values[slot].index_copy_(1, indices, values.to(device))

    def copy(self, source: int, destination: int) -> None:
        """Copies all rings of a slot."""
        self.keys[destination].copy_(self.keys[source])
        self.values[destination].copy_(self.values[source])

    def clear(self, slot: int) -> None:
        self.keys[slot].zero_()
        self.values[slot].zero_()
