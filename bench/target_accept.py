"""The target's accept on a card, for `bench/target_kernels.py`."""

from __future__ import annotations

from collections.abc import Iterator

from bench.target_works import Work


def works() -> Iterator[Work]:
    yield from ()
