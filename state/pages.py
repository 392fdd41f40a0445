"""Where do K and V of full-attention layers lie? In pages of 64 positions, shared by reference and counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from state.errors import CapacityError, StateError
from state.geometry import PAGE_TOKENS


class PagePool:
    """A fixed number of pages, and who holds them.

    `keys`, `values`: [pages, layers, 64, Hkv, D]; one page is contiguous over its layers, so that it moves in one
    copy. A page has one writer at most: the sequence whose frontier lies in it. Checkpoints that share such a page
    depend only on columns below their own frontier, which nobody writes again.
    """

    def __init__(
        self,
        name: str,
        layers: int,
        kv_heads: int,
        head_dim: int,
        pages: int,
        key_dtype: torch.dtype,
        value_dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if pages < 1:
            raise StateError(f"{name}: a pool of {pages} pages, must have at least 1")
        self.name = name
        shape = (pages, layers, PAGE_TOKENS, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=key_dtype, device=device)
        self.values = torch.zeros(shape, dtype=value_dtype, device=device)
        self._refcounts = [0] * pages
        self._epochs = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        self.changes = 0
        """Counts what was taken, shared and given back: as long as it stays, so do all counts of pages."""

    @property
    def pages(self) -> int:
        """Pages in all, free or not."""
        return len(self._refcounts)

    @property
    def free(self) -> int:
        return len(self._free)

    def refcount(self, page: int) -> int:
        """How many sequences and checkpoints hold the page; 0: it is free."""
        return self._refcounts[page]

    def epoch(self, page: int) -> int:
        """Counts how often the page was handed out: (page, epoch) names one content for ever."""
        return self._epochs[page]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages with a reference count of 1 each, all or nothing (`CapacityError`).

        Their content is whatever was there before.
        """
        if count < 0:
            raise StateError(f"{self.name}: {count} pages wanted, must not be negative")
        if count > len(self._free):
            raise CapacityError(self.name, count, len(self._free))
        self.changes += 1
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._refcounts[page] = 1
            self._epochs[page] += 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Adds one reference to each page. Raises `StateError` if one of them is free; then none is changed."""
        for page in pages:
            if self._refcounts[page] < 1:
                raise StateError(f"{self.name}: page {page} is free and cannot be shared")
        self.changes += 1
        for page in pages:
            self._refcounts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes one reference from each page; a page without references is free. Raises `StateError` if it was free."""
        self.changes += 1
        for page in pages:
            if self._refcounts[page] < 1:
                raise StateError(f"{self.name}: page {page} is released, but it is free already")
            self._refcounts[page] -= 1
            if self._refcounts[page] == 0:
                self._free.append(page)

    def copy_page(self, source: int, destination: int, columns: int = PAGE_TOKENS) -> None:
        """Copies the first `columns` positions of a page, all layers; the rest of the destination becomes zero."""
        self.fill_page(destination, self.keys[source, :, :columns], self.values[source, :, :columns])

    def fill_page(self, page: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes `keys`, `values` [layers, n <= 64, Hkv, D] to the first n positions; the rest becomes zero."""
        columns = keys.shape[1]
        self.keys[page, :, :columns].copy_(keys)
        self.values[page, :, :columns].copy_(values)
        if columns < PAGE_TOKENS:
            self.keys[page, :, columns:].zero_()
            self.values[page, :, columns:].zero_()

    def check_references(self, held: Iterable[int]) -> None:
        """Compares the counts with all references that exist, `held`. Raises `StateError` naming the page."""
        expected = [0] * self.pages
        for page in held:
            expected[page] += 1
        for page, (count, want) in enumerate(zip(self._refcounts, expected, strict=True)):
            if count != want:
                raise StateError(f"{self.name}: page {page} counts {count} references, but {want} exist")
        if sorted(self._free) != [page for page, count in enumerate(expected) if count == 0]:
            raise StateError(f"{self.name}: the free list is not the set of pages without references")
