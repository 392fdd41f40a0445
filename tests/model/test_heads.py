"""Proposal heads: which rows of the target's head can be proposed, and what an index file must be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model import DEMO
from model.config import load_target_config
from model.errors import ModelError
from model.heads import ProposalHead, load_rows
from model.target import Target
from model.weights import WeightFiles

PUBLIC = 8000


@pytest.fixture(scope="module")
def target() -> Target:
    config = load_target_config(DEMO / "target")
    return Target.load(WeightFiles.open(DEMO / "target"), config, PUBLIC, torch.device("cpu"), torch.float32)


def index(tmp_path: Path, rows: torch.Tensor, name: str = "rows") -> Path:
    save_file({name: rows}, tmp_path / "index.safetensors")
    return tmp_path / "index.safetensors"


def test_a_full_head_scores_the_public_rows_only_and_shares_their_memory(target: Target) -> None:
    head = ProposalHead.full(target)
    hidden = torch.randn(3, target.config.hidden_size, generator=torch.Generator().manual_seed(1))
    assert torch.equal(head.scores(hidden), target.logits(hidden)) and head.scores(hidden).shape == (3, PUBLIC)
    assert head.weight.data_ptr() == target.head.data_ptr()
    assert head.tokens(torch.tensor([5, 7])).tolist() == [5, 7]


def test_an_indexed_head_scores_its_rows_and_maps_them_back(target: Target, tmp_path: Path) -> None:
    rows = load_rows(index(tmp_path, torch.tensor([70, 3, 7999, 12], dtype=torch.int32)), PUBLIC)
    head = ProposalHead.indexed(target, rows)
    hidden = torch.randn(2, target.config.hidden_size, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(head.scores(hidden), target.logits(hidden)[:, [3, 12, 70, 7999]], atol=1e-5)
    assert head.tokens(torch.tensor([[0, 3], [2, 1]])).tolist() == [[3, 7999], [70, 12]]


@pytest.mark.parametrize(
    "rows, sentence",
    [
        (torch.tensor([1, 2, 2], dtype=torch.int32), "rows holds 2 twice"),
        (torch.tensor([1, 8000], dtype=torch.int32), "rows holds 8000"),
        (torch.tensor([-4, 1], dtype=torch.int32), "rows holds -4"),
        (torch.tensor([1, 2]), "torch.int64"),
        (torch.tensor([[1], [2]], dtype=torch.int32), r"\[2, 1\]"),
        (torch.tensor([], dtype=torch.int32), "at least 1"),
    ],
)
def test_a_wrong_index_is_refused_naming_the_file_and_the_row(
    tmp_path: Path, rows: torch.Tensor, sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence) as refusal:
        load_rows(index(tmp_path, rows), PUBLIC)
    assert "index.safetensors" in str(refusal.value)


def test_a_missing_a_foreign_and_a_broken_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        load_rows(tmp_path / "none.safetensors", PUBLIC)
    with pytest.raises(ModelError, match="tensor rows is missing"):
        load_rows(index(tmp_path, torch.tensor([1], dtype=torch.int32), "other"), PUBLIC)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x00" * 40)
    with pytest.raises(ModelError, match="cannot be read"):
        load_rows(broken, PUBLIC)
