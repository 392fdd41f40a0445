"""A tiny random target and both drafters, as checkpoints on disk: 8 public rows of 32, so that laws are computable."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deployment.engine.durable_sessions import DurableSessions
from deployment.engine.engine import Engine
from deployment.engine.loading import Models, load_models
from deployment.engine.options import Backend, EngineOptions
from tests.engine.driving import TARGET, Driver

PUBLIC, VOCABULARY, MASK = 8, 32, 31
DRAFT_TOKENS = 3
HIDDEN, INNER, DIM, CANDIDATES, RANK = 16, 24, 8, 5, 4
SHARPNESS = 1.5
"""How far the target's logits spread."""

ROTARY = {"rope_type": "default", "rope_theta": 1e4}
TARGET_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": DIM,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": DIM,
    "linear_value_head_dim": DIM,
    "linear_conv_kernel_dim": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": MASK,
    "rope_parameters": ROTARY | {"partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}


def draft_config(kind: str) -> dict[str, Any]:
    """A local and, for DFlash, a full layer."""
    nested: dict[str, Any] = {"target_layer_ids": [0, 1], "mask_token_id": MASK, "block_size": DRAFT_TOKENS + 1}
    layers = ["sliding_attention", "full_attention"]
    if kind == "dflash2":
        nested |= {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": RANK, "selector_top_k": CANDIDATES}
        layers = ["sliding_attention"]
    return {
        "architectures": ["DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": len(layers),
        "intermediate_size": INNER,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": DIM,
        "rms_norm_eps": 1e-5,
        "layer_types": layers,
        "sliding_window": 32,
        "max_position_embeddings": 256,
        "rope_parameters": ROTARY,
        "num_target_layers": 2,
        "is_causal": False,
        "dflash_config": nested,
    }


def target_shapes() -> dict[str, tuple[int, ...]]:
    channels = 3 * DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.layers.0.linear_attn.in_proj_qkv.weight": (channels, HIDDEN),
        "model.layers.0.linear_attn.in_proj_z.weight": (DIM, HIDDEN),
        "model.layers.0.linear_attn.in_proj_b.weight": (1, HIDDEN),
        "model.layers.0.linear_attn.in_proj_a.weight": (1, HIDDEN),
        "model.layers.0.linear_attn.conv1d.weight": (channels, 1, 2),
        "model.layers.0.linear_attn.A_log": (1,),
        "model.layers.0.linear_attn.dt_bias": (1,),
        "model.layers.0.linear_attn.norm.weight": (DIM,),
        "model.layers.0.linear_attn.out_proj.weight": (HIDDEN, DIM),
        "model.layers.1.self_attn.q_norm.weight": (DIM,),
        "model.layers.1.self_attn.k_norm.weight": (DIM,),
    }
    shapes |= projections("model.layers.1.self_attn.", 4 * DIM)
    for layer in range(2):
        shapes |= surroundings(f"model.layers.{layer}.")
    return shapes


def draft_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    two = "selector_top_k" in config["dflash_config"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        shapes |= surroundings(prefix) | projections(f"{prefix}self_attn.", 2 * DIM)
        shapes |= {f"{prefix}self_attn.q_norm.weight": (DIM,), f"{prefix}self_attn.k_norm.weight": (DIM,)}
        for branch in ("attention_conv", "mlp_conv") if two else ():
            shapes[f"{prefix}{branch}.base_kernel"] = (2, 2, HIDDEN)
            shapes[f"{prefix}{branch}.kernel_projection.weight"] = (4 * HIDDEN // 8, HIDDEN)
    if two:
        shapes["candidate_selector.hidden_projection.weight"] = (RANK, HIDDEN)
        shapes["candidate_selector.predecessor_codebook"] = (VOCABULARY, RANK)
        shapes["candidate_selector.successor_codebook"] = (VOCABULARY, RANK)
    return shapes


def projections(prefix: str, query_rows: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}q_proj.weight": (query_rows, HIDDEN),
        f"{prefix}k_proj.weight": (DIM, HIDDEN),
        f"{prefix}v_proj.weight": (DIM, HIDDEN),
        f"{prefix}o_proj.weight": (HIDDEN, 2 * DIM),
    }


def surroundings(prefix: str) -> dict[str, tuple[int, ...]]:
    """What every block has beside its mixer."""
    return {
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, INNER),
    }


def write_checkpoint(directory: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """Random weights: matrices that keep a vector's size, drafter norms about 1, the target's about 0 (they add 1)."""
    generator = torch.Generator().manual_seed(seed)
    offset = config["model_type"] == "qwen3_5_text"
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            plain = not offset or name.endswith("linear_attn.norm.weight")
            weights[name] = 0.3 * noise + (1.0 if plain else 0.0)
        else:
            weights[name] = noise / shape[-1] ** 0.5 * (SHARPNESS if name == "lm_head.weight" else 1.0)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")


@functools.cache
def directories() -> Path:
    """`target`, `dflash` and `dflash2`, written once a process and removed with it."""
    root = Path(_kept_directory().name)
    write_checkpoint(root / "target", TARGET_CONFIG, target_shapes(), seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TARGET / name, root / "target" / name)
    for kind, seed in (("dflash", 8), ("dflash2", 13)):  # seeds whose drafts are accepted now and then
        write_checkpoint(root / kind, draft_config(kind), draft_shapes(draft_config(kind)), seed)
    return root


@functools.cache
def _kept_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-model-")


def tiny_options(backend: Backend, **more: Any) -> EngineOptions:
    draft = None if backend == "none" else directories() / backend
    return EngineOptions(directories() / "target", draft, backend, public_rows=PUBLIC, **more)


@functools.cache
def tiny_models(backend: Backend, draft_tokens: int | None = None) -> Models:
    return load_models(tiny_options(backend, draft_tokens=draft_tokens))


class TinyDriver(Driver):
    """A driver whose engine has the tiny model."""

    def __init__(
        self,
        backend: Backend = "none",
        draft_tokens: int | None = None,
        durable: DurableSessions | None = None,
        **more: Any,
    ) -> None:
        self.events = []
        options = tiny_options(backend, draft_tokens=draft_tokens, **more)
        self.engine = Engine(tiny_models(backend, draft_tokens), options, self.events.append, durable=durable)
