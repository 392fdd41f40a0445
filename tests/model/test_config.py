"""Configs are read in all their spellings, and what would change the mathematics is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model import DEMO
from model.config import (
    check_fit,
    load_draft_config,
    load_target_config,
)
from model.errors import ModelError
from model.generation_defaults import GenerationDefaults
from model.generation_defaults import load_generation_defaults as read_generation_defaults

Json = dict[str, Any]


def written(directory: Path, config: Json, name: str = "config.json") -> Path:
    (directory / name).write_text(json.dumps(config))
    return directory


@pytest.fixture
def target() -> Json:
    return json.loads((DEMO / "target/config.json").read_text())


@pytest.fixture(params=["dflash", "dflash2"])
def draft(request: pytest.FixtureRequest) -> Json:
    return json.loads((DEMO / request.param / "config.json").read_text())


def load_generation_defaults(directory: Path) -> GenerationDefaults:
    return read_generation_defaults(directory, load_target_config(directory))


def without(config: Json, *names: str) -> Json:
    return {name: value for name, value in config.items() if name not in names}


MOE: Json = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}


# ---------------------------------------------------------------------------------------------- target


def test_demo_target_geometry() -> None:
    config = load_target_config(DEMO / "target")
    assert config.conv_channels == 2 * 2 * 64 + 4 * 64
    assert config.full_layers == (3, 7) and config.gdn_layers == (0, 1, 2, 4, 5, 6)
    assert (config.num_heads, config.num_kv_heads) == (5, 1)
    assert config.rotary.dim == 16 and config.rotary.sections == (3, 3, 2) and config.rotary.interleaved
    assert config.eos_ids == (8180, 8178) and config.tie_embeddings


def test_composite_config_reads_its_text_part(tmp_path: Path, target: Json) -> None:
    text = without(target, "tie_word_embeddings")
    outer = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text, "vision_config": {}}
    assert load_target_config(written(tmp_path, outer)) == load_target_config(DEMO / "target")


def test_composite_config_decides_about_tied_embeddings(tmp_path: Path, target: Json) -> None:
    outer = {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": target}
    assert not load_target_config(written(tmp_path, outer)).tie_embeddings


def test_layer_types_follow_the_interval_when_not_listed(tmp_path: Path, target: Json) -> None:
    written(tmp_path, without(target, "layer_types"))
    assert load_target_config(tmp_path).full_layers == (3, 7)
    written(tmp_path, without(target, "layer_types") | {"full_attention_interval": 2})
    assert load_target_config(tmp_path).full_layers == (1, 3, 5, 7)


def test_old_rotary_schema_is_the_same_config(tmp_path: Path, target: Json) -> None:
    old = without(target, "rope_parameters") | {
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.25,
        "rope_scaling": {"type": "mrope", "mrope_section": [3, 3, 2]},
    }
    assert load_target_config(written(tmp_path, old)) == load_target_config(DEMO / "target")


def test_yarn_constants_are_resolved(tmp_path: Path, target: Json) -> None:
    target["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    yarn = load_target_config(written(tmp_path, target)).rotary.yarn
    assert yarn is not None and yarn.factor == 4.0 and yarn.original_positions == 1024
    assert yarn.attention_factor == pytest.approx(1.1386294361119891)  # 0.1 ln 4 + 1
    assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (32.0, 1.0, True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_experts": 128}, "num_experts is 128"),
        ({"model_type": "qwen3_5_moe_text"}, "num_experts is required"),
        (MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        (MOE | {"norm_topk_prob": False}, "norm_topk_prob is False"),
        (MOE | {"mlp_only_layers": [1]}, "mlp_only_layers is [1]"),
        (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"model_type": "llama"}, 'model_type is "llama"'),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, 'rope_type is "llama3"'),
        ({"rope_parameters": {"rope_theta": 1e6, "mrope_section": [3, 3, 3]}}, "mrope_section is [3, 3, 3]"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 2}}, "partial_rotary_factor 2"),
        ({"rope_parameters": {}}, "rope_theta is required"),
        ({"num_hidden_layers": 9}, "layer_types has 8 entries"),
        ({"layer_types": ["linear_attention"] * 7 + ["sparse"]}, "layer_types[7] is 'sparse'"),
        ({"num_key_value_heads": 2}, "must divide num_attention_heads 5"),
        ({"linear_num_value_heads": 3}, "must be a multiple of 2"),
        ({"hidden_size": "320"}, "hidden_size is '320'"),
        ({"hidden_size": None}, "hidden_size is required"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"eos_token_id": [1, 9000]}, "eos_token_id has 9000"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"text_config": 3}, "text_config is 3"),
    ],
)
def test_target_refusals_name_the_field(tmp_path: Path, target: Json, change: Json, sentence: str) -> None:
    with pytest.raises(ModelError) as refusal:
        load_target_config(written(tmp_path, target | change))
    assert sentence in str(refusal.value) and str(tmp_path) in str(refusal.value)


def test_unknown_directory_missing_file_and_broken_json_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model directory .*nowhere does not exist"):
        load_target_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        load_target_config(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load_target_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load_target_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        load_target_config(tmp_path)


# ---------------------------------------------------------------------------------------------- draft


def test_demo_drafters() -> None:
    dflash, dflash2 = load_draft_config(DEMO / "dflash"), load_draft_config(DEMO / "dflash2")
    assert (dflash.kind, dflash.block_size, dflash.sliding_layers, dflash.full_layers) == ("dflash", 16, (0, 1), (2,))
    assert dflash.conv_taps is dflash.conv_group is dflash.selector_rank is dflash.selector_top_k is None
    assert (dflash2.kind, dflash2.block_size, dflash2.full_layers) == ("dflash2", 8, ())
    assert (dflash2.conv_taps, dflash2.conv_group, dflash2.selector_rank, dflash2.selector_top_k) == (2, 16, 64, 16)
    for config in (dflash, dflash2):
        assert config.window == 256 and config.causal == (False,) * 3 and config.target_layer_ids == (1, 3, 6)
        assert config.rotary.dim == config.head_dim == 64
        check_fit(load_target_config(DEMO / "target"), config)


def test_draft_fields_are_found_at_the_top_level_too(tmp_path: Path, draft: Json) -> None:
    flat = without(draft, "dflash_config") | draft["dflash_config"]
    assert load_draft_config(written(tmp_path, flat)) == load_draft_config(written(tmp_path, draft))


def test_draft_config_section_wins_over_the_top_level(tmp_path: Path, draft: Json) -> None:
    draft["dflash_config"]["block_size"] = 4
    assert load_draft_config(written(tmp_path, draft)).block_size == 4


def test_causality_is_what_the_checkpoint_says_or_unknown(tmp_path: Path, draft: Json) -> None:
    silent = without(draft, "is_causal")
    assert load_draft_config(written(tmp_path, silent)).causal is None
    silent["dflash_config"]["causal"] = True
    assert load_draft_config(written(tmp_path, silent)).causal == (True,) * 3
    assert load_draft_config(written(tmp_path, silent | {"is_causal": False})).causal == (False,) * 3


def test_missing_layer_types_mean_full_attention_without_a_window(tmp_path: Path, draft: Json) -> None:
    config = load_draft_config(written(tmp_path, without(draft, "layer_types")))
    assert config.layer_types == ("full_attention",) * 3 and config.window is None


def test_sliding_layers_need_a_window(tmp_path: Path, draft: Json) -> None:
    with pytest.raises(ModelError, match=r'sliding_window is required because layer_types\[0\] is "sliding_attention"'):
        load_draft_config(written(tmp_path, without(draft, "sliding_window")))


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "ids"),
    [(64, 5, (1, 16, 31, 46, 61)), (40, 8, (1, 6, 11, 16, 22, 27, 32, 37)), (32, 5, (1, 8, 15, 22, 29)), (9, 1, (4,))],
)
def test_missing_target_layer_ids_are_interpolated(
    tmp_path: Path, draft: Json, target_layers: int, draft_layers: int, ids: tuple[int, ...]
) -> None:
    del draft["dflash_config"]["target_layer_ids"]
    sizes = {"num_target_layers": target_layers, "num_hidden_layers": draft_layers}
    config = load_draft_config(written(tmp_path, without(draft, "layer_types") | sizes))
    assert config.target_layer_ids == ids


def test_target_layer_ids_cannot_be_made_up(tmp_path: Path, draft: Json) -> None:
    del draft["dflash_config"]["target_layer_ids"]
    with pytest.raises(ModelError, match="target_layer_ids is missing"):
        load_draft_config(written(tmp_path, without(draft, "num_target_layers")))


def test_leaked_partial_rotary_is_ignored_and_the_old_schema_read(tmp_path: Path, draft: Json) -> None:
    expected = load_draft_config(written(tmp_path, draft)).rotary
    draft["rope_parameters"] |= {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    assert load_draft_config(written(tmp_path, draft)).rotary == expected
    old = without(draft, "rope_parameters") | {"rope_theta": 10000000, "rope_scaling": None}
    assert load_draft_config(written(tmp_path, old)).rotary == expected


def test_scalars_of_draft_logits_and_embeddings(tmp_path: Path, draft: Json) -> None:
    plain = load_draft_config(written(tmp_path, draft))
    assert (plain.output_multiplier, plain.logit_softcap, plain.embedding_scale) == (1.0, None, 1.0)
    draft["dflash_config"] |= {"output_multiplier": 0.2, "final_logit_softcapping": 20, "input_embedding_scale": 3.0}
    scaled = load_draft_config(written(tmp_path, draft))
    assert (scaled.output_multiplier, scaled.logit_softcap, scaled.embedding_scale) == (0.2, 20.0, 3.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "must name DFlashDraftModel or DFlash2DraftModel"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"attention_sink_bias": True}, "attention_sink_bias is True"),
        ({"sample_from_anchor": True}, "sample_from_anchor is True"),
        ({"projector_type": "domino"}, "projector_type is 'domino'"),
        ({"draft_vocab_size": 4096}, "draft_vocab_size is 4096"),
        ({"selector_vocab_size": 4096}, "selector_vocab_size is 4096"),
        ({"target_hidden_size": 640}, "target_hidden_size is 640"),
        ({"has_own_lm_head": True}, "has_own_lm_head is True"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, "plus one"),
        ({"num_hidden_layers": 2}, "layer_types has 3 entries"),
        ({"is_causal": "no"}, "is_causal is 'no'"),
        ({"dflash_config": []}, "dflash_config is []"),
    ],
)
def test_draft_refusals_name_the_field(tmp_path: Path, draft: Json, change: Json, sentence: str) -> None:
    with pytest.raises(ModelError) as refusal:
        load_draft_config(written(tmp_path, draft | change))
    assert sentence in str(refusal.value)


def test_a_mask_embedding_file_is_refused(tmp_path: Path, draft: Json) -> None:
    (tmp_path / "mask_embedding.pt").touch()
    with pytest.raises(ModelError, match=r"mask_embedding\.pt"):
        load_draft_config(written(tmp_path, draft))


def test_unknown_draft_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"draft directory .*nowhere does not exist"):
        load_draft_config(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 640}, "hidden_size is 640, the target's is 320"),
        ({"vocab_size": 248320}, "vocab_size is 248320, the target's is 8192"),
        ({"num_target_layers": 64}, "num_target_layers is 64, the target has 8 layers"),
        ({"target_layer_ids": (1, 8)}, "target_layer_ids has 8, but the target's layers are 0 to 7"),
        ({"mask_token_id": 8192}, "mask_token_id is 8192, but the target has 8192 embedding rows"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(change: Json, sentence: str) -> None:
    target, draft = load_target_config(DEMO / "target"), load_draft_config(DEMO / "dflash2")
    with pytest.raises(ModelError, match="the draft does not fit the target") as refusal:
        check_fit(target, replace(draft, **change))
    assert sentence in str(refusal.value)


# ---------------------------------------------------------------------------------------------- generation


def test_generation_defaults_of_the_demo() -> None:
    defaults = load_generation_defaults(DEMO / "target")
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.7, 20, 0.95)
    assert defaults.eos_ids == (8180, 8178)


def test_generation_defaults_without_a_file_are_plain_sampling(tmp_path: Path, target: Json) -> None:
    defaults = load_generation_defaults(written(tmp_path, target))
    assert defaults == GenerationDefaults(eos_ids=(8180, 8178))
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.repetition_penalty) == (1.0, 0, 1.0, 1.0)


def test_generation_defaults_have_filters_and_penalties_of_the_file(tmp_path: Path, target: Json) -> None:
    written(tmp_path, target)
    given: Json = {"min_p": 0.05, "repetition_penalty": 1.05, "presence_penalty": 1.5, "frequency_penalty": -0.5}
    written(tmp_path, given, "generation_config.json")
    assert load_generation_defaults(tmp_path) == GenerationDefaults(eos_ids=(8180, 8178), **given)


def test_generation_defaults_without_sampling_are_greedy(tmp_path: Path, target: Json) -> None:
    written(tmp_path, target)
    written(tmp_path, {"do_sample": False, "temperature": 0.7, "eos_token_id": 5}, "generation_config.json")
    defaults = load_generation_defaults(tmp_path)
    assert defaults.temperature == 0.0 and defaults.eos_ids == (5,)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": -1}, {"top_p": 1.5}, {"top_p": 0}, {"top_k": -1}, {"top_k": 2.5}, {"min_p": -0.1},
        {"min_p": 1.5}, {"repetition_penalty": 0}, {"repetition_penalty": "1.1"}, {"presence_penalty": 2.5},
        {"frequency_penalty": -3},
    ],
)  # fmt: skip
def test_generation_config_refusals_name_the_field(tmp_path: Path, target: Json, change: Json) -> None:
    written(tmp_path, target)
    written(tmp_path, change, "generation_config.json")
    with pytest.raises(ModelError, match=f"generation config .* {next(iter(change))} is"):
        load_generation_defaults(tmp_path)
