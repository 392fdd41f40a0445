"""Block-scaled FP8 checkpoints are what their scales say, and every tensor that is not is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.block_scales import BlockScales
from model.config import load_target_config
from model.errors import ModelError
from model.reader import WeightReader
from model.target import Target
from model.weights import WeightFiles

Json = dict[str, Any]
Tensors = dict[str, torch.Tensor]
QUANTISATION: Json = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
}
WIDE = (  # tensors of more than one block in both directions, whole and cut
    "mlp.gate_proj.weight",
    "mlp.down_proj.weight",
    "linear_attn.in_proj_qkv.weight",
    "linear_attn.out_proj.weight",
    "self_attn.q_proj.weight",
    "self_attn.o_proj.weight",
)


def quantised(weight: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 values and their scales, so that each block's largest value is the largest that float8 has."""
    rows, columns = (-(-n // block) for n in weight.shape)
    scales = torch.empty(rows, columns)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            at = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[at].abs().max() / 448
            values[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def times_scales(values: torch.Tensor, scales: torch.Tensor, block: int = 128) -> torch.Tensor:
    """Value by value, as the format is defined."""
    r, c = (torch.arange(n) // block for n in values.shape)
    return (values.double() * scales.double()[r][:, c]).float()


def tiny(directory: Path, **more: Any) -> Tensors:
    """A random target of transformers' on the disk, with matrices of more than one block."""
    from tests.model.test_parity import build, one_geometry

    wide = {"hidden_size": 160, "intermediate_size": 272, "linear_value_head_dim": 40}
    model = build(one_geometry(moe="num_experts" in more) | wide | more)
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def in_fp8(directory: Path, tensors: Tensors, names: tuple[str, ...]) -> Tensors:
    """Stores the named tensors in FP8, says so in the config, and gives the twin that holds what they stand for."""
    stored, twin = dict(tensors), dict(tensors)
    for name in tensors:
        if name.endswith(names):
            stored[name], stored[f"{name}_scale_inv"] = quantised(tensors[name])
            twin[name] = times_scales(stored[name], stored[f"{name}_scale_inv"])
    assert len(stored) > len(tensors)
    save_file(stored, directory / "model.safetensors")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": QUANTISATION}))
    return twin


def load(directory: Path, dtype: torch.dtype) -> tuple[Target, WeightFiles]:
    config = load_target_config(directory)
    files = WeightFiles.open(directory)
    return Target.load(files, config, config.vocab_size, torch.device("cpu"), dtype), files


def weights(target: Target) -> list[torch.Tensor]:
    found: list[torch.Tensor] = [target.embedding, target.head, target.final_norm]

    def collect(part: Any) -> None:
        for value in vars(part).values():
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif hasattr(value, "__dataclass_fields__"):
                collect(value)

    for block in target.blocks:
        collect(block)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fp8_checkpoint_equals_its_dequantised_twin(tmp_path: Path, dtype: torch.dtype) -> None:
    directory, twin_directory = tmp_path / "fp8", tmp_path / "twin"
    twin_tensors = in_fp8(directory, tiny(directory), WIDE)
    twin_directory.mkdir()
    save_file(twin_tensors, twin_directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (twin_directory / "config.json").write_text(json.dumps(config))
    target, files = load(directory, dtype)
    twin, plain = load(twin_directory, dtype)
    for mine, theirs in zip(weights(target), weights(twin), strict=True):
        assert torch.equal(mine, theirs)
    assert files.unused() == plain.unused() == ()
    assert files.quantised == BlockScales(128, 128) and plain.quantised is None


def test_experts_in_fp8_one_tensor_each_equal_their_dequantised_twins(tmp_path: Path) -> None:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 136}
    tensors = tiny(tmp_path, **experts)
    names = [name for name in tensors if ".experts.0." in name or ".experts.1." in name]
    assert names
    twin = in_fp8(tmp_path, tensors, tuple(names))
    target, _ = load(tmp_path, torch.float32)
    mixture: Any = target.blocks[1].mlp
    mlp = mixture.experts
    for expert in (0, 1):
        one = {part: twin[f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")}
        assert torch.equal(mlp.gate_up[expert], torch.cat((one["gate"], one["up"])))
        assert torch.equal(mlp.down[expert], one["down"])


def test_scales_of_stacked_matrices_belong_to_each(tmp_path: Path) -> None:
    matrices = torch.randn(3, 150, 130, generator=torch.Generator().manual_seed(0))
    parts = [quantised(matrix) for matrix in matrices]
    values, scales = (torch.stack([part[i] for part in parts]) for i in (0, 1))
    out = torch.empty(3, 150, 130)
    BlockScales(128, 128).dequantise(values, scales, out)
    assert torch.equal(out, torch.stack([times_scales(*part) for part in parts]))


# ------------------------------------------------------------------------------------------------ refusals

NAME = "model.layers.0.mlp.up_proj.weight"


def read(directory: Path, tensors: Tensors, quantisation: Json | None = QUANTISATION, device: str = "meta") -> None:
    """As a loader would, without reading data."""
    save_file(tensors, directory / "model.safetensors")
    config = {} if quantisation is None else {"quantization_config": quantisation}
    (directory / "config.json").write_text(json.dumps(config))
    with WeightReader(WeightFiles.open(directory), torch.device(device), torch.bfloat16) as reader:
        reader.tensor("layers.0.mlp.up_proj.weight", 150, 130)


def fp8() -> Tensors:
    values, scales = quantised(torch.randn(150, 130, generator=torch.Generator().manual_seed(0)))
    return {NAME: values, f"{NAME}_scale_inv": scales}


def test_a_sound_tensor_is_read(tmp_path: Path) -> None:
    read(tmp_path, fp8())
    read(tmp_path, fp8() | {f"{NAME}_scale_inv": fp8()[f"{NAME}_scale_inv"].bfloat16()}, device="cpu")


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda t: t.pop(f"{NAME}_scale_inv"), f"tensor {NAME} is F8_E4M3, but {NAME}_scale_inv is missing"),
        (
            lambda t: t.update({f"{NAME}_scale_inv": torch.ones(1, 2)}),
            rf"{NAME}_scale_inv is F32 \[1, 2\], but must be one of BF16, F16, F32 \[2, 2\]",
        ),
        (
            lambda t: t.update({f"{NAME}_scale_inv": torch.ones(2, 2, dtype=torch.uint8)}),
            rf"{NAME}_scale_inv is U8 \[2, 2\]",
        ),
        (lambda t: t.update({NAME: t[NAME].float()}), f"tensor {NAME} is F32, but has scales: must be F8_E4M3"),
        (lambda t: t.update({NAME: t[NAME].view(torch.uint8)}), f"tensor {NAME} is U8, but must be one of BF16"),
        (lambda t: t.update({NAME: t[NAME][:149].clone()}), r"shape \[149, 130\], but the config says \[150, 130\]"),
    ],
)
def test_a_tensor_that_is_not_what_the_format_says_is_named(change: Any, sentence: str, tmp_path: Path) -> None:
    tensors = fp8()
    change(tensors)
    with pytest.raises(ModelError, match=sentence):
        read(tmp_path, tensors)


def test_fp8_without_a_quantization_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"tensor {NAME} is F8_E4M3, but config.json has no quantization_config"):
        read(tmp_path, fp8(), quantisation=None)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"quant_method": "awq"}, "quant_method is 'awq', but must be 'fp8'"),
        ({"quant_method": None}, "quant_method is required"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
        ({"weight_block_size": None}, "weight_block_size is None, but must be two whole numbers"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]"),
    ],
)
def test_other_ways_to_quantise_are_refused_by_name(change: Json, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=sentence):
        read(tmp_path, fp8(), QUANTISATION | change)
