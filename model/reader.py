"""Weights on their way from files to a device: each tensor straight to its place."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

CARD_READERS = 2
"""Threads that copy to a card: from files in memory one brings 4.1 GB/s, two 5.8, and more no more."""


class WeightSource(Protocol):
    """Where a model's tensors come from: a directory's files (`WeightFiles`), or whoever makes them up."""

    def __contains__(self, name: str) -> bool: ...

    def check(self, name: str, shape: tuple[int, ...]) -> object:
        """Raises ModelError unless `read_into` would fill a tensor of this shape."""
        ...

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        """Fills `destination`, in its dtype and where it lies. Raises ModelError."""
        ...


class WeightReader:
    """Reads tensors by name as `dtype` on `device`. Every method raises ModelError for a missing or misshapen one.

        with WeightReader(files, device, dtype) as reader:
            weight = reader.tensor("norm.weight", 320)
        ...                                                         weight has its numbers from here on

    Each tensor is copied from the mapped file to its final place, also where the model keeps several fused: by
    `readers` threads at a time, by default one, and several to a card. On the `meta` device names and shapes are
    checked, and no data is read.
    """

    def __init__(
        self, source: WeightSource, device: torch.device, dtype: torch.dtype, readers: int | None = None
    ) -> None:
        self._source = source
        self._device = device
        self._dtype = dtype
        self._pool = ThreadPoolExecutor(readers or (CARD_READERS if device.type == "cuda" else 1))
        self._copies: list[Future[None]] = []

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Waits for the copies that were begun. Raises what one of them raised."""
        self._pool.shutdown(cancel_futures=error is not None)
        if error is None:
            for copy in self._copies:
                copy.result()

    def __contains__(self, name: str) -> bool:
        return name in self._source

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
        self._source.check(name, tuple(destination.shape))
        if self._device.type != "meta":
            self._copies.append(self._pool.submit(self._source.read_into, name, destination))
        return destination
