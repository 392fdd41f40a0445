"""How numbers of the host get onto the device: without waiting for what the device is still doing."""

from __future__ import annotations

import torch


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy through page-locked memory, which the allocator keeps until it has arrived; a CPU's tensor stays itself.

    A copy from other memory would first wait for everything that runs on the card."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
