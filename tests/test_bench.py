"""Scripts of bench/: what they make is right, and those for a card run. Their measurements are not tests."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench import (
    demo_model,
    gpu,
    target_accept,
    target_attention,
    target_gdn,
    target_kernels,
    target_moe,
    target_works,
)
from model import DEMO
from model.tokenizer import Tokenizer

BENCH = Path(__file__).resolve().parents[1] / "bench"


def proposal_rows(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "proposal_rows.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=BENCH.parent, env={"PYTHONPATH": "."})


def test_proposal_rows_are_the_most_frequent_tokens_and_the_end_tokens(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the heron and the otter and the heron " * 50)
    done = proposal_rows(DEMO / "target", tmp_path / "rows.safetensors", text, "--rows", 12)
    assert done.returncode == 0, done.stderr
    rows = load_file(tmp_path / "rows.safetensors")["rows"]
    frequent = set(Tokenizer.load(DEMO / "target").encode(text.read_text()))
    assert rows.dtype == torch.int32 and len(rows) == 12 and sorted(set(rows.tolist())) == rows.tolist()
    assert frequent | {8178, 8180} <= set(rows.tolist())


@pytest.mark.parametrize("rows", [0, 8193])
def test_a_wrong_number_of_rows_is_refused(rows: int, tmp_path: Path) -> None:
    done = proposal_rows(DEMO / "target", tmp_path / "rows", tmp_path / "text", "--rows", rows)
    assert done.returncode == 2 and "8192 public token ids" in done.stderr


def test_rows_tell_k_and_how_many_rounds_accepted_how_many_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "TOKENS", 12)
    case = json.loads((DEMO / "golden_public.json").read_text())["prompts"][10]
    (row,) = demo_model.measure("dflash2", 3, "cpu", "float32", [case])
    rounds = row["rounds_by_accepted"]
    assert row["K"] == 3 and len(rounds) == 4 and row["acceptance_length"] == row["tokens"] / sum(rounds)
    assert sum(rounds) + sum(count * times for count, times in enumerate(rounds)) >= row["tokens"] > 0


# ------------------------------------------------------------------------------------------------ kernels of the target


def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes, and calls that run once: their times mean nothing, the comparison with FP64 is the real one."""
    for part in target_kernels.PARTS.values():
        monkeypatch.setattr(part, "DEVICE", "cpu")
    gdn = {"KEY_HEADS": 1, "HEADS": 2, "DIM": 16, "LAYERS": 2, "KEYS": 16, "CHANNELS": 64, "ROUNDS": 2, "LANES": 2}
    attention = {"LAYERS": 2, "KV_HEADS": 1, "QUERY_HEADS": 2, "DIM": 16, "LONG": 200, "MIXED": [200, 10]}
    attention |= {"VERIFY": [(2, 8, 100)], "PREFILL": [(130, 70)], "COPIED_PAGES": 3, "COPIED_IMAGES": 2}
    attention["GEOMETRY_27B"] = replace(target_attention.GEOMETRY_27B, gdn_layers=1, gdn_heads=2, window=64)
    for part, sizes in (
        (target_gdn, gdn),
        (target_attention, attention),
        (target_accept, {"PUBLIC": 500, "VOCABULARY": 512, "BATCHES": (1,), "WIDTH": 2}),
        (target_moe, {"WIDTH": 32, "COUNT": 12, "TOP_K": 2, "INNER": 16, "VERIFY": [(2, 3)], "PREFILL": [1100]}),
        (gpu, {"L2_BYTES": 1}),
    ):
        for name, value in sizes.items():
            monkeypatch.setattr(part, name, value)

    def once(calls: Sequence[Callable[[], Any]]) -> float:
        for call in calls:
            call()
        return 1.0

    monkeypatch.setattr(target_works, "median_ms", once)
    monkeypatch.setattr(target_kernels, "read_tbps", lambda: 1e-6)
    monkeypatch.setattr(target_kernels, "card", lambda: {"card": "none"})


def test_every_part_of_the_targets_bench_runs_and_is_right_against_fp64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_cpu(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["target_kernels", "--output", str(tmp_path / "rows.json")])
    target_kernels.main()
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["fold"] == {"rounds": 2, "bit_equal": True}
    assert {row["op"] for row in written["rows"]} == {
        *("gdn_verify", "gdn_fold", "gdn_prefill"),
        *("attention_verify", "attention_prefill", "image_gather", "image_scatter", "accept"),
        *("mixture_verify", "mixture_prefill"),
    }
    for row in written["rows"]:
        assert row["max_error"] < 0.01, row


def test_no_server_of_a_bench_keeps_sessions_in_the_home_directory_of_who_runs_it() -> None:
    calls = [
        (file.name, {keyword.arg for keyword in call.keywords})
        for file in sorted(BENCH.glob("*.py"))
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "AppArgs"
    ]
    assert len(calls) > 2 and not [name for name, said in calls if "durable" not in said]
