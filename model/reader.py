"""Weights on their way from files to a device: one tensor at a time, straight to its place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model.weights import WeightFiles


class WeightReader:
    """Reads tensors by name as `dtype` on `device`. Every method raises ModelError for a missing or misshapen one.

    Each tensor is copied from the mapped file to its final place, also where the model keeps several fused. On the
    `meta` device names and shapes are checked, and no data is read.
    """

    def __init__(self, files: WeightFiles, device: torch.device, dtype: torch.dtype) -> None:
        self._files = files
        self._device = device
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor of exactly this shape."""
        return self._filled(torch.empty(shape, dtype=dtype or self._dtype, device=self._device), name)

    def rows(self, columns: int, *parts: tuple[str, int]) -> torch.Tensor:
        """Matrices stacked by rows: `parts` are (name, rows) -> [sum of rows, columns]."""
        return self.stacked([parts], columns)[0]

    def stacked(self, entries: Sequence[Sequence[tuple[str, int]]], columns: int) -> torch.Tensor:
        """Several such stacks of one height -> [entries, sum of rows, columns]."""
        height = sum(rows for _, rows in entries[0])
        fused = torch.empty(len(entries), height, columns, dtype=self._dtype, device=self._device)
        for index, parts in enumerate(entries):
            start = 0
            for name, rows in parts:
                self._filled(fused[index, start : start + rows], name)
                start += rows
        return fused

    def _filled(self, destination: torch.Tensor, name: str) -> torch.Tensor:
        if self._device.type == "meta":
            self._files.check(name, tuple(destination.shape))
        else:
            self._files.read_into(name, destination)
        return destination
