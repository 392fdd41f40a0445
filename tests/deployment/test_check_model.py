"""`dflash-serve check-model`: every official geometry passes, and every misfit is one sentence and exit code 1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from deployment.check_operators import operator_rows
from deployment.cli import app
from deployment.engine.loading import DTYPES
from model import DEMO
from model.config import load_draft_config, load_target_config

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


VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
}
IDS = (248056, 248057, 248053, 248054)


def composite(text: Json, vision: Json, ids: tuple[int, ...]) -> Json:
    """A multimodal checkpoint's config around its text part."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    model_type = text["model_type"].removesuffix("_text")
    parts = {"model_type": model_type, "text_config": text, "vision_config": vision}
    return parts | dict(zip(names, ids, strict=True))


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
    return composite(text, VISION | {"out_hidden_size": hidden}, IDS) | {"tie_word_embeddings": tie}


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
    assert {"hidden / layers 1152 / 27", "attention 16 heads of 72, within a frame"} <= set(lines)
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


# ------------------------------------------------------------------------------------------------ operators


def operators(tmp_path: Path, target: Json, draft: Json | None = None, dtype: str = "bfloat16") -> dict[str, str]:
    """What runs each operator, by its name."""
    config = load_target_config(written(tmp_path / "target", target))
    draft_config = None if draft is None else load_draft_config(written(tmp_path / "draft", draft))
    return dict(operator_rows(config, draft_config, 248077, DTYPES[dtype]))


def test_products_of_few_rows_are_streamed(tmp_path: Path) -> None:
    rows = operators(tmp_path, *GEOMETRIES["27B, DFlash2"][:2])
    streamed = "streaming up to 64 rows, cuBLAS above"
    products = {name for name, kernel in rows.items() if kernel not in ("triton", "torch")}
    assert {name for name in rows if name.endswith("]")} | {"head", "drafter: features", "drafter: head"} == products
    assert {rows[name] for name in products} == {streamed}
    assert rows["full attention: attention, gate"] == rows["drafter: selector"] == rows["acceptance"] == "triton"


def test_fp32_has_no_streamed_products(tmp_path: Path) -> None:
    assert set(operators(tmp_path, DENSE_27B, dtype="float32").values()) == {"cuBLAS", "triton"}


def test_a_mixture_is_told_by_its_parts(tmp_path: Path) -> None:
    rows = operators(tmp_path, MOE_35B)
    assert rows["feed-forward: router"] == rows["feed-forward: experts, routed and shared"] == "triton"
    assert not any(name.startswith("feed-forward: SiLU") for name in rows)


def test_a_head_that_a_kernel_refuses_is_told(tmp_path: Path) -> None:
    rope = ROPE | {"mrope_section": [4, 4, 4]}
    text = DENSE_27B["text_config"] | {"head_dim": 96, "rope_parameters": rope}
    rows = operators(tmp_path, DENSE_27B | {"text_config": text})
    told = rows["full attention: attention, gate"]
    assert told == "refused: head: head dimension 96, must be a power of two of at least 16"
    assert rows["gated delta net: verification"] == "triton"


def test_the_command_tells_of_operators(tmp_path: Path) -> None:
    result = check_model(written(tmp_path / "target", DENSE_27B), "--geometry-only")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "Operators on a card in bfloat16 (on a CPU: torch)" in lines
    assert "feed-forward: down [5120 x 17408] streaming up to 64 rows, cuBLAS above" in lines


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


# ------------------------------------------------------------------------------------------------ media and FP8

TINY_VISION = VISION | {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 9,
    "out_hidden_size": 320,
}
PROCESSOR = {
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
TOWER = {
    "patch_embed.proj": (8, 3, 2, 4, 4),
    "blocks.0.norm1": (8,),
    "blocks.0.attn.qkv": (24, 8),
    "blocks.0.attn.proj": (8, 8),
    "blocks.0.norm2": (8,),
    "blocks.0.mlp.linear_fc1": (12, 8),
    "blocks.0.mlp.linear_fc2": (8, 12),
    "merger.norm": (8,),
    "merger.linear_fc1": (32, 32),
    "merger.linear_fc2": (320, 32),
}


def multimodal(directory: Path) -> Path:
    """The demo target with a tower."""

    def add(tensors: Any) -> None:
        tensors["model.visual.pos_embed.weight"] = torch.zeros(9, 8)
        for name, shape in TOWER.items():
            tensors[f"model.visual.{name}.weight"] = torch.zeros(shape)
            tensors[f"model.visual.{name}.bias"] = torch.zeros(shape[0])

    target = with_weights(copied("target", directory), add)
    text = json.loads((target / "config.json").read_text())
    outer = composite(text, TINY_VISION, (0, 1, 2, 3)) | {"tie_word_embeddings": text["tie_word_embeddings"]}
    (target / "config.json").write_text(json.dumps(outer))
    for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (target / file).write_text(json.dumps(PROCESSOR))
    return target


def test_a_vision_tower_is_reported_with_what_it_accepts(tmp_path: Path) -> None:
    result = check_model(multimodal(tmp_path))
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "images and video images of up to 4096 pixels, videos of up to 4096 in all frames" in lines
    assert "one embedding 8 x 8 pixels" in lines and not any(line.startswith("skipped") for line in lines)


def test_a_checkpoint_without_its_tower_is_a_text_model_and_says_so(tmp_path: Path) -> None:
    def remove(tensors: Any) -> None:
        for name in [name for name in tensors if ".visual." in name]:
            del tensors[name]

    result = check_model(with_weights(multimodal(tmp_path), remove))
    assert result.exit_code == 0 and "refused: the files hold no vision tower" in result.stdout
    assert "refused: the files hold no vision tower" in check_model(DEMO / "target").stdout


def test_what_a_tower_lacks_is_named(tmp_path: Path) -> None:
    target = multimodal(tmp_path)
    (target / "video_preprocessor_config.json").unlink()
    assert "video_preprocessor_config.json does not exist" in refused(target)
    with_weights(target, lambda tensors: tensors.pop("model.visual.merger.norm.bias"))
    (target / "video_preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    assert "visual.merger.norm.bias of shape [8] is missing" in refused(target)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"out_hidden_size": 64}, "vision_config.out_hidden_size is 64, but the text model's is 320"),
        ({"num_position_embeddings": 10}, "num_position_embeddings is 10, but must be a square"),
        ({"num_heads": 3}, "hidden_size is 8, but must be 3 heads of a multiple of 4"),
        ({"deepstack_visual_indexes": [0]}, "deepstack_visual_indexes is [0]"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"patch_size": 8}, "patch_size is 4, but the vision_config says 8"),
        ({"depth": None}, "depth is required"),
    ],
)
def test_a_tower_that_is_not_of_the_family_is_refused_by_name(change: Json, sentence: str, tmp_path: Path) -> None:
    target = multimodal(tmp_path)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"vision_config": TINY_VISION | change}))
    assert sentence in refused(target)


def test_weights_in_fp8_are_reported_and_their_scales_checked(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"

    def narrow(tensors: Any) -> None:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        rows, columns = tensors[name].shape
        tensors[f"{name}_scale_inv"] = torch.ones(-(-rows // 128), -(-columns // 128))

    target = with_weights(copied("target", tmp_path), narrow)
    config = json.loads((target / "config.json").read_text())
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    result = check_model(target)
    assert result.exit_code == 0 and "in blocks of 128 x 128" in result.stdout
    with_weights(target, lambda tensors: tensors.pop(f"{name}_scale_inv"))
    assert f"tensor {name} is F8_E4M3, but {name}_scale_inv is missing" in refused(target)
