"""Rotary embedding constants of a target or a drafter, from the new and the old config schema."""

from __future__ import annotations

import math
from dataclasses import dataclass

from model.fields import Fields


@dataclass(frozen=True)
class YarnConfig:
    """YaRN scaling of rotary frequencies. `attention_factor` multiplies cos and sin (already resolved)."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool

    @classmethod
    def of_factor(cls, factor: float, original_positions: int) -> YarnConfig:
        """The usual YaRN for a stretch by `factor`."""
        return cls(factor, original_positions, 32.0, 1.0, yarn_attention_factor(factor), True)


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """0.1 scale ln(factor) + 1, and 1 without a stretch."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


@dataclass(frozen=True)
class RotaryConfig:
    """Split-half rotary embedding of the first `dim` dimensions of a head.

    `sections` are the MRoPE sections in frequency pairs (they sum to dim / 2) of the axes time, height and width; text
    positions are equal on all three, so they matter for media only. None for a one-dimensional rotary.
    """

    theta: float
    dim: int
    sections: tuple[int, ...] | None
    interleaved: bool
    yarn: YarnConfig | None

    @property
    def axes(self) -> tuple[int, ...]:
        """Which of the three axes (time, height, width) turns each frequency pair: interleaved, height and width take
        every third pair until they have as many as their sections say, and time has all others."""
        pairs = self.dim // 2
        if self.sections is None:
            return (0,) * pairs
        if not self.interleaved:
            return tuple(axis for axis, section in enumerate(self.sections) for _ in range(section))
        return tuple(i % 3 if i < 3 * self.sections[i % 3] else 0 for i in range(pairs))


def read_rotary(fields: Fields, head_dim: int, max_positions: int, *, partial: bool) -> RotaryConfig:
    """`rope_parameters`, or the older `rope_theta` beside `rope_scaling`.

    With `partial` the target's partial factor and MRoPE sections count. A drafter's rotary is always over the full
    head, so that both are ignored there when they leaked from a target's config.
    """
    parameters = fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {}
    rope = Fields(f"{fields.label}: rope_parameters", parameters)
    theta = rope.number("rope_theta", None) or fields.number("rope_theta")
    rope_type = rope.text("rope_type", None) or rope.text("type", "default")
    if rope_type in ("default", "mrope"):
        yarn = None
    elif rope_type == "yarn":
        yarn = _yarn(rope, max_positions)
    else:
        rope.fail(f'rope_type is "{rope_type}", but must be default or yarn')
    if not partial:
        if head_dim % 2:
            fields.fail(f"head_dim is {head_dim}, but must be even for a rotary embedding")
        return RotaryConfig(theta=theta, dim=head_dim, sections=None, interleaved=False, yarn=yarn)

    factor = rope.number("partial_rotary_factor", None) or fields.number("partial_rotary_factor", 0.25)
    dim = int(head_dim * factor)
    if not 2 <= dim <= head_dim or dim % 2:
        rope.fail(f"partial_rotary_factor {factor:g} of head_dim {head_dim} gives {dim} dimensions, which must be even")
    sections = rope.ids("mrope_section")
    if sections is not None and (len(sections) != 3 or sum(sections) != dim // 2):
        rope.fail(f"mrope_section is {list(sections)}, but must be three numbers that sum to {dim // 2}")
    interleaved = rope.flag("mrope_interleaved", sections is not None)
    return RotaryConfig(theta=theta, dim=dim, sections=sections, interleaved=interleaved, yarn=yarn)


def _yarn(rope: Fields, max_positions: int) -> YarnConfig:
    original = rope.integer("original_max_position_embeddings", max_positions)
    factor = rope.number("factor", max_positions / original)
    mscale, mscale_all = rope.number("mscale", None), rope.number("mscale_all_dim", None)

    derived = yarn_attention_factor(factor)
    if mscale and mscale_all:
        derived = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all)
    return YarnConfig(
        factor=factor,
        original_positions=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", derived),
        truncate=rope.flag("truncate", True),
    )
