"""Where launch tests run, and memory that shows what a kernel left unwritten."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import pytest
import torch

from tests.kernels.oracles import POISON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Triton's interpreter runs on the CPU where there is no card."""

Facts = TypeVar("Facts")


def there(facts: Facts) -> Facts:
    """A dataclass with its tensors where kernels run."""
    fields = {f.name: getattr(facts, f.name) for f in dataclasses.fields(facts)}  # type: ignore[arg-type]
    moved = {name: x.to(DEVICE) for name, x in fields.items() if isinstance(x, torch.Tensor)}
    return dataclasses.replace(facts, **moved)  # type: ignore[type-var]


def poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `torch.empty` give NaN, so that what is read or returned unwritten shows."""
    empty = torch.empty

    def poisoned(*size: object, **options: object) -> torch.Tensor:
        tensor = empty(*size, **options)  # type: ignore[call-overload]
        return tensor.fill_(POISON) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
