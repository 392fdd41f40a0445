"""Scripts of bench/ that make something: what they make is right. Their measurements are not tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench import demo_model
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
