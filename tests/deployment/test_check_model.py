"""`dflash-serve check-model`: every official geometry passes, and every misfit is one sentence and exit code 1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from deployment.cli import app
from model import DEMO

Json = dict[str, Any]


def check_model(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["check-model", *map(str, arguments)])


def refused(*arguments: object) -> str:
    result = check_model(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("dflash-serve: ") and result.stderr.count("\n") == 1
    return result.stderr


# ------------------------------------------------------------------------------------------------ official geometries

ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000_000,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}


def target_config(hidden: int, layers: int, heads: tuple[int, int], gdn: tuple[int, int], **more: Any) -> Json:
    text: Json = {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "linear_num_key_heads": gdn[0],
        "linear_num_value_heads": gdn[1],
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "rope_parameters": ROPE,
        "eos_token_id": 248044,
    }
    tie = more.pop("tie", False)
    text |= more
    return {
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": text,
        "vision_config": {"depth": 27},
        "tie_word_embeddings": tie,
        "image_token_id": 248056,
    }


def moe_config(
    hidden: int, layers: int, heads: tuple[int, int], gdn: tuple[int, int], experts: int, chosen: int
) -> Json:
    return target_config(
        hidden,
        layers,
        heads,
        gdn,
        model_type="qwen3_5_moe_text",
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    )


def draft_config(hidden: int, inner: int, ids: list[int], mask: int, **more: Any) -> Json:
    layers = more.pop("layers", 5)
    heads, kv_heads = more.pop("heads", (32, 8))
    block = more.pop("block", 16)
    nested = {"target_layer_ids": ids, "mask_token_id": mask, "block_size": block} | more.pop("nested", {})
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": 248320,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000},
        "dflash_config": nested,
    } | more


LOCAL, FULL = "sliding_attention", "full_attention"
TWO = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}


def dflash2(hidden: int, inner: int, ids: list[int], mask: int, layers: int, block: int, **more: Any) -> Json:
    two = {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "layer_types": [LOCAL] * layers,
        "sliding_window": 2048,
    }
    return draft_config(hidden, inner, ids, mask, layers=layers, block=block, nested=TWO, **two, **more)


DENSE_4B = target_config(2560, 32, (16, 4), (16, 32), intermediate_size=9216, tie=True)
DENSE_9B = target_config(4096, 32, (16, 4), (16, 32), intermediate_size=12288)
DENSE_27B = target_config(5120, 64, (24, 4), (16, 48), intermediate_size=17408)
MOE_35B = moe_config(2048, 40, (16, 2), (16, 32), 256, 8)
MIXED = {"layer_types": [LOCAL] * 5 + [FULL], "sliding_window": 4096, "layers": 6}
EIGHT = [1, 6, 11, 16, 22, 27, 32, 37]

GEOMETRIES = {
    "4B": (DENSE_4B, draft_config(2560, 9216, [1, 8, 15, 22, 29], 248070, heads=(16, 4)), {}),
    "9B": (DENSE_9B, draft_config(4096, 12288, [1, 8, 15, 22, 29], 248070), {"GDN state": "48 MiB"}),
    "27B, first DFlash": (DENSE_27B, draft_config(5120, 17408, [1, 16, 31, 46, 61], 248070), {}),
    "27B, DFlash2": (
        DENSE_27B,
        dflash2(5120, 17408, [5, 19, 33, 47, 61], 248070, 5, 8),
        {
            "draft rings per sequence": "40 MiB",
            "GDN state": "144 MiB",
            "convolution history": "2.812 MiB",
            "target K/V per token": "64 KiB",
            "image per sequence": "186.8 MiB",
        },
    ),
    "35B-A3B, first DFlash": (
        MOE_35B,
        draft_config(2048, 6144, [1, 10, 19, 28, 37], 248070, layers=8, heads=(32, 4)),
        {},
    ),
    "35B-A3B, DFlash": (
        MOE_35B,
        draft_config(2048, 6144, EIGHT, 248077, **MIXED),
        {
            "draft rings per sequence": "80 MiB",
            "draft pages per token": "4 KiB",
            "GDN state": "60 MiB",
            "target K/V per token": "20 KiB",
        },
    ),
    "35B-A3B, DFlash2": (MOE_35B, dflash2(2048, 6144, EIGHT, 248077, 6, 8), {"draft rings per sequence": "48 MiB"}),
}


def written(directory: Path, config: Json) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", GEOMETRIES)
def test_an_official_geometry_passes_and_its_sizes_are_the_known_ones(name: str, tmp_path: Path) -> None:
    target, draft, sizes = GEOMETRIES[name]
    directories = written(tmp_path / "target", target), written(tmp_path / "draft", draft)
    result = check_model(directories[0], "--draft", directories[1], "--geometry-only")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for plane, size in sizes.items():
        (line,) = [line for line in lines if line.startswith(plane)]
        assert line.endswith(f" {size}")


def test_a_drafter_that_does_not_say_whether_it_is_causal_is_reported_as_such(tmp_path: Path) -> None:
    target, draft, _ = GEOMETRIES["35B-A3B, DFlash"]
    directories = written(tmp_path / "target", target), written(tmp_path / "draft", draft)
    result = check_model(directories[0], "--draft", directories[1], "--geometry-only")
    assert "not said: non-causal, unless draft_causal is true" in result.stdout


def test_yarn_stretches_the_positions(tmp_path: Path) -> None:
    directory = written(tmp_path / "target", DENSE_27B)
    result = check_model(directory, "--geometry-only", "--yarn-factor", "4")
    assert "1048576" in result.stdout and "YaRN factor 4" in result.stdout
    assert "yarn_factor is 5" in refused(directory, "--geometry-only", "--yarn-factor", "5")


# ------------------------------------------------------------------------------------------------ files


def copied(source: str, directory: Path) -> Path:
    return Path(shutil.copytree(DEMO / source, directory / source, copy_function=shutil.copyfile))


def with_weights(directory: Path, change: Any) -> Path:
    """A copy of a directory's weights in which `change` has been made."""
    file = directory / "model.safetensors"
    with safe_open(file, framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    change(tensors)
    save_file(tensors, file)
    return directory


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_the_demo_models_pass_without_reading_their_weights(kind: str) -> None:
    result = check_model(DEMO / "target", "--draft", DEMO / kind)
    assert result.exit_code == 0 and result.stdout.rstrip().endswith("ok: target and draft fit together")


def test_what_is_skipped_is_named_once(tmp_path: Path) -> None:
    def add(tensors: Any) -> None:
        tensors["mtp.fc.weight"] = tensors["model.norm.weight"].clone()
        tensors["model.visual.merger.weight"] = tensors["model.norm.weight"].clone()

    result = check_model(with_weights(copied("target", tmp_path), add))
    assert "2 tensors (mtp, visual)" in result.stdout


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda t: t.pop("model.layers.3.mlp.up_proj.weight"), "layers.3.mlp.up_proj.weight"),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:7].clone()}), "[7]"),
    ],
)
def test_missing_and_misshapen_tensors_are_named(change: Any, sentence: str, tmp_path: Path) -> None:
    assert sentence in refused(with_weights(copied("target", tmp_path), change))


