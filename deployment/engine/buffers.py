"""Where a round's data lies: tensors that are allocated once, at places that never change.

A graph keeps the addresses that it was captured with, and graphs share the memory of what lives within one segment. So
all that goes from one segment to another, or from one round to the next, lies here. A round of B rows and W columns
uses the beginning of each tensor, seen in its own shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deployment.engine.ingress import Ingress, Staging
from deployment.engine.logprobs import MAX_LOGPROBS
from deployment.engine.round_shape import SLICES
from deployment.engine.transfer import on_device
from kernels.gated_delta_net import Records
from state.geometry import StateGeometry
from state.memory import SequenceMemory


@dataclass(frozen=True)
class BufferSizes:
    """`lanes` that can decode together; at most `rows` rows, `width` columns a row and `cells` columns of all rows.
    `features`: numbers of a position's pending features, and `candidates`, those that a draft is chosen from; 0
    without. `pages` of one sequence; `mask_bytes`: those of a mask over the vocabulary."""

    lanes: int
    rows: int
    width: int
    cells: int
    features: int
    candidates: int
    pages: int
    mask_bytes: int


class Egress:
    """Numbers that go to the host: `device` int64 [size], and the page-locked memory that they arrive in."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=torch.int64, device=device)
        self._on_card = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=self._on_card)
        self._arrived = torch.cuda.Event() if self._on_card else None

    def ask(self, size: int) -> None:
        """The first `size` numbers, as soon as all that was launched before has written them."""
        self._host[:size].copy_(self.device[:size], non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def wait(self, size: int) -> np.ndarray:
        """What was asked for, when it has arrived: int64 [size], until it is asked for again."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host[:size].numpy()


class PageTables:
    """Page ids of every lane, `device` int64 [lanes + 1, most]; the last row is of padding, and reaches nothing.

    A sequence has all its pages from its beginning, so that its row is written when it comes into the lane.
    """

    def __init__(self, lanes: int, most: int, device: torch.device) -> None:
        self.device = torch.zeros(lanes + 1, most, dtype=torch.int64, device=device)
        self._written: list[SequenceMemory | None] = [None] * lanes

    def write(self, lane: int, memory: SequenceMemory, pages: Sequence[int]) -> None:
        """`pages`: those of `memory`, which are the lane's."""
        if self._written[lane] is memory:
            return
        self.device[lane, : len(pages)] = on_device(torch.tensor(pages, dtype=torch.int64), self.device.device)
        self._written[lane] = memory


class Told:
    """Log-probabilities of rows that asked for them: of each licensed token `own` FP32 [B, W], and of the best ones
    `ids` int64 and `best` FP32 [B, W, k], each in the shape of the round."""

    def __init__(self, cells: int, device: torch.device) -> None:
        self._own = torch.zeros(cells, device=device)
        self._ids = torch.zeros(cells * MAX_LOGPROBS, dtype=torch.int64, device=device)
        self._best = torch.zeros(cells * MAX_LOGPROBS, device=device)

    def of(self, rows: int, width: int, alternatives: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = (rows, width, alternatives)
        return shaped(self._own, rows, width), shaped(self._ids, *shape), shaped(self._best, *shape)


class PromptSlice:
    """One lane's slice of a prompt, with padding behind its tokens. Its numbers stand two words apart: kernels are
    compiled for how a pointer is aligned, and 16 bytes is what other tensors are."""

    _APART, _NUMBERS = 2, 4

    def __init__(self, most: int, device: torch.device) -> None:
        self._ids = self._APART * self._NUMBERS
        self._staging = Staging((self._ids + most) * 8, device)

    @property
    def device(self) -> torch.Tensor:
        return self._staging.device

    def send(self, slot: int, lane: int, start: int, tokens: Sequence[int], columns: int) -> None:
        """`slot`: the lane's image; `lane`: its row of the page tables; `start`: the ordinal of its first token."""
        place = self._staging.place().view(np.int64)
        ids = place[self._ids :][:columns]
        place[: self._ids : self._APART] = slot, lane, start, len(tokens)
        ids[: len(tokens)] = tokens
        ids[len(tokens) :] = 0
        self._staging.send((self._ids + columns) * 8)

    def of(self, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """On the device: slot, lane, start and count, int64 [1] each, and token ids [1, columns]."""
        numbers = self._staging.device.view(torch.int64)
        slot, lane, start, count = (numbers[at : at + 1] for at in range(0, self._ids, self._APART))
        return slot, lane, start, count, numbers[self._ids :][:columns].view(1, columns)


class RoundBuffers:
    """All of them, for one engine. Lane `sizes.lanes` is that of padding."""

    def __init__(self, sizes: BufferSizes, geometry: StateGeometry, device: torch.device) -> None:
        self.sizes = sizes
        self.ingress = Ingress(sizes.rows, device)
        self.counts = Staging(sizes.rows * 8, device)
        self.prompt = PromptSlice(SLICES[-1], device)
        self.masks = Staging(sizes.cells * sizes.mask_bytes, device)
        self.pages = PageTables(sizes.lanes, sizes.pages, device)
        self.draft_pages = PageTables(sizes.lanes, sizes.pages if geometry.full_layers else 0, device)
        self.verdict = Egress(sizes.cells + sizes.rows, device)
        self.proposed = Egress(sizes.cells, device)
        self.told = Told(sizes.cells, device)
        cells, dtype = sizes.cells, geometry.hidden_dtype
        layers, channels, heads = geometry.gdn_layers, geometry.conv_channels, geometry.gdn_heads
        self.pending = torch.zeros(sizes.lanes + 1, sizes.width, sizes.features, dtype=dtype, device=device)
        self._candidates = torch.zeros(cells * sizes.candidates, dtype=torch.int64, device=device)
        self._law = torch.zeros(cells * sizes.candidates, device=device)
        self._hidden = torch.zeros(cells * geometry.hidden_size, dtype=dtype, device=device)
        self._features = torch.zeros(cells * sizes.features, dtype=dtype, device=device)
        self._mixed, self._columns = torch.zeros(2, layers * cells * channels, dtype=dtype, device=device)
        self._g, self._beta = torch.zeros(2, layers * cells * heads, device=device)
        self._records = (layers, channels, heads)

    @property
    def size(self) -> int:
        """Bytes on the device."""
        tensors = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        parts = [part.device for part in (self.counts, self.prompt, self.masks, self.pages, self.draft_pages)]
        return sum(tensor.nbytes for tensor in (*tensors, *parts))

    def drafts(self, rows: int, drafts: int) -> torch.Tensor:
        """int64 [B, K]."""
        return shaped(self.proposed.device, rows, drafts)

    def laws(self, rows: int, drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What each draft was chosen from, and how: int64 and FP32 [B, K, C]."""
        shape = (rows, drafts, self.sizes.candidates)
        return shaped(self._candidates, *shape), shaped(self._law, *shape)

    def hidden(self, rows: int, width: int) -> torch.Tensor:
        """[B, W, H]."""
        return shaped(self._hidden, rows, width, self._hidden.numel() // self.sizes.cells)

    def features(self, rows: int, width: int) -> torch.Tensor:
        """[B, W, n H]."""
        return shaped(self._features, rows, width, self.sizes.features)

    def records(self, rows: int, width: int) -> Records:
        layers, channels, heads = self._records
        shape = (layers, rows, width)
        mixed, columns = (shaped(part, *shape, channels) for part in (self._mixed, self._columns))
        g, beta = (shaped(part, *shape, heads) for part in (self._g, self._beta))
        return Records(mixed, columns, g, beta)

    def verdicts(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Licensed tokens int64 [B, W] and accepted drafts int64 [B], next to each other."""
        licensed = self.verdict.device[: rows * width]
        return licensed.view(rows, width), self.verdict.device[rows * width :][:rows]

    def kept(self, rows: int) -> torch.Tensor:
        """N of each row, int64 [B]."""
        return self.counts.device.view(torch.int64)[:rows]

    def allowed(self, rows: int, width: int) -> torch.Tensor:
        """Masks, uint8 [G, W, bytes] for G of the rows."""
        return shaped(self.masks.device, rows, width, self.sizes.mask_bytes)


def shaped(storage: torch.Tensor, *shape: int) -> torch.Tensor:
    """The beginning of a flat tensor, in this shape."""
    return storage[: torch.Size(shape).numel()].view(shape)
