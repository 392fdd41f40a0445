"""Every kernel is compiled for the card that it is meant for, where no card is: the interpreter takes more than a
compiler does, and knows neither registers nor fused multiplications."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

STACKS = {
    "_store_layers": 32,
    "_tables": 32,
    "attend_parts": 72,
    "attend_rows": 8,
    "chunks_kernel": 32,
    "states_kernel": 192,
}
"""Sine and cosine of large angles keep 2 / pi in pieces there; attention of 128 query rows over heads of 256 takes all
255 registers, and keeps some addresses of what it leaves at its end elsewhere, as does a tile of a state beside three
products of a chunk. Three programs of a multiprocessor share its registers where chunks are prepared. Nothing else has
a stack."""
ALONE = {"attend_parts", "attend_rows", "states_kernel", "_stream_kernel"}
"""One program of it fills a multiprocessor: over heads of 256, with the next two chunks of columns on their way, or
with 160 KiB of a weight."""
AWAITED = {"down_kernel": "ld.global.gpu.acquire"}
"""What it waits with that does not wait for the whole kernel before it."""
LOADS_AHEAD = {"_short_convolution_kernel": 1, "recurrence_kernel": 1, "down_kernel": 20}
"""At most so many loads of what was there before: of a slot, or of which columns an expert has."""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.kernels.compile_launches"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_every_kernel_is_launched_at_the_official_geometry(result: dict[str, Any]) -> None:
    assert {entry["kernel"] for entry in result["compiled"]} == set(result["kernels"])


def test_no_kernel_spills_registers(result: dict[str, Any]) -> None:
    stacks = {entry["kernel"]: entry["STACK"] for entry in result["compiled"] if entry["STACK"]}
    assert all(size <= STACKS.get(name, 0) for name, size in stacks.items()), stacks


def test_no_program_takes_more_shared_memory_than_two_on_a_multiprocessor_have(result: dict[str, Any]) -> None:
    for entry in result["compiled"]:
        assert entry["shared"] <= (227 if entry["kernel"] in ALONE else 113) * 1024, entry["kernel"]


def test_a_launch_that_overlaps_waits_before_it_touches_memory(result: dict[str, Any]) -> None:
    """The kernels before it may still be writing what it reads, or reading what it writes."""
    overlapping = [entry for entry in result["compiled"] if entry["overlaps"]]
    assert len({entry["kernel"] for entry in overlapping}) >= 10
    for entry in overlapping:
        wait = AWAITED.get(entry["kernel"], "griddepcontrol.wait")
        before, waits, after = entry["ptx"].partition(wait)
        touched = re.findall(r"(?:ld|st|red|atom)\.global|cp\.async", before)
        assert waits and set(touched) <= {"ld.global"}, entry["kernel"]
        assert len(touched) <= LOADS_AHEAD.get(entry["kernel"], 0), entry["kernel"]
        assert "griddepcontrol.wait" in waits + after, entry["kernel"]
        assert "griddepcontrol.launch_dependents" in (before if entry["kernel"] in AWAITED else after), entry["kernel"]
    for entry in result["compiled"]:
        assert entry["overlaps"] or "griddepcontrol" not in entry["ptx"], entry["kernel"]


def test_gate_and_up_have_written_when_they_are_counted(result: dict[str, Any]) -> None:
    """All threads of a program, in front of the one that counts."""
    for entry in result["compiled"]:
        if entry["kernel"] == "gate_up_kernel":
            written, counted, _ = entry["ptx"].partition("atom.global.gpu.release")
            assert counted and "st.global" in written
            assert "bar.sync" in written[written.rindex("st.global") :]


# ------------------------------------------------------------------------------------------------ Fold


def expressions(ptx: str) -> Counter[tuple[Any, ...]]:
    """The trees of FP32 operations behind each fused one in a kernel's loop, leaves unnamed: what is multiplied and
    added in which order, and which of it is fused."""
    loop = max(re.split(r"^\$L__BB\S+:", ptx, flags=re.MULTILINE), key=lambda block: block.count("fma.rn.f32"))
    trees: dict[str, tuple[Any, ...]] = {}
    fused: Counter[tuple[Any, ...]] = Counter()
    for operation, operands in re.findall(r"^\s*(?:@\S+ )?([a-z][\w.]+)\s+(.*);", loop, flags=re.MULTILINE):
        target, *inputs = (operand.strip(" {}[]") for operand in operands.split(","))
        if operation.startswith("mov.b32") and len(inputs) == 1 and inputs[0] in trees:
            trees[target] = trees[inputs[0]]
        elif operation.startswith("shfl"):
            trees[target.split("|")[0]] = ("shuffle", trees.get(inputs[0], ()), inputs[1])
        elif re.match(r"(mul|add|sub|fma|neg|ex2|rsqrt)\.\S*f32", operation):
            trees[target] = (operation, *(trees.get(x, ()) for x in inputs))
            if operation.startswith("fma"):
                fused[trees[target]] += 1
    return fused


def test_fold_and_verification_compute_the_state_by_the_same_operations(result: dict[str, Any]) -> None:
    """Equal bits on a card: what Fold does is what verification does, as compiled, among what only that needs."""
    verify, fold = (expressions(entry["ptx"]) for entry in result["compiled"] if entry["kernel"] == "recurrence_kernel")
    assert fold.total() > 64
    assert fold <= verify