def test_a_truncated_file_and_a_missing_shard_are_named(tmp_path: Path) -> None:
    directory = copied("target", tmp_path)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert str(file) in refused(directory)
    file.unlink()
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors" in refused(directory)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"hidden_size": 640}, "hidden_size is 640, the target's is 320"),
        ({"dflash_config": {"target_layer_ids": [1, 8], "mask_token_id": 5}}, "target_layer_ids has 8"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 6], "mask_token_id": 9000}}, "mask_token_id is 9000"),
        ({"num_target_layers": 12}, "num_target_layers is 12"),
        ({"attention_sink_bias": True}, "attention_sink_bias"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_with_the_field(change: Json, sentence: str, tmp_path: Path) -> None:
    draft = copied("dflash", tmp_path)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | change))
    assert sentence in refused(DEMO / "target", "--draft", draft)


def test_foreign_tensors_of_a_draft_are_refused_by_name(tmp_path: Path) -> None:
    def add(tensors: Any) -> None:
        tensors["lm_head.weight"] = tensors["norm.weight"].clone()

    assert "lm_head.weight" in refused(DEMO / "target", "--draft", with_weights(copied("dflash", tmp_path), add))


def test_both_spellings_of_codebooks_are_read(tmp_path: Path) -> None:
    def respell(tensors: Any) -> None:
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"candidate_selector.{name}.weight"] = tensors.pop(f"candidate_selector.{name}")

    draft = with_weights(copied("dflash2", tmp_path), respell)
    assert check_model(DEMO / "target", "--draft", draft).exit_code == 0
