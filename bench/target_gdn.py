"""The gated delta rule on a card, for `bench/target_kernels.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.target_works import Work


def works() -> Iterator[Work]:
    yield from ()


def fold_chains() -> dict[str, Any]:
    return {}
