"""Measuring on a card: its bandwidth, the time of captured work, errors against an oracle, and results with the card.

time      the work of one call is captured in a CUDA graph once for each set of inputs; the sets rotate, so that the
          L2 cache (60 MB on an H200) does not serve what a round of a real model reads from memory. Median of
          several replays, each timed with events.
floor     bytes that must move once, over the bandwidth of a pure read measured in the same run
error     |x - oracle| / |oracle| in norm; NaN never passes
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

L2_BYTES = 200_000_000
"""Inputs rotate over at least so many bytes."""


def card() -> dict[str, str]:
    """What was measured on, for a results file."""
    return {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}


def median_ms(calls: Sequence[Callable[[], Any]], least_ms: float = 1.0, samples: int = 15) -> float:
    """Milliseconds of one call, where `calls` do the same work on different inputs: captured together in one graph,
    repeated within it until a replay takes about `least_ms`."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    once = _replay_ms(_captured(calls), 3)
    repeats = max(1, min(int(least_ms / max(once, 1e-3)), 512 // len(calls)))
    graph = _captured([*calls] * repeats)
    return _replay_ms(graph, samples) / (repeats * len(calls))


def elapsed_ms(call: Callable[[], Any], samples: int = 5) -> float:
    """Milliseconds of one call that launches its work one by one, from the first launch to the end of the last."""
    call()
    times: list[float] = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[samples // 2]


def _captured(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replay_ms(graph: torch.cuda.CUDAGraph, samples: int) -> float:
    times: list[float] = []
    for sample in range(samples + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if sample >= 2:
            times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def replayed(call: Callable[[], Any]) -> Any:
    """What `call` gives when it is captured and replayed; its outputs are poisoned in between."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for tensor in out if isinstance(out, tuple) else (out,):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    graph.replay()
    torch.cuda.synchronize()
    return out


def sets(bytes_each: int) -> int:
    """How many sets of inputs of that size are more than the cache holds."""
    return max(1, -(-L2_BYTES // max(bytes_each, 1)))


def norm_error(x: torch.Tensor, oracle: torch.Tensor) -> float:
    """|x - oracle| / |oracle|; the plain norm of x where the oracle is zero; infinite for NaN."""
    difference, size = (x.double() - oracle.double()).norm(), oracle.double().norm()
    error = float(difference / size) if float(size) > 0 else float(difference)
    return error if error == error else float("inf")


@triton.jit
def _read_kernel(x, out, count, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + block, mask=block < count, other=0)
    tl.store(out + tl.program_id(0), tl.max(values, axis=0))


def read_tbps(size: int = 4 << 30) -> float:
    """A pure read of `size` bytes of random data, TB/s."""
    block = 8192
    x = torch.randint(0, 1 << 30, (size // 4,), dtype=torch.int32, device="cuda")
    out = torch.empty(triton.cdiv(x.numel(), block), dtype=torch.int32, device="cuda")
    grid = (out.numel(),)
    ms = median_ms([lambda: _read_kernel[grid](x, out, x.numel(), BLOCK=block, num_warps=8)])
    return size / ms / 1e9


def write_results(path: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """One JSON file: the facts, then `rows` with a row a line."""
    write_tables(path, facts, {"rows": rows})


def write_tables(path: Path, facts: dict[str, Any], tables: dict[str, list[dict[str, Any]]]) -> None:
    """As `write_results`, with several lists of rows by name."""
    entries = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items()]
    for name, rows in tables.items():
        lines = ",\n    ".join(json.dumps(row) for row in rows)
        entries.append(f"{json.dumps(name)}: [\n    {lines}\n  ]")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n  " + ",\n  ".join(entries) + "\n}\n")
