"""A checkpoint of a target's geometry, and one of its drafter's, with random weights, written as fast as files take
them: for measurements that need files and no text. The tokenizer is the demo model's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.round_models import STD, RandomWeights
from model import DEMO
from model.config import DraftConfig, MoeConfig, RotaryConfig, TargetConfig
from model.drafter import Drafter
from model.heads import ProposalHead
from model.target import Target

SHARDS = 16
BLOCK = 64 << 20
"""Random numbers in BF16 that are written again and again: nobody looks at them."""
TEXT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
Shapes = Mapping[str, tuple[int, ...]]


class NamesAndShapes(RandomWeights):
    """Takes down what a model asks for."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, ...]] = {}

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        self.found[name] = shape


def write_models(directory: Path, target: TargetConfig, draft: DraftConfig) -> int:
    """`target` and `draft` in a directory -> bytes of their tensors."""
    targets, drafts = shapes_of(target, draft)
    size = write(directory / "target", target_json(target), targets) + write(
        directory / "draft", draft_json(draft), drafts
    )
    for name in TEXT:
        shutil.copy(DEMO / "target" / name, directory / "target" / name)
    return size


def shapes_of(target: TargetConfig, draft: DraftConfig) -> tuple[Shapes, Shapes]:
    """Of all tensors, by name."""
    targets, drafts = NamesAndShapes(), NamesAndShapes()
    model = Target.load(targets, target, target.vocab_size, torch.device("meta"), torch.bfloat16)
    causal = (False,) * draft.num_layers
    Drafter.load(drafts, draft, causal, model.embedding, ProposalHead.full(model))
    return targets.found, drafts.found


def bytes_of(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values()) * torch.bfloat16.itemsize


def write(directory: Path, config: dict[str, Any], shapes: Shapes) -> int:
    """In shards, several at a time -> bytes of the tensors."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    numbers = torch.empty(min(BLOCK, bytes_of(shapes)), dtype=torch.bfloat16).normal_(std=STD)
    block = memoryview(numbers.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType] - before Python 3.12
    names = list(shapes)
    parts = {
        f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors": {name: shapes[name] for name in names[shard::SHARDS]}
        for shard in range(SHARDS)
    }
    with ThreadPoolExecutor(SHARDS) as pool:
        list(pool.map(lambda part: write_shard(directory / part[0], part[1], block), parts.items()))
    weight_map = {name: file for file, part in parts.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return bytes_of(shapes)


def write_shard(file: Path, shapes: Shapes, block: memoryview) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + torch.Size(shape).numel() * torch.bfloat16.itemsize
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb", buffering=0) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        while end > 0:
            end -= stream.write(block[: min(end, len(block))])


# ------------------------------------------------------------------------------------------------ configs


def target_json(config: TargetConfig) -> dict[str, Any]:
    """`config.json`, as `load_target_config` reads it."""
    rotary, moe = config.rotary, config.moe
    mixture = {} if moe is None else mixture_json(moe)
    return {
        "model_type": "qwen3_5_text" if moe is None else "qwen3_5_moe_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "layer_types": list(config.layer_types),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "linear_num_key_heads": config.gdn_key_heads,
        "linear_num_value_heads": config.gdn_value_heads,
        "linear_key_head_dim": config.gdn_key_dim,
        "linear_value_head_dim": config.gdn_value_dim,
        "linear_conv_kernel_dim": config.conv_kernel,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": rope(rotary)
        | {
            "partial_rotary_factor": rotary.dim / config.head_dim,
            "mrope_section": list(rotary.sections or ()),
            "mrope_interleaved": rotary.interleaved,
        },
        **mixture,
    }


def mixture_json(moe: MoeConfig) -> dict[str, Any]:
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "shared_expert_intermediate_size": moe.shared_intermediate_size,
    }


def draft_json(config: DraftConfig) -> dict[str, Any]:
    """`config.json` of a drafter, as `load_draft_config` reads it."""
    nested: dict[str, Any] = {
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
    }
    if config.kind == "dflash2":
        nested |= {
            "conv_kernel_size": config.conv_taps,
            "conv_group_size": config.conv_group,
            "selector_rank": config.selector_rank,
            "selector_top_k": config.selector_top_k,
        }
    return {
        "architectures": ["DFlash2DraftModel" if config.kind == "dflash2" else "DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "layer_types": list(config.layer_types),
        "sliding_window": config.window,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "num_target_layers": config.num_target_layers,
        "rope_parameters": rope(config.rotary),
        "dflash_config": nested,
    }


def rope(rotary: RotaryConfig) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": rotary.theta}
