"""Prefill and plain decoding of transformers with flash-linear-attention at a target's geometry, for
`bench/round.py`. Their kernels for prompts choose between two configurations each: all of them take minutes.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner

from bench.gpu import elapsed_ms
from bench.round_models import DEVICE, DTYPE
from bench.round_prefill import PLAIN_BATCHES, PLAIN_CONTEXT, TOKENS
from model.config import TargetConfig

STEPS = 3
"""Tokens a lane of one sample: each takes 0.1 s and more."""


def peer_rows(model: str, config: TargetConfig) -> list[dict[str, Any]]:
    """Without the libraries one row, which says why it has no time."""
    try:
        theirs = random_theirs(config)
    except ImportError as error:
        return [
            {"name": "transformers", "version": None, "model": model, "B": 1, "ms_per_token": None, "why": str(error)}
        ]
    row = {**libraries(), "model": model}
    if config.moe is not None:
        row["experts"] = theirs.config._experts_implementation
    found: list[dict[str, Any]] = []
    with few_configurations():
        for batch in PLAIN_BATCHES:
            ms = decoding_ms(theirs, config, batch)
            found.append({**row, "B": batch, "ms_per_token": round(ms, 3)})
            print(found[-1], flush=True)
        found.append({**row, "B": 1, "tokens": TOKENS, "prefill_ms": round(prefill_ms(theirs, config), 2)})
        print(found[-1], flush=True)
    return found


@contextmanager
def few_configurations() -> Iterator[None]:
    """Their kernels for prompts take minutes to choose among all configurations."""
    prune = Autotuner.prune_configs

    def first_two(self: Autotuner, kwargs: dict[str, Any]) -> list[Any]:
        return list(prune(self, kwargs))[:2]

    Autotuner.prune_configs = first_two
    try:
        yield
    finally:
        Autotuner.prune_configs = prune


def libraries() -> dict[str, str]:
    from transformers.utils.import_utils import is_flash_linear_attention_available

    name, version = "transformers", importlib.metadata.version("transformers")
    if is_flash_linear_attention_available():
        name, version = f"{name} + fla", f"{version} + {importlib.metadata.version('fla-core')}"
    return {"name": name, "version": version}


def random_theirs(config: TargetConfig) -> Any:
    """Their model of the same geometry; how large its random numbers are does not matter to its speed."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    rotary = config.rotary
    rope = {
        "rope_type": "default",
        "rope_theta": rotary.theta,
        "partial_rotary_factor": rotary.dim / config.head_dim,
        "mrope_section": list(rotary.sections or ()),
        "mrope_interleaved": rotary.interleaved,
    }
    moe = config.moe
    mixed = moe and {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "shared_expert_intermediate_size": moe.shared_intermediate_size,
    }
    kind: Any = Qwen3_5MoeTextConfig if moe else Qwen3_5TextConfig
    theirs = kind(
        **(mixed or {"intermediate_size": config.intermediate_size}),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        layer_types=list(config.layer_types),
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope,
        linear_num_key_heads=config.gdn_key_heads,
        linear_num_value_heads=config.gdn_value_heads,
        linear_key_head_dim=config.gdn_key_dim,
        linear_value_head_dim=config.gdn_value_dim,
        linear_conv_kernel_dim=config.conv_kernel,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.tie_embeddings,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(DEVICE):
            return (Qwen3_5MoeForCausalLM if moe else Qwen3_5ForCausalLM)(theirs).eval()
    finally:
        torch.set_default_dtype(before)


def decoding_ms(theirs: Any, config: TargetConfig, batch: int) -> float:
    """A token of each lane, after a context as long as ours."""
    ids = torch.randint(0, config.vocab_size, (batch, PLAIN_CONTEXT), device=DEVICE)
    out = theirs(ids, use_cache=True, logits_to_keep=1)
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)

    def steps() -> None:
        nonlocal token
        for _ in range(STEPS):
            token = theirs(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    return elapsed_ms(steps, samples=3) / STEPS


def prefill_ms(theirs: Any, config: TargetConfig) -> float:
    """A prompt of one lane, as ours is: with its cache, and the scores of the last column."""
    ids = torch.randint(0, config.vocab_size, (1, TOKENS), device=DEVICE)
    return elapsed_ms(lambda: theirs(ids, use_cache=True, logits_to_keep=1), samples=3)
