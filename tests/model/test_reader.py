"""Tensors on their way to a device: by several threads at a time they are the same, and so is what is refused."""

from __future__ import annotations

import threading

import pytest
import torch

from model import DEMO
from model.config import load_target_config
from model.errors import ModelError
from model.reader import WeightReader
from model.weights import WeightFiles

CPU = torch.device("cpu")


class Counting:
    """A source of tensors that are full of the number in their name; `broken` ones cannot be read."""

    def __init__(self, together: int = 1, broken: str = "") -> None:
        self.meeting = threading.Barrier(together, timeout=10)
        self.broken = broken

    def __contains__(self, name: str) -> bool:
        return True

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        if name == "missing":
            raise ModelError("tensor missing is missing")

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        self.meeting.wait()
        if name == self.broken:
            raise ModelError(f"tensor {name} is corrupt")
        destination.fill_(int(name))


def test_as_many_tensors_are_read_at_a_time_as_there_are_readers() -> None:
    """None of four is read before all four are being read."""
    with WeightReader(Counting(together=4), CPU, torch.float32, readers=4) as reader:
        fused = reader.rows(2, ("1", 1), ("2", 2), ("3", 1))
        last = reader.tensor("4", 3)
    assert fused[:, 0].tolist() == [1, 2, 2, 3] and last.tolist() == [4, 4, 4]


def read_ten(source: Counting) -> None:
    with WeightReader(source, CPU, torch.float32, readers=2) as reader:
        for number in range(10):
            reader.tensor(str(number), 1)


def test_what_one_reader_could_not_read_is_refused_when_all_are_done() -> None:
    read_ten(Counting())
    with pytest.raises(ModelError, match="tensor 7 is corrupt"):
        read_ten(Counting(broken="7"))


def test_what_is_missing_is_refused_at_once() -> None:
    with WeightReader(Counting(), CPU, torch.float32) as reader, pytest.raises(ModelError, match="missing is missing"):
        reader.tensor("missing", 1)


def test_a_checkpoints_tensors_are_the_same_however_many_read() -> None:
    config, files = load_target_config(DEMO / "target"), WeightFiles.open(DEMO / "target")
    names = [f"layers.{i}.mlp.{half}_proj.weight" for i in range(4) for half in ("gate", "up")]

    def read(readers: int) -> torch.Tensor:
        with WeightReader(files, CPU, torch.bfloat16, readers) as reader:
            return reader.rows(config.hidden_size, *((name, config.intermediate_size) for name in names))

    assert torch.equal(read(5), read(1))
