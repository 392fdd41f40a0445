"""Loading: options that contradict each other, and which changes of a model make its state another model's."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployment.engine import loading
from deployment.engine.loading import load_models
from deployment.engine.options import EngineOptions
from model import DEMO
from model.errors import ModelError
from tests.engine.driving import Driver, models, options, prompt

Json = dict[str, Any]


def fingerprint(options: EngineOptions) -> dict[str, str | int]:
    return dict(load_models(options, dry=True).fingerprint)


def changed_fields(before: EngineOptions, after: EngineOptions) -> set[str]:
    old, new = fingerprint(before), fingerprint(after)
    return {name for name in old | new if old.get(name) != new.get(name)}


def copied(source: str, directory: Path, change: Json, nested: str | None = None) -> Path:
    """A model directory with fields of its config changed, inside `nested` if given."""
    copy = Path(shutil.copytree(DEMO / source, directory / source, copy_function=shutil.copyfile))
    config = json.loads((copy / "config.json").read_text())
    (config if nested is None else config[nested]).update(change)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(
    "change, nested",
    [
        ({"rms_norm_eps": 1e-5}, None),
        ({"rope_theta": 2e6}, "rope_parameters"),
        ({"mrope_section": [4, 2, 2]}, "rope_parameters"),
        ({"rope_type": "yarn", "factor": 2.0}, "rope_parameters"),
    ],
)
def test_a_change_of_the_targets_mathematics_is_another_model(change: Json, nested: str | None, tmp_path: Path) -> None:
    before = options("dflash2")
    after = replace(before, model=copied("target", tmp_path, change, nested))
    assert changed_fields(before, after) == {"config"}


@pytest.mark.parametrize(
    "change, nested",
    [
        ({"rms_norm_eps": 1e-5}, None),
        ({"is_causal": True}, None),
        ({"rope_theta": 1e6}, "rope_parameters"),
        ({"target_layer_ids": [1, 3, 5]}, "dflash_config"),
        ({"mask_token_id": 8190}, "dflash_config"),
        ({"output_multiplier": 0.5}, "dflash_config"),
        ({"final_logit_softcapping": 20.0}, "dflash_config"),
        ({"input_embedding_scale": 2.0}, "dflash_config"),
    ],
)
def test_a_change_of_the_drafters_mathematics_is_another_model(
    change: Json, nested: str | None, tmp_path: Path
) -> None:
    before = options("dflash2")
    after = replace(before, draft=copied("dflash2", tmp_path, change, nested))
    assert changed_fields(before, after) == {"draft_config"}


def test_what_does_not_touch_the_state_keeps_the_model_the_same(tmp_path: Path) -> None:
    """K, lanes, the context limit, end tokens and the rows that may be proposed: state moves between such engines."""
    before = options("dflash2")
    rows = tmp_path / "rows.safetensors"
    save_file({"rows": torch.arange(0, 8192, 2, dtype=torch.int32)}, rows)
    model = copied("target", tmp_path, {"eos_token_id": 8180, "max_position_embeddings": 2048})
    for after in (
        replace(before, draft_tokens=3, lanes=1, context=100, images=1),
        replace(before, model=model),
        replace(before, proposal_head=rows),
    ):
        assert changed_fields(before, after) == set()


def test_other_weights_another_dtype_and_a_stretch_are_another_model(tmp_path: Path) -> None:
    before = options("dflash2")
    model = copied("target", tmp_path, {})
    weights = load_file(model / "model.safetensors")
    weights["model.layers.5.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, model / "model.safetensors")
    assert changed_fields(before, replace(before, model=model)) == {"weights"}
    narrow = changed_fields(before, replace(before, dtype="bfloat16"))
    assert "numeric_path" in narrow and "geometry.kv_dtype" in narrow
    assert changed_fields(before, replace(before, yarn_factor=2.0)) == {"config"}
    assert changed_fields(before, replace(before, draft_causal="true")) == {"draft_config"}


def test_kernels_that_give_other_numbers_are_another_path(monkeypatch: pytest.MonkeyPatch) -> None:
    before = loading.numeric_path(torch.device("cpu"), "float32")
    monkeypatch.setattr(loading, "NUMERICS", loading.NUMERICS + 1)
    assert loading.numeric_path(torch.device("cpu"), "float32") != before


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"backend": "eagle"}, "backend is 'eagle'"),
        ({"draft": None}, "draft is required because backend is dflash2"),
        ({"backend": "dflash"}, "holds a dflash2 drafter"),
        ({"draft_tokens": 16}, "draft_tokens is 16"),
        ({"draft_tokens": 0}, "draft_tokens is 0"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"context": 1}, "context is 1"),
        ({"context": 5000}, "the model's 4096"),
        ({"yarn_factor": 0.5}, "yarn_factor is 0.5"),
        ({"public_rows": 8193}, "public_rows asks for 8193"),
        ({"proposal_head": Path("/nowhere/rows")}, "/nowhere/rows"),
    ],
)
def test_contradicting_options_are_refused_in_one_sentence(change: Json, sentence: str) -> None:
    with pytest.raises(ModelError) as refusal:
        load_models(replace(options("dflash2"), **change), dry=True)
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_dry_load_finds_a_missing_tensor_and_reads_no_data(tmp_path: Path) -> None:
    model = copied("target", tmp_path, {})
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.7.self_attn.k_norm.weight"]
    save_file(weights, model / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.7\.self_attn\.k_norm\.weight"):
        load_models(replace(options("none"), model=model), dry=True)
    assert load_models(options("dflash"), dry=True).target.head.device.type == "meta"


def test_an_indexed_head_changes_what_is_proposed_and_never_what_is_generated(tmp_path: Path) -> None:
    """With a head of few rows drafts are rarely right; greedy text is the same to the token."""
    rows = tmp_path / "rows.safetensors"
    save_file({"rows": torch.arange(1, 8192, 7, dtype=torch.int32)}, rows)
    for backend in ("dflash", "dflash2"):
        full = Driver(backend, images=2).run(prompt(8), max_tokens=30, ignore_eos=True)
        indexed = Driver(backend, images=2, proposal_head=rows).run(prompt(8), max_tokens=30, ignore_eos=True)
        assert indexed.token_ids == full.token_ids
        assert len(indexed.rounds) > len(full.rounds)


def test_a_stretched_target_takes_a_longer_context_and_its_drafter_stops_at_its_own_limit() -> None:
    assert models("dflash", yarn_factor=2.0).context == 8192
    driver = Driver("dflash", yarn_factor=2.0, lanes=1, images=1, prefill_chunk=2048)
    ids = tuple((prompt(0) * 40)[:4100])
    finished = driver.run(ids, max_tokens=5, ignore_eos=True)
    assert len(finished.token_ids) == 5 and set(finished.rounds) == {0}


def test_rows_above_a_lowered_public_vocabulary_are_never_generated() -> None:
    plain = Driver("none", images=2).run(prompt(0), max_tokens=30, ignore_eos=True)
    rows = max(plain.token_ids)
    lowered = Driver("dflash2", images=2, public_rows=rows).run(
        tuple(min(token, rows - 1) for token in prompt(0)), max_tokens=30, ignore_eos=True
    )
    assert max(lowered.token_ids) < rows
