"""Random targets of the family against transformers' own code: dense and mixtures, every layer pattern, FP32.

Each case saves a tiny random model with transformers, loads it here from that directory, and compares logits and every
block's residual for a prefill in one piece, in random chunks, and token by token, and the greedy continuation.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from deployment.engine.loading import stretched
from model.config import load_target_config
from model.target import Target
from model.weights import WeightFiles
from tests.model.parity import Runner, distance, random_sizes, randomise

VOCABULARY, HIDDEN, TOKENS = 48, 32, 72  # more than a page of tokens
LINEAR, FULL = "linear_attention", "full_attention"
PATTERNS = [
    [LINEAR, LINEAR, LINEAR, FULL],
    [FULL, LINEAR, LINEAR],
    [LINEAR, FULL],
    [FULL, FULL],
    [LINEAR, LINEAR],
    [LINEAR, FULL, LINEAR, FULL, LINEAR],
]
# head_dim, partial factor, MRoPE sections: the sections fill half of the rotated dimensions
ROTARIES = [
    (16, 0.25, [1, 1, 0]),
    (16, 0.5, [2, 1, 1]),
    (32, 0.25, [2, 1, 1]),
    (8, 1.0, [2, 1, 1]),
    (32, 0.75, [4, 4, 4]),
]


@st.composite
def geometries(draw: st.DrawFn, moe: bool) -> dict[str, Any]:
    head_dim, factor, sections = draw(st.sampled_from(ROTARIES))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    key_heads = draw(st.sampled_from([1, 2]))
    pattern = draw(st.sampled_from(PATTERNS))
    geometry = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": len(pattern),
        "layer_types": pattern,
        "num_attention_heads": kv_heads * draw(st.sampled_from([1, 2, 3])),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(st.sampled_from([1, 2, 3])),
        "linear_key_head_dim": draw(st.sampled_from([8, 16])),
        "linear_value_head_dim": draw(st.sampled_from([8, 16])),
        "linear_conv_kernel_dim": draw(st.sampled_from([2, 4])),
        "rms_norm_eps": 1e-3,  # large, so that a norm with another epsilon shows
        "max_position_embeddings": 256,
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": draw(st.sampled_from([1e2, 1e4])),
            "partial_rotary_factor": factor,
            "mrope_section": sections,
            "mrope_interleaved": True,
        },
        "seed": draw(st.integers(0, 2**16)),
    }
    if moe:
        experts = draw(st.sampled_from([1, 4, 7]))
        geometry |= {
            "num_experts": experts,
            "num_experts_per_tok": draw(st.integers(1, experts)),
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 16,
        }
    else:
        geometry["intermediate_size"] = 40
    return geometry


def build(geometry: dict[str, Any]) -> Any:
    """transformers' model of that geometry, with random weights."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    geometry = dict(geometry)
    seed = geometry.pop("seed")
    moe = "num_experts" in geometry
    if moe:
        model: Any = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**geometry))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**geometry))
    model = model.eval().float()
    randomise(model, seed)
    return model


def load(directory: Path) -> Target:
    config = load_target_config(directory)
    return Target.load(WeightFiles.open(directory), config, config.vocab_size, torch.device("cpu"), torch.float32)


