"""How does memory that is shared between processes become pinned memory of this process's card?"""

from __future__ import annotations

from typing import Any, cast

import torch

from state.errors import StateError


class PinnedMemory:
    """Memory that is pinned until `release`. Tensors made of it (`torch.frombuffer`) count as pinned: they are host
    buffers as `HostTransfer` wants them."""

    def __init__(self, address: int) -> None:
        self._address = address

    def release(self) -> None:
        """No copy from or to it may be on its way."""
        _check("unpinned", _cudart().cudaHostUnregister(self._address))


def pin(memory: memoryview) -> PinnedMemory | None:
    """Pins memory, so that copies between it and the card run at the bus's speed and beside other work. None, and
    nothing was done, where there is no CUDA device. Raises `StateError` if it is read-only or the driver refuses."""
    if memory.readonly:
        raise StateError("memory to be pinned is mapped read-only, must be writable")
    if not torch.cuda.is_available():
        return None
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    _check("pinned", _cudart().cudaHostRegister(address, memory.nbytes, 0))
    return PinnedMemory(address)


def _cudart() -> Any:
    return cast(Any, torch.cuda).cudart()


def _check(what: str, code: Any) -> None:
    if int(code):
        raise StateError(f"memory cannot be {what}: the CUDA runtime gave error {int(code)}")
