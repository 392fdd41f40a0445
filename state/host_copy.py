"""How does a whole checkpoint leave the device and come back at the speed of the bus? In few large copies.

    out    rows of pages and rings -> gathered in a staging buffer on the device -> host buffer, one copy a bufferful
    back   the same the other way round
    what is contiguous already (GDN states, convolution history, hidden) goes without staging

The host buffer is pinned on CUDA, so that copies run at the bus's speed and beside the device's other work. All of it
is enqueued on the current stream, in order with everything else there: what is written to a page later does not reach a
copy that was enqueued before. Nothing is hashed here; `state/codec.py` makes documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kernels.image_copy import image_gather, image_scatter
from state.checkpoint import Checkpoint
from state.errors import StateError
from state.geometry import PAGE_TOKENS
from state.memory import StateMemory

_ALIGNMENT = 64
"""Bytes; a plane in a host buffer begins at a multiple of it, so that it can be seen as numbers of any dtype."""


@dataclass(frozen=True)
class _Plane:
    """`rows`: a plane of a memory as [rows, elements]. `index`: int64, which rows a checkpoint has, in logical order;
    None: one row, number `first`, which moves as it lies. `shape`: the plane's in the host buffer."""

    name: str
    rows: torch.Tensor
    index: torch.Tensor | None
    first: int
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.rows.shape[1] * self.rows.element_size()

    @property
    def count(self) -> int:
        return 1 if self.index is None else len(self.index)


@dataclass(frozen=True)
class HostCopy:
    """A checkpoint's content on the host. `planes`: views of one buffer. `gdn`, `conv`, `hidden`; `ring_keys`,
    `ring_values` in logical order; `target_keys`, ..., `draft_values`, each [pages, layers, 64, Hkv, D].

    `wait` first: the copies may still be on their way. Columns beyond the frontier hold whatever lay there.
    """

    checkpoint: Checkpoint
    planes: dict[str, torch.Tensor]
    size: int
    done: torch.cuda.Event | None

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


