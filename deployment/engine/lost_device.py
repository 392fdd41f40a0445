"""Which faults does an engine not survive? Those after which its device does nothing more for this process."""

from __future__ import annotations

import torch


def device_is_lost(error: Exception, device: torch.device) -> bool:
    """Whether `error`, or what lies behind it, has ended the use of `device`: an error of CUDA stays until the process
    ends, and every call after it fails. Not so where memory is short. A kernel's launch or a library may say it in
    other words than torch: then the card is asked, which waits for what runs on it."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, torch.AcceleratorError):
        return "out of memory" not in str(error)
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
