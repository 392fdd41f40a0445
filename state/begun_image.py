"""How is an image read and hashed piece by piece? As its segment's bytes, which are those that `safetensors` writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import safetensors.torch
import torch

from state.image_pieces import ImagePart, ImagePiece

Tensors = dict[str, torch.Tensor]


class BegunImage:
    """An image whose first pieces were read; it must stay as it is until the last one was."""

    def __init__(self, serial: int, tensors: Tensors) -> None:
        """`serial`: the checkpoint's."""
        self.serial = serial
        head, order = _head(tensors)
        self._parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
        self._parts += [tensors[name].contiguous().reshape(-1).view(torch.uint8) for name in order]
        self.size = sum(part.numel() for part in self._parts)
        self._digest = hashlib.sha256()
        self._read = 0

    @property
    def read(self) -> ImagePart:
        return ImagePart(self.serial, self._read)

    def next_piece(self, most: int) -> ImagePiece:
        offset, end = self._read, min(self.size, self._read + max(1, most))
        data = b"".join(self._bytes(offset, end))
        self._digest.update(data)
        self._read = end
        return ImagePiece(self.serial, offset, data, self._digest.digest() if end == self.size else None)

    def _bytes(self, start: int, end: int) -> Iterator[bytes]:
        at = 0
        for part in self._parts:
            here = part[max(0, start - at) : max(0, end - at)]
            if here.numel():
                yield here.cpu().numpy().tobytes()
            at += part.numel()


def _head(tensors: Tensors) -> tuple[bytes, tuple[str, ...]]:
    """What `safetensors` writes before the tensors, and in which order these follow. The library says order and names
    of dtypes; it would copy all of the tensors to say more."""
    small = safetensors.torch.save({name: torch.zeros(1, dtype=tensor.dtype) for name, tensor in tensors.items()})
    described: dict[str, dict[str, Any]] = json.loads(small[8 : 8 + int.from_bytes(small[:8], "little")])
    order = tuple(sorted(described, key=lambda name: described[name]["data_offsets"]))
    at = 0
    for name in order:
        described[name] |= {"shape": list(tensors[name].shape), "data_offsets": [at, at + tensors[name].nbytes]}
        at += tensors[name].nbytes
    text = json.dumps({name: described[name] for name in order}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order
