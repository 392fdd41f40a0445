"""Weights come whole and in the right shape, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model import DEMO
from model.errors import ModelError
from model.weights import WeightFiles, sampled


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.language_model.embed_tokens.weight": torch.randn(8, 4, generator=generator).to(torch.bfloat16),
        "model.language_model.layers.0.mlp.up_proj.weight": torch.randn(6, 4, generator=generator),
        "model.visual.blocks.0.norm1.weight": torch.randn(3, generator=generator),
        "lm_head.weight": torch.randn(8, 4, generator=generator),
        "mtp.norm.weight": torch.randn(4, generator=generator),
    }


def sharded(directory: Path, parts: dict[str, dict[str, torch.Tensor]]) -> Path:
    for name, part in parts.items():
        save_file(part, directory / name)
    weight_map = {tensor: name for name, part in parts.items() for tensor in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def two_shards(directory: Path) -> Path:
    every = list(tensors().items())
    return sharded(directory, {"a.safetensors": dict(every[:2]), "b.safetensors": dict(every[2:])})


def test_names_are_those_of_the_bare_text_model(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    assert WeightFiles.open(tmp_path).names() == (
        "embed_tokens.weight",
        "layers.0.mlp.up_proj.weight",
        "lm_head.weight",
        "mtp.norm.weight",
        "visual.blocks.0.norm1.weight",
    )


def test_tensors_are_bitwise_those_of_the_file_and_own_their_memory(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    checkpoint = WeightFiles.open(tmp_path)
    first = checkpoint.tensor("embed_tokens.weight", (8, 4))
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, tensors()["model.language_model.embed_tokens.weight"])
    first.zero_()
    assert checkpoint.tensor("embed_tokens.weight", (8, 4)).abs().sum() > 0


def test_shards_read_like_one_file(tmp_path: Path) -> None:
    checkpoint = WeightFiles.open(two_shards(tmp_path))
    assert torch.equal(checkpoint.tensor("lm_head.weight", (8, 4)), tensors()["lm_head.weight"])
    assert torch.equal(
        checkpoint.tensor("layers.0.mlp.up_proj.weight", (6, 4)),
        tensors()["model.language_model.layers.0.mlp.up_proj.weight"],
    )


def test_unused_names_what_nobody_asked_for(tmp_path: Path) -> None:
    checkpoint = WeightFiles.open(two_shards(tmp_path))
    for name, shape in (("embed_tokens.weight", (8, 4)), ("lm_head.weight", (8, 4))):
        checkpoint.tensor(name, shape)
    assert checkpoint.unused() == ("layers.0.mlp.up_proj.weight", "mtp.norm.weight", "visual.blocks.0.norm1.weight")


@pytest.mark.parametrize("spelling", ["predecessor_codebook", "predecessor_codebook.weight"])
def test_codebooks_are_found_in_both_spellings(tmp_path: Path, spelling: str) -> None:
    save_file({f"candidate_selector.{spelling}": torch.ones(8, 2)}, tmp_path / "model.safetensors")
    checkpoint = WeightFiles.open_draft(tmp_path)
    assert "candidate_selector.predecessor_codebook" in checkpoint
    assert checkpoint.tensor("candidate_selector.predecessor_codebook", (8, 2)).sum() == 16
    assert checkpoint.unused() == ()


def test_missing_and_misshapen_tensors_are_named_with_file_and_shapes(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    checkpoint = WeightFiles.open(tmp_path)
    with pytest.raises(ModelError, match=r"tensor norm\.weight of shape \[4\] is missing"):
        checkpoint.tensor("norm.weight", (4,))
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor lm_head\.weight has shape \[8, 4\].*\[8, 5\]"):
        checkpoint.tensor("lm_head.weight", (8, 5))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (two_shards(tmp_path) / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"shard b\.safetensors is missing"):
        WeightFiles.open(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/a.safetensors"])
def test_an_index_cannot_point_outside_its_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ModelError, match="must lie beside the index"):
        WeightFiles.open(tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "nonsense"])
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        WeightFiles.open(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 0.5, -1])
def test_a_truncated_file_is_refused_wherever_it_was_cut(tmp_path: Path, keep: float) -> None:
    content = (DEMO / "dflash/model.safetensors").read_bytes()
    length = int(len(content) * keep) if isinstance(keep, float) else len(content) - 1 if keep < 0 else keep
    (tmp_path / "model.safetensors").write_bytes(content[:length])
    with pytest.raises(ModelError, match="is truncated or corrupt"):
        WeightFiles.open(tmp_path)


def test_garbage_in_the_header_is_refused(tmp_path: Path) -> None:
    content = bytearray((DEMO / "dflash/model.safetensors").read_bytes()[:4096])
    content[8:40] = b"\xff" * 32
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="is truncated or corrupt"):
        WeightFiles.open(tmp_path)


def test_no_weights_and_no_directory_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        WeightFiles.open(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        WeightFiles.open(tmp_path / "nowhere")


def test_one_tensor_under_two_prefixes_is_ambiguous(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(4), "norm.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="is there twice"):
        WeightFiles.open(tmp_path)


def test_weights_of_another_number_format_are_refused(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.ones(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"norm\.weight is I8"):
        WeightFiles.open(tmp_path).tensor("norm.weight", (4,))


@pytest.mark.parametrize("name", ["lm_head.weight", "d2t", "t2d", "model.embed_tokens.weight", "mask_embedding"])
def test_draft_tensors_that_change_the_mathematics_are_refused_by_name(tmp_path: Path, name: str) -> None:
    save_file(load_file(DEMO / "dflash/model.safetensors") | {name: torch.ones(2)}, tmp_path / "model.safetensors")
    WeightFiles.open(tmp_path)
    with pytest.raises(ModelError, match=f"tensor {name} is not supported"):
        WeightFiles.open_draft(tmp_path)


def test_demo_drafters_open_as_drafters() -> None:
    assert len(WeightFiles.open_draft(DEMO / "dflash").names()) == 36
    assert len(WeightFiles.open_draft(DEMO / "dflash2").names()) == 51


def test_sha256_tells_two_trainings_of_one_geometry_apart(tmp_path: Path) -> None:
    hashes = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        save_file(tensors(seed), tmp_path / name / "model.safetensors")
        hashes.append(WeightFiles.open(tmp_path / name).sha256())
    assert hashes[0] == hashes[1] != hashes[2]


SIZE = 1 << 20
"""Bytes of a tensor of which only some places are read."""


def one_byte_on(directory: Path, place: int) -> WeightFiles:
    directory.mkdir()
    values = torch.zeros(SIZE, dtype=torch.uint8)
    values[place] = 1
    save_file({"lm_head.weight": values.view(torch.float32).view(512, 512)}, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return WeightFiles.open(directory)


@pytest.mark.parametrize("place", [0, SIZE // 2, SIZE - 1, *(part.start for part in sampled("lm_head.weight", SIZE))])
def test_sha256_tells_apart_what_differs_at_the_beginning_in_the_middle_at_the_end_or_where_the_name_says(
    tmp_path: Path, place: int
) -> None:
    first, second = one_byte_on(tmp_path / "a", place), one_byte_on(tmp_path / "b", 300_000)
    assert first.sha256() != second.sha256()


def test_places_that_tell_a_tensor_from_another_lie_inside_and_depend_on_its_name() -> None:
    for size in (0, 5, 4096, 7 * 4096):
        assert sampled("a", size) == [slice(0, size)], "small ones are read whole"
    for size in (7 * 4096 + 1, SIZE, 5 << 30):
        parts = sampled("a", size)
        assert parts[0].start == 0 and parts[-1].stop == size and len(parts) <= 7
        assert all(part.stop - part.start == 4096 for part in parts)
        assert len({*map(str, parts)} & {*map(str, sampled("b", size))}) == 3, "beginning, middle and end alone"


def test_the_whole_digest_tells_apart_what_differs_beyond_the_samples(tmp_path: Path) -> None:
    first, second = one_byte_on(tmp_path / "a", 300_000), one_byte_on(tmp_path / "b", 300_001)
    assert first.sha256() == second.sha256()
    assert first.sha256(whole=True) != second.sha256(whole=True)
    assert first.sha256(whole=True) != first.sha256()
