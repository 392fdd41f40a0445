"""What a round tells the device of its rows: a few numbers each, in one copy.

The host writes into page-locked memory that the device reads from when it gets there. There are two such places, used
in turn, and one is not written again before the device has read it: by then that is long past, and nobody waits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch


class Row(NamedTuple):
    """One row's numbers. `slot`: its image. `lane`: where its pending features and its page tables lie. `history`:
    where its penalties do. `frontier`, `anchor`: F and the token at F. `extent`: P. `live`: columns that are verified,
    P + 1, and 0 in padding. `columns`: those that the drafter computes. `context`, `pending`: where the draft context
    ends, and how many features are taken into it. `shift`: rotary position minus ordinal of its columns, behind media.
    `mask`: which of the round's masks is its own, -1 for none. Row `told` of the batch wants the log-probabilities that
    this row has room for; `processed`: whether its own are those that the controls leave. The rest
    is what `kernels.acceptance.RowSampling` and `kernels.penalties.RowPenalties` say."""

    slot: int
    lane: int
    history: int
    frontier: int
    anchor: int
    extent: int
    live: int
    columns: int
    context: int
    pending: int
    shift: int
    mask: int
    told: int
    top_k: int
    seed: int
    sub: int
    reproducible: int
    processed: int
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


FLOATS = tuple(Row._field_defaults)
INTEGERS = tuple(name for name in Row._fields if name not in FLOATS)
_ROW = struct.Struct(f"{len(INTEGERS)}q{len(FLOATS)}d")


@dataclass(frozen=True)
class Rows:
    """The same on the device: int64 [B], the last six FP32 [B]."""

    slot: torch.Tensor
    lane: torch.Tensor
    history: torch.Tensor
    frontier: torch.Tensor
    anchor: torch.Tensor
    extent: torch.Tensor
    live: torch.Tensor
    columns: torch.Tensor
    context: torch.Tensor
    pending: torch.Tensor
    shift: torch.Tensor
    mask: torch.Tensor
    told: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    sub: torch.Tensor
    reproducible: torch.Tensor
    processed: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor

    def part(self, rows: slice) -> Rows:
        return Rows(**{name: values[rows] for name, values in vars(self).items()})

    def at(self, index: torch.Tensor) -> Rows:
        """The rows of `index` int64 [n]."""
        return Rows(**{name: values.index_select(0, index) for name, values in vars(self).items()})


assert tuple(field.name for field in fields(Rows)) == Row._fields


class Staging:
    """A tensor of the device that the host rewrites every round, of bytes; see above."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._on_card = device.type == "cuda"
        self._places = [torch.zeros(size, dtype=torch.uint8, pin_memory=self._on_card) for _ in range(2)]
        self._arrays = [place.numpy() for place in self._places]
        self._read = [torch.cuda.Event() for _ in self._places] if self._on_card else []
        self._turn = 0

    def place(self) -> np.ndarray:
        """Where the next content is written to: uint8, as it was two rounds ago."""
        self._turn = 1 - self._turn
        if self._on_card:
            self._read[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self, size: int | None = None) -> None:
        """The first `size` bytes of what was written, or all, go to the device, behind whatever runs there."""
        there, here = self.device, self._places[self._turn]
        if size is not None:
            there, here = there[:size], here[:size]
        there.copy_(here, non_blocking=True)
        if self._on_card:
            self._read[self._turn].record()


class Ingress:
    """Rows of one round at a time, `most` of them at most."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._most = -(-most // 4) * 4  # so that every row of numbers begins where wide words do
        self._integers = len(INTEGERS) * self._most * 8
        self._staging = Staging(self._integers + len(FLOATS) * self._most * 4, device)
        there = self._staging.device
        integers = there[: self._integers].view(torch.int64).view(len(INTEGERS), self._most)
        floats = there[self._integers :].view(torch.float32).view(len(FLOATS), self._most)
        self._named = dict(zip((*INTEGERS, *FLOATS), (*integers, *floats), strict=True))

    def send(self, rows: Sequence[Row]) -> None:
        place = self._staging.place()
        integers = place[: self._integers].view(np.int64).reshape(len(INTEGERS), self._most)
        floats = place[self._integers :].view(np.float32).reshape(len(FLOATS), self._most)
        packed = np.frombuffer(b"".join(_ROW.pack(*row) for row in rows), dtype=np.int64).reshape(len(rows), -1)
        integers[:, : len(rows)] = packed[:, : len(INTEGERS)].T
        with np.errstate(over="ignore"):  # what FP32 cannot hold is infinite
            floats[:, : len(rows)] = packed[:, len(INTEGERS) :].view(np.float64).T
        self._staging.send()

    def rows(self, count: int) -> Rows:
        """Views of the first `count`."""
        return Rows(**{name: values[:count] for name, values in self._named.items()})
