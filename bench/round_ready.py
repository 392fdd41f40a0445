"""How fast a target's weights come from files that are in memory, for `bench/round.py`: what fits, not all of 27B.

A checkpoint of a few layers at the target's width is written and loaded as every other; the bytes of all layers over
the speed are what the whole one takes.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.round_models import DEVICE, DTYPE, RandomWeights
from model.config import TargetConfig
from model.target import Target
from model.weights import WeightFiles

LAYERS, SHARDS, VOCABULARY = 4, 2, 32768
SAMPLES = 3


class NamesAndShapes(RandomWeights):
    """Takes down what a model asks for."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, ...]] = {}

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        self.found[name] = shape


def ready_rows(model: str, config: TargetConfig) -> list[dict[str, Any]]:
    cut = replace(config, num_layers=LAYERS, layer_types=config.layer_types[:LAYERS], vocab_size=VOCABULARY)
    whole = sum(torch.Size(shape).numel() for shape in shapes_of(config).values()) * DTYPE.itemsize
    with tempfile.TemporaryDirectory() as name:
        size = write(Path(name), cut)
        seconds = sorted(load_seconds(Path(name), cut) for _ in range(SAMPLES))[SAMPLES // 2]
    row = {"model": f"{model}, {LAYERS} layers", "bytes": size, "load_s": round(seconds, 3), "whole_bytes": whole}
    print(row, flush=True)
    return [row]


def shapes_of(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    source = NamesAndShapes()
    Target.load(source, config, config.vocab_size, torch.device("meta"), DTYPE)
    return source.found


def write(directory: Path, config: TargetConfig) -> int:
    """Random tensors of every name, in shards -> their bytes."""
    names, total = list(shapes_of(config).items()), 0
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        tensors = {name: torch.randn(shape, dtype=DTYPE, device=DEVICE).cpu() for name, shape in names[shard::SHARDS]}
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def load_seconds(directory: Path, config: TargetConfig) -> float:
    started = time.perf_counter()
    target = Target.load(WeightFiles.open(directory), config, config.vocab_size, torch.device(DEVICE), DTYPE)
    float(target.final_norm.float().sum())  # the copies are done
    return time.perf_counter() - started
