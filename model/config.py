"""The shapes and constants of a target and of its drafters, read from Hugging Face directories.

Whatever is in a config and would change the mathematics without being implemented is refused by name: a model that
runs a little wrong is worse than one that does not start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from model.errors import ModelError
from model.fields import Fields, read_json
from model.foreign import refuse_foreign_draft, refuse_foreign_target
from model.generation_defaults import check_eos
from model.rotary_config import RotaryConfig, read_rotary

TargetLayer = Literal["linear_attention", "full_attention"]
DraftLayer = Literal["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class MoeConfig:
    """A mixture in every block: `experts_per_token` of `num_experts`, beside one shared expert."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int


@dataclass(frozen=True)
class TargetConfig:
    """A text target of the Qwen3.5 family: gated delta net (GDN) layers and gated full-attention layers.

    `intermediate_size` is that of a dense target's MLPs, 0 where `moe` says how they are mixed.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    layer_types: tuple[TargetLayer, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rotary: RotaryConfig
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    conv_kernel: int
    max_positions: int
    tie_embeddings: bool
    eos_ids: tuple[int, ...]
    moe: MoeConfig | None = None

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: queries, keys and values of a GDN layer side by side."""
        return 2 * self.gdn_key_heads * self.gdn_key_dim + self.gdn_value_heads * self.gdn_value_dim

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash or DFlash2 drafter.

    `window` is S of the sliding layers, None if there are none. `causal` is one flag a layer, or None when the
    checkpoint does not say (decision 1). The conv and selector fields are None for kind "dflash".
    """

    kind: Literal["dflash", "dflash2"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    layer_types: tuple[DraftLayer, ...]
    window: int | None
    causal: tuple[bool, ...] | None
    rotary: RotaryConfig
    max_positions: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    output_multiplier: float
    logit_softcap: float | None
    embedding_scale: float
    conv_taps: int | None
    conv_group: int | None
    selector_rank: int | None
    selector_top_k: int | None
    num_target_layers: int | None

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "sliding_attention")

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")


# ---------------------------------------------------------------------------------------------------- loading


def load_target_config(directory: Path) -> TargetConfig:
    """Reads `config.json` of a target. Raises ModelError."""
    outer = read_json(_existing(directory, "model") / "config.json")
    label = f"target config ({directory / 'config.json'})"
    inner = Fields(label, outer).mapping("text_config")
    fields = Fields(label, inner, outer) if inner is not None else Fields(label, outer)
    refuse_foreign_target(fields)
    moe = _moe(fields)

    num_layers = fields.integer("num_hidden_layers")
    layer_types: tuple[Any, ...] | None = fields.choices("layer_types", ("linear_attention", "full_attention"))
    if layer_types is None:
        interval = fields.integer("full_attention_interval", 4)
        layer_types = tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers))
    if len(layer_types) != num_layers:
        fields.fail(f"layer_types has {len(layer_types)} entries, but num_hidden_layers is {num_layers}")
    num_heads, num_kv_heads, head_dim = _heads(fields)
    key_heads, value_heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    if value_heads % key_heads:
        fields.fail(f"linear_num_value_heads is {value_heads}, but must be a multiple of {key_heads} key heads")
    vocab_size = fields.integer("vocab_size")
    max_positions = fields.integer("max_position_embeddings")
    eos_ids = fields.ids("eos_token_id") or ()
    check_eos(fields, eos_ids, vocab_size)
    # The composite config decides about tying when there is one; its text part may carry a leftover default.
    tie = Fields(label, outer, inner or {}).flag("tie_word_embeddings", False)
    return TargetConfig(
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=0 if moe else fields.integer("intermediate_size"),
        num_layers=num_layers,
        layer_types=layer_types,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rotary=read_rotary(fields, head_dim, max_positions, partial=True),
        gdn_key_heads=key_heads,
        gdn_value_heads=value_heads,
        gdn_key_dim=fields.integer("linear_key_head_dim"),
        gdn_value_dim=fields.integer("linear_value_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        max_positions=max_positions,
        tie_embeddings=tie,
        eos_ids=eos_ids,
        moe=moe,
    )


def load_draft_config(directory: Path) -> DraftConfig:
    """Reads `config.json` of a drafter: each field from `dflash_config`, then the top level (decision 2).

    Raises ModelError.
    """
    top = read_json(_existing(directory, "draft") / "config.json")
    label = f"draft config ({directory / 'config.json'})"
    nested = Fields(label, top).mapping("dflash_config") or {}
    fields = Fields(label, nested, top)
    kind = _draft_kind(fields)
    refuse_foreign_draft(fields, directory)

    num_layers = fields.integer("num_hidden_layers")
    layer_types = fields.choices("layer_types", ("sliding_attention", "full_attention"))
    layer_types = layer_types if layer_types is not None else ("full_attention",) * num_layers
    if len(layer_types) != num_layers:
        fields.fail(f"layer_types has {len(layer_types)} entries, but num_hidden_layers is {num_layers}")
    window = None
    if "sliding_attention" in layer_types:
        window = fields.integer("sliding_window", None)
        if window is None:
            index = layer_types.index("sliding_attention")
            fields.fail(f'sliding_window is required because layer_types[{index}] is "sliding_attention"')
    # `is_causal` is looked up at the top level first: it is the newer spelling, and it rules every layer.
    causal = Fields(label, top, nested).flag("is_causal", None)
    if causal is None:
        causal = Fields(label, nested).flag("causal", None)
    num_heads, num_kv_heads, head_dim = _heads(fields)
    hidden_size = fields.integer("hidden_size")
    max_positions = fields.integer("max_position_embeddings")
    num_target_layers = fields.integer("num_target_layers", None)
    conv_taps = conv_group = selector_rank = selector_top_k = None
    if kind == "dflash2":
        conv_taps, conv_group = fields.integer("conv_kernel_size"), fields.integer("conv_group_size")
        if hidden_size % conv_group:
            fields.fail(f"conv_group_size is {conv_group}, but must divide hidden_size {hidden_size}")
        selector_rank, selector_top_k = fields.integer("selector_rank"), fields.integer("selector_top_k")
    return DraftConfig(
        kind=kind,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        layer_types=layer_types,
        window=window,
        causal=None if causal is None else (causal,) * num_layers,
        rotary=read_rotary(fields, head_dim, max_positions, partial=False),
        max_positions=max_positions,
        block_size=fields.integer("block_size", 16, minimum=2),
        mask_token_id=fields.integer("mask_token_id", minimum=0),
        target_layer_ids=_target_layer_ids(fields, num_target_layers, num_layers),
        output_multiplier=fields.number("output_multiplier", 1.0),
        logit_softcap=fields.number("final_logit_softcapping", None),
        embedding_scale=fields.number("input_embedding_scale", 1.0),
        conv_taps=conv_taps,
        conv_group=conv_group,
        selector_rank=selector_rank,
        selector_top_k=selector_top_k,
        num_target_layers=num_target_layers,
    )


def check_fit(target: TargetConfig, draft: DraftConfig) -> None:
    """Raises ModelError, in one sentence, if the drafter was not made for a target of this geometry."""

    def fail(sentence: str) -> None:
        raise ModelError(f"the draft does not fit the target: {sentence}")

    if draft.hidden_size != target.hidden_size:
        fail(f"its hidden_size is {draft.hidden_size}, the target's is {target.hidden_size}")
    if draft.vocab_size != target.vocab_size:
        fail(f"its vocab_size is {draft.vocab_size}, the target's is {target.vocab_size}")
    if draft.num_target_layers is not None and draft.num_target_layers != target.num_layers:
        fail(f"its num_target_layers is {draft.num_target_layers}, the target has {target.num_layers} layers")
    for layer in draft.target_layer_ids:
        if layer >= target.num_layers:
            fail(f"target_layer_ids has {layer}, but the target's layers are 0 to {target.num_layers - 1}")
    if draft.mask_token_id >= target.vocab_size:
        fail(f"mask_token_id is {draft.mask_token_id}, but the target has {target.vocab_size} embedding rows")


# ---------------------------------------------------------------------------------------------------- parts


def _existing(directory: Path, what: str) -> Path:
    if not directory.is_dir():
        raise ModelError(f"{what} directory {directory} does not exist")
    return directory


def _heads(fields: Fields) -> tuple[int, int, int]:
    """num_attention_heads, num_key_value_heads, head_dim."""
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.fail(f"num_key_value_heads is {num_kv_heads}, but must divide num_attention_heads {num_heads}")
    head_dim = fields.integer("head_dim", None)
    return num_heads, num_kv_heads, head_dim or fields.integer("hidden_size") // num_heads


def _moe(fields: Fields) -> MoeConfig | None:
    """The mixture, if there is one; None for a dense target."""
    if "moe" not in fields.text("model_type"):
        for name in ("num_experts", "num_local_experts", "moe_intermediate_size"):
            fields.refuse(name, (0,), f'model_type "{fields.text("model_type")}" is a dense target')
        return None
    fields.refuse("norm_topk_prob", (True,), "routing weights are always renormalised")
    fields.refuse("decoder_sparse_step", (1,), "every block has a mixture")
    fields.refuse("mlp_only_layers", ([],), "every block has a mixture")
    experts, chosen = fields.integer("num_experts"), fields.integer("num_experts_per_tok")
    if chosen > experts:
        fields.fail(f"num_experts_per_tok is {chosen}, but there are only {experts} experts")
    return MoeConfig(
        num_experts=experts,
        experts_per_token=chosen,
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size"),
    )


def _draft_kind(fields: Fields) -> Literal["dflash", "dflash2"]:
    if fields.raw("speculators_model_type") is not None:
        fields.fail("speculators_model_type is set: the speculators format is not supported, only the DFlash layout")
    architectures = fields.raw("architectures")
    names = architectures if isinstance(architectures, list) else [architectures]
    if "DFlash2DraftModel" in names:
        return "dflash2"
    if "DFlashDraftModel" in names:
        return "dflash"
    fields.fail(f"architectures is {architectures!r}, but must name DFlashDraftModel or DFlash2DraftModel")


def _target_layer_ids(fields: Fields, num_target_layers: int | None, num_layers: int) -> tuple[int, ...]:
    """Zero-based target blocks whose residual the drafter reads; by the reference's interpolation rule if missing."""
    ids = fields.ids("target_layer_ids")
    boundaries = fields.ids("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        if num_target_layers is None:
            fields.fail("target_layer_ids is missing, and without num_target_layers it cannot be derived")
        if num_layers == 1:
            ids = (num_target_layers // 2,)
        else:
            # Python's round (half to even) is part of the rule.
            step = (num_target_layers - 4) / (num_layers - 1)
            ids = tuple(round(1 + i * step) for i in range(num_layers))
            if min(ids) < 0:
                fields.fail(f"target_layer_ids is missing and cannot be derived for {num_target_layers} target layers")
    if not ids:
        fields.fail("target_layer_ids is empty, but must name at least one target layer")
    if boundaries is not None and boundaries != tuple(i + 1 for i in ids):
        fields.fail(
            f"eagle_aux_hidden_state_layer_ids is {list(boundaries)}, but must be target_layer_ids {list(ids)} plus one"
        )
    return ids