def residuals_and_logits(theirs: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle in one piece: logits [T, V], and the residual after each block side by side [T, L H]."""
    residuals: list[torch.Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        residuals.append((output[0] if isinstance(output, tuple) else output)[0])

    hooks = [layer.register_forward_hook(keep) for layer in theirs.model.layers]
    with torch.no_grad():
        logits = theirs(ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.cat(residuals, dim=-1)


@torch.no_grad()
def token_by_token(theirs: Any, ids: torch.Tensor) -> torch.Tensor:
    """The oracle through its own cache: how far it is from itself. Its cache needs one full-attention layer."""
    cache, steps = None, []
    for token in ids:
        out = theirs(token[None, None], cache=cache, use_cache=True)
        cache = out.cache if hasattr(out, "cache") else out.past_key_values
        steps.append(out.logits[0])
    return torch.cat(steps)


def save_as_is(theirs: Any, directory: Path) -> None:
    theirs.save_pretrained(directory)


def check(geometry: dict[str, Any], save: Callable[[Any, Path], None] = save_as_is) -> None:
    theirs = build(geometry)
    ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(geometry["seed"]))
    logits, whole = residuals_and_logits(theirs, ids)
    tolerance = (
        max(1e-4, 2 * distance(token_by_token(theirs, ids), logits)) if FULL in geometry["layer_types"] else 1e-4
    )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save(theirs, directory)
        ours = load(directory)
    for sizes in ([TOKENS], random_sizes(TOKENS, geometry["seed"]), [1] * TOKENS):
        got, features = Runner(ours).chunks(ids, sizes)
        assert distance(got, logits) < tolerance, sizes
        for block, (mine, oracle) in enumerate(zip(features.split(HIDDEN, -1), whole.split(HIDDEN, -1), strict=True)):
            assert distance(mine, oracle) < tolerance, (block, sizes)
    check_greedy(theirs, ours, ids[:20])


def check_greedy(theirs: Any, ours: Target, prompt: torch.Tensor, tokens: int = 12) -> None:
    """Equal continuations, up to a position where the oracle's two best logits are nearly equal."""
    runner, ids = Runner(ours), prompt
    logits = runner.run(prompt)[0]
    for _ in range(tokens):
        with torch.no_grad():
            oracle = theirs(ids[None], use_cache=False).logits[0, -1]
        best = oracle.topk(2).values
        if best[0] - best[1] < 1e-3:
            return
        assert int(logits[-1].argmax()) == int(oracle.argmax())
        chosen = oracle.argmax()[None]
        ids = torch.cat((ids, chosen))
        logits = runner.run(chosen)[0]


quickly = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@quickly
@given(geometries(moe=False))
def test_dense_targets_of_any_geometry_equal_transformers(geometry):
    check(geometry)


@quickly
@given(geometries(moe=True))
def test_mixtures_of_any_geometry_equal_transformers(geometry):
    check(geometry)


# ----------------------------------------------------------------------------------------- how files are laid out


def save_as_multimodal(theirs: Any, directory: Path) -> None:
    """As the published multimodal checkpoints are: nested config, `model.language_model.` names, fused experts, shards
    with an index, and tensors of parts that a text model does not have."""
    config = theirs.config.to_dict()
    outer = {
        "model_type": config["model_type"].removesuffix("_text"),
        "text_config": config,
        "vision_config": {"depth": 1},
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    (directory / "config.json").write_text(json.dumps(outer))
    state = theirs.state_dict()
    tensors = {name.replace("model.", "model.language_model.", 1): state[name].clone() for name in state}
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    tensors["mtp.fc.weight"] = torch.zeros(3, 3)
    tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(2, 2)
    names = sorted(tensors)
    shards = {f"model-{i + 1:05}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("moe, tied", [(False, True), (True, False)])
def test_published_multimodal_layout_loads_as_a_text_model(moe, tied):
    geometry = one_geometry(moe) | {"tie_word_embeddings": tied}
    check(geometry, save_as_multimodal)


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_a_stretched_target_equals_transformers_with_yarn_in_its_config(factor):
    """The start-up option on a plain config, against a config that asks for the same YaRN."""
    plain: dict[str, Any] = one_geometry(moe=False) | {"max_position_embeddings": 32}
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 32}
    theirs = build(plain | {"rope_parameters": plain["rope_parameters"] | rope})
    ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(5))
    logits, _ = residuals_and_logits(theirs, ids)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        build(plain).save_pretrained(directory)
        config = stretched(load_target_config(directory), factor)
        ours = Target.load(WeightFiles.open(directory), config, VOCABULARY, torch.device("cpu"), torch.float32)
        theirs.save_pretrained(directory)
        assert load_target_config(directory).rotary == config.rotary
    assert config.max_positions == 32 * factor
    assert distance(Runner(ours).chunks(ids, [TOKENS])[0], logits) < 1e-4


def test_parts_that_a_text_model_does_not_have_are_left_unused_and_nothing_else():
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_as_multimodal(build(one_geometry(moe=True)), directory)
        config = load_target_config(directory)
        checkpoint = WeightFiles.open(directory)
        Target.load(checkpoint, config, config.vocab_size, torch.device("cpu"), torch.float32)
        assert checkpoint.unused() == ("mtp.fc.weight", "visual.patch_embed.proj.weight")


def one_geometry(moe: bool) -> dict[str, Any]:
    geometry: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 3,
        "layer_types": [LINEAR, FULL, LINEAR],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "seed": 3,
    }
    if moe:
        return geometry | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 16,
        }
    return geometry | {"intermediate_size": 40}
