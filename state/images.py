"""Where does the fixed-size part of a sequence's state lie? In an image: one slot in each of these planes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from state.errors import CapacityError, StateError
from state.geometry import StateGeometry
from state.rings import DraftRings


class ImagePool:
    """A fixed number of images. Running lanes and checkpoints hold one slot each; slots are never shared.

    Planes: `gdn` [slots + 1, Lg, Hv, Dk, Dv] FP32, `conv` [slots + 1, Lg, C, history], `hidden` [slots + 1, H]
    (continuation hidden of token F-1), `rings` (K and V of local draft layers). Nobody ever holds the last slot,
    `dead`: a batch's rows that no sequence is in stand there.
    """

    name = "images"

    def __init__(self, geometry: StateGeometry, slots: int, device: torch.device | str = "cpu") -> None:
        if slots < 1:
            raise StateError(f"{self.name}: a pool of {slots} slots, must have at least 1")
        g, places = geometry, slots + 1
        gdn_shape = (places, g.gdn_layers, g.gdn_heads, g.gdn_key_dim, g.gdn_value_dim)
        self.gdn = torch.zeros(gdn_shape, dtype=torch.float32, device=device)
        conv_shape = (places, g.gdn_layers, g.conv_channels, g.conv_history)
        self.conv = torch.zeros(conv_shape, dtype=g.conv_dtype, device=device)
        self.hidden = torch.zeros((places, g.hidden_size), dtype=g.hidden_dtype, device=device)
        self.rings = DraftRings(
            places,
            g.ring_layers,
            g.window,
            g.draft_kv_heads,
            g.draft_head_dim,
            g.ring_key_dtype,
            g.ring_value_dtype,
            device,
        )
        self._used = [False] * slots
        self._free = list(range(slots - 1, -1, -1))
        self.changes = 0
        """Counts what was taken and given back."""

    @property
    def slots(self) -> int:
        """Images in all, free or not."""
        return len(self._used)

    @property
    def dead(self) -> int:
        """The slot of nobody."""
        return self.slots

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Takes a slot (`CapacityError` if there is none). Its content is whatever was there before."""
        if not self._free:
            raise CapacityError(self.name, 1, 0)
        self.changes += 1
        slot = self._free.pop()
        self._used[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Gives a slot back. Raises `StateError` if it is free already."""
        if not self._used[slot]:
            raise StateError(f"{self.name}: slot {slot} is released, but it is free already")
        self.changes += 1
        self._used[slot] = False
        self._free.append(slot)

    def copy(self, source: int, destination: int) -> None:
        """Copies a whole image, its rings included."""
        for plane in (self.gdn, self.conv, self.hidden):
            plane[destination].copy_(plane[source])
        self.rings.copy(source, destination)

    def clear(self, slot: int) -> None:
        """Sets a whole image to zero: the state before the first token."""
        for plane in (self.gdn, self.conv, self.hidden):
            plane[slot].zero_()
        self.rings.clear(slot)

    def check_slots(self, held: Iterable[int]) -> None:
        """Compares the books with all slots that are held. Raises `StateError` naming the slot."""
        holders = [0] * self.slots
        for slot in held:
            holders[slot] += 1
        for slot, (used, count) in enumerate(zip(self._used, holders, strict=True)):
            if count != int(used):
                raise StateError(f"{self.name}: slot {slot} has {count} holders, but the books say {int(used)}")
        if sorted(self._free) != [slot for slot, count in enumerate(holders) if count == 0]:
            raise StateError(f"{self.name}: the free list is not the set of slots without a holder")
