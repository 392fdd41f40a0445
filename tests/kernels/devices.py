"""Where Triton kernels run in tests: on the card, or in the interpreter where there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Facts = TypeVar("Facts")


def there(facts: Facts) -> Facts:
    """A dataclass with its tensors where kernels run."""
    fields = {f.name: getattr(facts, f.name) for f in dataclasses.fields(facts)}  # type: ignore[arg-type]
    moved = {name: x.to(DEVICE) for name, x in fields.items() if isinstance(x, torch.Tensor)}
    return dataclasses.replace(facts, **moved)  # type: ignore[type-var]


def poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised tensors come full of NaN (of -1, if integers) from here on, so that what is not written shows."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def poison(*args: Any, **options: Any) -> torch.Tensor:
            made = allocate(*args, **options)
            return made.fill_(torch.nan if made.is_floating_point() else -1)

        return poison

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
