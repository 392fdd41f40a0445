"""bench/round.py runs at a tiny geometry on a CPU, and counts what it says it counts. Its times are not tests."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import round as command
from bench import round_checkpoint, round_models, round_parts, round_peer, round_prefill, round_ready, round_stalls
from bench.proposal_models import DFLASH2_27B, DFLASH_35B
from bench.round_models import Pair, RandomWeights
from deployment.engine.events import Failed
from model.config import MoeConfig, RotaryConfig, TargetConfig, load_draft_config, load_target_config
from model.target import Target

TINY = replace(
    round_models.TARGET_27B,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention"),
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rotary=RotaryConfig(theta=1e7, dim=8, sections=(2, 1, 1), interleaved=True, yarn=None),
    gdn_key_heads=1,
    gdn_value_heads=2,
    gdn_key_dim=16,
    gdn_value_dim=16,
)
TINY_DRAFT = replace(
    DFLASH2_27B,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    layer_types=("sliding_attention",),
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rotary=RotaryConfig(theta=1e7, dim=16, sections=None, interleaved=False, yarn=None),
    window=32,
    mask_token_id=60,
    target_layer_ids=(0, 2),
    num_target_layers=4,
    selector_rank=8,
    selector_top_k=4,
)
TINY_MOE = replace(
    TINY,
    intermediate_size=0,
    moe=MoeConfig(num_experts=16, experts_per_token=2, intermediate_size=16, shared_intermediate_size=16),
)
TINY_DFLASH = replace(
    DFLASH_35B,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    layer_types=("sliding_attention", "full_attention"),
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rotary=TINY_DRAFT.rotary,
    window=32,
    block_size=8,
    mask_token_id=60,
    target_layer_ids=(0, 2),
)


def once(call: Callable[[], Any] | Sequence[Callable[[], Any]], samples: int = 1) -> float:
    for one in call if isinstance(call, Sequence) else (call,):
        one()
    return 1.0


@pytest.fixture
def tiny_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (round_models, round_prefill, round_peer, round_ready, round_stalls):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    sizes = {"TOKENS": 96, "CHUNKS": (32, 96), "PLAIN_BATCHES": (2,), "PLAIN_CONTEXT": 70, "PLAIN_ROOM": 8}
    for name, value in sizes.items():
        monkeypatch.setattr(round_prefill, name, value)
        if hasattr(round_peer, name):
            monkeypatch.setattr(round_peer, name, value)
    for name in ("elapsed_ms", "median_ms"):
        for module in (round_prefill, round_peer, round_stalls):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, once)
    for name, value in {"POOL_TOKENS": 1024, "PROMPT": 70, "CACHES": ("empty",)}.items():
        monkeypatch.setattr(round_ready, name, value)
    for name, value in {
        "LANES": 2,
        "PROMPT": 1600,
        "SHORT": 16,
        "TOKENS": 200,
        "UNDISTURBED": 3,
        "SLICES": (40,),
    }.items():
        monkeypatch.setattr(round_stalls, name, value)
    monkeypatch.setattr(round_parts, "DEVICE", torch.device("cpu"))
    models = {"dense": Pair(TINY, TINY_DRAFT, (7,)), "mixture": Pair(TINY_MOE, TINY_DFLASH, (3, 7))}
    monkeypatch.setattr(command, "MODELS", models)
    monkeypatch.setattr(command, "read_tbps", lambda: 1.0)
    monkeypatch.setattr(command, "matmul_tflops", lambda: (1.0, 1.0))
    monkeypatch.setattr(command, "card", lambda: {"card": "none"})


@pytest.mark.usefixtures("tiny_on_a_cpu")
def test_every_part_of_the_bench_runs_and_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "round.json"
    parts = ["lanes", "ready", "prefill", "plain", "stalls", "peer"]
    monkeypatch.setattr(sys, "argv", ["round", "--model", "dense", "--only", *parts, "--output", str(output)])
    command.main()
    written = json.loads(output.read_text())
    assert [row["chunk"] for row in written["prefill"]] == [32, 96]
    assert [(row["B"], row["launched"]) for row in written["plain"]] == [(2, "eager"), (2, "graph")]
    decoding, prompt = written["peer"]
    assert decoding["name"].startswith("transformers") and decoding["ms_per_token"] is not None
    assert prompt["tokens"] == 96 and prompt["prefill_ms"] is not None
    (ready,) = written["ready"]
    assert {"imports", "load", "pools", "capture", "warm", "first_token"} <= set(ready["seconds"])
    assert ready["total_s"] == pytest.approx(sum(ready["seconds"].values()), abs=0.01)
    (slice,), (stalls,) = written["slices"], written["stalls"]
    assert slice["tokens"] == 40
    assert stalls["slices"] >= 1600 // 512 and stalls["gap_most_ms"] >= stalls["gap_ms"] > stalls["round_ms"]
    assert written["read_tbps"] == 1.0 and written["card"] == "none"


def test_a_checkpoint_that_is_written_has_the_geometry_that_it_was_written_for(tmp_path: Path) -> None:
    size = round_checkpoint.write_models(tmp_path, TINY, TINY_DRAFT)
    assert load_target_config(tmp_path / "target") == TINY
    assert load_draft_config(tmp_path / "draft") == TINY_DRAFT
    assert size == sum(map(round_checkpoint.bytes_of, round_checkpoint.shapes_of(TINY, TINY_DRAFT)))


@pytest.mark.usefixtures("tiny_on_a_cpu")
def test_without_room_for_the_files_a_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_ready, "room", lambda place: 1000)
    (row,) = round_ready.ready_rows("27B", TINY, TINY_DRAFT)
    assert row["seconds"] is None and "no file system has room" in row["why"]


@pytest.mark.usefixtures("tiny_on_a_cpu")
def test_another_model_is_written_beside_what_is_there_and_the_same_one_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "round.json"
    for model in ("dense", "mixture", "mixture"):
        monkeypatch.setattr(
            sys, "argv", ["round", "--model", model, "--only", "lanes", "plain", "--output", str(output)]
        )
        command.main()
    written = json.loads(output.read_text())
    assert [row["model"] for row in written["bytes_per_lane"]] == ["dense"] * 2 + ["mixture"] * 2
    assert [row["model"] for row in written["plain"]] == ["dense"] * 2 + ["mixture"] * 2
    assert [(row["model"], row["command"]) for row in written["runs"]] == [
        (model, f"python -m bench.round --model {model} --only lanes plain --context 1024 8192 32768 131072")
        for model in ("dense", "mixture")
    ], "where the file was is nobody's business"
    monkeypatch.setattr(command, "card", lambda: {"card": "another"})
    with pytest.raises(ValueError, match="card is none, must be another to be continued"):
        command.main()


@pytest.mark.usefixtures("tiny_on_a_cpu")
def test_a_mixture_is_prefilled_and_counted_by_the_experts_that_a_column_has() -> None:
    target, drafter = round_models.random_models(TINY_MOE, TINY_DFLASH)
    rows = round_prefill.prefill_rows("mixture", target, drafter)
    assert [row["chunk"] for row in rows] == [32, 96]
    dense = replace(TINY, intermediate_size=3 * 16)  # two experts and the shared one
    more = 4 * (16 + 1) * 32  # router and shared gate of each layer
    expected = round_prefill.operations(round_models.random_models(dense, TINY_DRAFT)[0], 8) + 2 * 8 * more
    assert round_prefill.operations(target, 8) == expected


@pytest.mark.usefixtures("tiny_on_a_cpu")
@pytest.mark.parametrize("config", [TINY, TINY_MOE])
def test_the_peer_has_our_geometry(config: TargetConfig) -> None:
    target, _ = round_models.random_models(config, TINY_DRAFT)
    theirs = round_peer.random_theirs(config)
    products = 0
    for weight, times in round_models.product_weights(target):
        stands_for = config.moe.num_experts if config.moe is not None and times > 1 else 1
        products += weight.numel() * stands_for
    layers = [(name, p.numel()) for name, p in theirs.named_parameters() if name.startswith("model.layers.")]
    assert sum(size for name, size in layers if not re.search(r"norm|conv1d|A_log|dt_bias", name)) == products


def test_a_peer_that_is_not_installed_leaves_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (row,) = round_peer.peer_rows("27B", TINY)
    assert row["ms_per_token"] is None and "transformers" in row["why"]


def on_meta(config: TargetConfig) -> Target:
    return Target.load(RandomWeights(), config, config.vocab_size, torch.device("meta"), torch.bfloat16)


def test_operations_are_those_of_the_products_and_of_causal_attention() -> None:
    counted = round_prefill.operations(on_meta(round_models.TARGET_27B), 8192)
    assert counted == pytest.approx(2 * 24.35e9 * 8192 + 2 * 8192**2 * 24 * 256 * 16, rel=1e-3)


def test_a_lane_keeps_records_instead_of_a_state_for_each_column() -> None:
    seven, fifteen = command.lane_rows("27B", round_models.TARGET_27B)
    assert seven["state"] == 144 * 2**20 + 48 * 10240 * 3 * 2
    assert seven["states"] == 8 * seven["state"] and fifteen["states"] == 2 * seven["states"]
    assert seven["records"] == 48 * 8 * (2 * 10240 * 2 + 2 * 48 * 4) == fifteen["records"] // 2


def test_no_times_are_told_of_a_turn_that_failed() -> None:
    heard = round_stalls.Heard()
    heard(Failed("beside", "internal_error", "device lost"))
    assert heard.failed == ["beside: device lost"] and not heard.ended
