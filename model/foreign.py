"""What configs of this and of other ecosystems hold that changes the mathematics and is not implemented: refused."""

from __future__ import annotations

from pathlib import Path

from model.block_scales import read_block_scales
from model.fields import Fields


def refuse_foreign_target(fields: Fields) -> None:
    """Everything that changes the mathematics and is not implemented."""
    model_type = fields.text("model_type")
    known = ("qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe")
    if model_type not in known:
        fields.fail(f'model_type is "{model_type}", but must be one of {", ".join(known)}')
    fields.refuse("hidden_act", ("silu",), "the MLP's activation is silu")
    fields.refuse("attention_bias", (False,), "attention projections have no bias")
    fields.refuse("attn_output_gate", (True,), "attention output is always gated")
    fields.refuse("output_gate_type", ("silu", "swish"), "the delta net's output gate is silu")
    fields.refuse("use_sliding_window", (False,), "a target's attention layers see the whole context")
    read_block_scales(fields)


def refuse_foreign_draft(fields: Fields, directory: Path) -> None:
    """Everything other ecosystems put into draft configs that changes the mathematics (decision 2)."""
    fields.refuse("model_type", ("qwen3",), "drafters are of model_type qwen3")
    fields.refuse("hidden_act", ("silu",), "the MLP's activation is silu")
    fields.refuse("attention_bias", (False,), "attention projections have no bias")
    for name in ("attention_sink_bias", "add_swa_attention_sink_bias", "add_full_attention_sink_bias"):
        fields.refuse(name, (False,), "attention sinks are not implemented")
    fields.refuse("attention_value_scale", (1, 1.0), "values are not scaled")
    fields.refuse("sample_from_anchor", (False,), "the anchor's column is never sampled")
    fields.refuse("projector_type", ("dflash", "linear"), "the only feature projection is one linear map")
    fields.refuse("is_neox_style", (True,), "rotary embeddings are split-half")
    fields.refuse("logit_scale", (1, 1.0), "use output_multiplier")
    fields.refuse("use_swa", (False,), "sliding layers are named in layer_types")
    fields.refuse("has_own_lm_head", (False,), "a drafter uses the target's head")
    fields.refuse("has_embed_tokens", (False,), "a drafter uses the target's embedding")
    fields.refuse("quantization_config", (), "weights must be bfloat16, float16 or float32")
    vocab_size, hidden_size = fields.integer("vocab_size"), fields.integer("hidden_size")
    for name in ("draft_vocab_size", "selector_vocab_size"):
        fields.refuse(name, (vocab_size,), f"a drafter uses the target's whole vocabulary of {vocab_size}")
    fields.refuse("target_hidden_size", (hidden_size,), f"a drafter has its target's width, here {hidden_size}")
    if (directory / "mask_embedding.pt").exists():
        fields.fail("mask_embedding.pt lies beside the config: a mask embedding of its own is not supported")