class HostTransfer:
    """Moves checkpoints of one memory through a staging buffer of `staging_bytes` on its device. Not thread safe."""

    def __init__(self, memory: StateMemory, staging_bytes: int = 64 << 20) -> None:
        """Raises `StateError` if the buffer cannot hold one page."""
        pools = [memory.target, memory.draft] if memory.draft else [memory.target]
        largest = max(plane[0].nbytes for pool in pools for plane in (pool.keys, pool.values))
        if staging_bytes < largest:
            raise StateError(f"host transfer: staging_bytes is {staging_bytes}, a page's plane needs {largest}")
        self._memory = memory
        self._device = memory.images.gdn.device
        self._staging = torch.empty(staging_bytes, dtype=torch.uint8, device=self._device)

    def size(self, checkpoint: Checkpoint) -> int:
        """Bytes of the host buffer that a checkpoint needs."""
        return sum(_aligned(plane.count * plane.row_bytes) for plane in self._planes(checkpoint))

    def host_buffer(self, size: int) -> torch.Tensor:
        """uint8 [size]; pinned where the device can use that. Making one takes far longer than filling it."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def out(self, checkpoint: Checkpoint, buffer: torch.Tensor) -> HostCopy:
        """Enqueues the copies into `buffer`, uint8 on the host. The checkpoint may be released when this returns."""
        self._memory.check_kept(checkpoint)
        planes: dict[str, torch.Tensor] = {}
        offset = 0
        for plane, part in self._parts(checkpoint, buffer):
            self._copy_out(plane, part)
            planes[plane.name] = part.view(plane.rows.dtype).view(plane.shape)
            offset += _aligned(part.numel())
        return HostCopy(checkpoint, planes, offset, self._event())

    def back(self, copy: HostCopy, buffer: torch.Tensor) -> Checkpoint:
        """A checkpoint of the same content in new places, under the same id. `buffer` is the one of `out`, and must
        stay as it is until the device has done what was enqueued. `CapacityError`; then nothing was taken."""
        copy.wait()
        slot, pages, draft_pages = self._memory.take_for_import(copy.checkpoint.frontier)
        try:
            moved = replace(copy.checkpoint, slot=slot, pages=pages, draft_pages=draft_pages)
            self._memory.images.rings.clear(slot)
            for plane, part in self._parts(moved, buffer):
                self._copy_back(plane, part)
            self._clear_tails(moved)
            return self._memory.adopt(moved)
        except BaseException:
            self._memory.abandon(slot, pages, draft_pages)
            raise

    def _copy_out(self, plane: _Plane, part: torch.Tensor) -> None:
        if plane.index is None:
            part.copy_(plane.rows[plane.first].view(torch.uint8), non_blocking=True)
            return
        for index, staged, host in self._chunks(plane, part):
            image_gather(plane.rows, index, staged.view(plane.rows.dtype).view(len(index), -1))
            host.copy_(staged, non_blocking=True)

    def _copy_back(self, plane: _Plane, part: torch.Tensor) -> None:
        if plane.index is None:
            plane.rows[plane.first].view(torch.uint8).copy_(part, non_blocking=True)
            return
        for index, staged, host in self._chunks(plane, part):
            staged.copy_(host, non_blocking=True)
            image_scatter(plane.rows, index, staged.view(plane.rows.dtype).view(len(index), -1))

    def _chunks(self, plane: _Plane, part: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """As many rows as the staging buffer holds: their indices, and where they lie staged and on the host."""
        assert plane.index is not None
        each = self._staging.numel() // plane.row_bytes
        for start in range(0, plane.count, each):
            index = plane.index[start : start + each]
            size = len(index) * plane.row_bytes
            yield index, self._staging[:size], part[start * plane.row_bytes : start * plane.row_bytes + size]

    def _parts(self, checkpoint: Checkpoint, buffer: torch.Tensor) -> Iterator[tuple[_Plane, torch.Tensor]]:
        """Each plane, and its bytes in the buffer."""
        planes = self._planes(checkpoint)
        wanted = sum(_aligned(plane.count * plane.row_bytes) for plane in planes)
        if buffer.numel() < wanted:
            raise StateError(f"host transfer: the host buffer has {buffer.numel()} bytes, must have {wanted}")
        offset = 0
        for plane in planes:
            size = plane.count * plane.row_bytes
            yield plane, buffer[offset : offset + size]
            offset += _aligned(size)

    def _planes(self, checkpoint: Checkpoint) -> list[_Plane]:
        images, rings = self._memory.images, self._memory.images.rings
        planes = [
            _Plane(name, plane.flatten(1), None, checkpoint.slot, tuple(plane.shape[1:]))
            for name, plane in (("gdn", images.gdn), ("conv", images.conv), ("hidden", images.hidden))
            if plane[0].numel()
        ]
        if rings.layers:
            live = rings.indices(*rings.live(checkpoint.frontier))
            first = (checkpoint.slot * rings.layers + torch.arange(rings.layers, device=self._device)) * rings.window
            index = (first[:, None] + live).flatten()
            for name, plane in (("ring_keys", rings.keys), ("ring_values", rings.values)):
                shape = (rings.layers, len(live), *plane.shape[3:])
                planes.append(_Plane(name, plane.flatten(0, 2).flatten(1), index, 0, shape))
        for kind, pool, pages in (
            ("target", self._memory.target, checkpoint.pages),
            ("draft", self._memory.draft, checkpoint.draft_pages),
        ):
            if pool is None or not pool.keys[0].numel():
                continue
            index = torch.tensor(pages, device=self._device)
            for name, plane in (("keys", pool.keys), ("values", pool.values)):
                planes.append(_Plane(f"{kind}_{name}", plane.flatten(1), index, 0, (len(pages), *plane.shape[1:])))
        return planes

    def _clear_tails(self, checkpoint: Checkpoint) -> None:
        columns = checkpoint.frontier % PAGE_TOKENS
        for pool, pages in ((self._memory.target, checkpoint.pages), (self._memory.draft, checkpoint.draft_pages)):
            if pool is not None and columns:
                pool.keys[pages[-1], :, columns:].zero_()
                pool.values[pages[-1], :, columns:].zero_()

    def _event(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
