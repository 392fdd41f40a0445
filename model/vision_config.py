"""The shapes of a multimodal checkpoint's vision tower, and the token ids that stand for media in its prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from model.config import TargetConfig
from model.fields import Fields, read_json


@dataclass(frozen=True)
class VisionConfig:
    """A tower that turns patches of `temporal_patch` frames by `patch` x `patch` pixels into embeddings of the text
    model, one for `merge` x `merge` patches.

    `position_side`: the learned grid of positions is a square of this side. The ids are those of the placeholders and
    of the tokens around them.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch: int
    temporal_patch: int
    merge: int
    position_side: int
    rotary_theta: float
    output_size: int
    image_token_id: int
    video_token_id: int
    start_token_id: int
    end_token_id: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_size(self) -> int:
        """Values of one patch: three channels, frames, rows, columns."""
        return 3 * self.temporal_patch * self.patch * self.patch


def load_vision_config(directory: Path, target: TargetConfig) -> VisionConfig | None:
    """Reads the vision part of a target's `config.json`; None for a text model. Raises ModelError."""
    outer = read_json(directory / "config.json")
    label = f"target config ({directory / 'config.json'})"
    top = Fields(label, outer)
    inner = top.mapping("vision_config")
    if inner is None:
        return None
    if target.rotary.sections is None or not target.rotary.interleaved:
        top.fail("mrope_section and mrope_interleaved true are required because there is a vision_config")
    config = _read(Fields(f"{label}: vision_config", inner), top)
    if config.output_size != target.hidden_size:
        top.fail(f"vision_config.out_hidden_size is {config.output_size}, but the text model's is {target.hidden_size}")
    for name in ("image_token_id", "video_token_id", "start_token_id", "end_token_id"):
        if getattr(config, name) >= target.vocab_size:
            top.fail(f"{name} is {getattr(config, name)}, but vocab_size is {target.vocab_size}")
    return config


def _read(fields: Fields, top: Fields) -> VisionConfig:
    fields.refuse("hidden_act", ("gelu_pytorch_tanh",), "the tower's activation is gelu_pytorch_tanh")
    fields.refuse("in_channels", (3,), "pixels are RGB")
    fields.refuse("deepstack_visual_indexes", ([],), "embeddings enter at the bottom of the text model only")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_heads")
    if hidden % (4 * heads):
        fields.fail(f"hidden_size is {hidden}, but must be {heads} heads of a multiple of 4, for a rotary of two axes")
    positions = fields.integer("num_position_embeddings")
    if math.isqrt(positions) ** 2 != positions:
        fields.fail(f"num_position_embeddings is {positions}, but must be a square")
    rope = Fields(f"{fields.label}: rope_parameters", fields.mapping("rope_parameters") or {})
    rope.refuse("rope_type", ("axial", "default"), "the tower's rotary has one angle an axis")
    return VisionConfig(
        depth=fields.integer("depth"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        patch=fields.integer("patch_size"),
        temporal_patch=fields.integer("temporal_patch_size"),
        merge=fields.integer("spatial_merge_size"),
        position_side=math.isqrt(positions),
        rotary_theta=rope.number("rope_theta", 10000.0),
        output_size=fields.integer("out_hidden_size"),
        image_token_id=top.integer("image_token_id", minimum=0),
        video_token_id=top.integer("video_token_id", minimum=0),
        start_token_id=top.integer("vision_start_token_id", minimum=0),
        end_token_id=top.integer("vision_end_token_id", minimum=0),
    )
