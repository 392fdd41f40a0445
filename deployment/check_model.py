"""`dflash-serve check-model`: what target and drafter are, what their state costs, and whether they fit together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deployment.hub import located
from deployment.usage import one_sentence

if TYPE_CHECKING:
    from deployment.engine.loading import Models
    from model.config import DraftConfig, TargetConfig
    from model.vision_config import VisionConfig
    from state.geometry import StateGeometry

Rows = list[tuple[str, str]]


def check_model(
    target: Annotated[Path, typer.Argument(help="The target's directory, or its name on the Hugging Face hub.")],
    draft: Annotated[Path | None, typer.Option(help="The drafter's.")] = None,
    geometry_only: Annotated[bool, typer.Option("--geometry-only", help="Read config.json files only.")] = False,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, for the sizes.")] = "bfloat16",
    yarn_factor: Annotated[float | None, typer.Option(help="Stretch the model's positions by YaRN, 1 to 4.")] = None,
) -> None:
    """Prints geometry, bytes of state, what runs each operator, and what is skipped; exit code 1 if it cannot run."""
    with one_sentence(exit_code=1):
        from deployment.check_operators import operator_rows
        from deployment.engine.loading import DTYPES, load_models, state_geometry, stretched
        from deployment.engine.options import EngineOptions
        from model.config import check_fit, load_draft_config, load_target_config
        from model.vision_config import load_vision_config

        target = located("target", target, weights=not geometry_only)
        draft = None if draft is None else located("draft", draft, weights=not geometry_only)
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}, must be one of {', '.join(DTYPES)}")
        config = stretched(load_target_config(target), yarn_factor)
        draft_config = None if draft is None else load_draft_config(draft)
        if draft_config is not None:
            check_fit(config, draft_config)
        vision_config = load_vision_config(target, config)
        _show("Target", _target_rows(config))
        if vision_config is not None:
            _show("Vision tower", _vision_rows(vision_config))
        if draft_config is not None:
            _show("Drafter", _draft_rows(draft_config))
        _show(f"State in {dtype}", _state_rows(state_geometry(config, draft_config, DTYPES[dtype])))
        public_rows = config.vocab_size
        if not geometry_only:
            kind = draft_config.kind if draft_config else "none"
            options = EngineOptions(target, draft, kind, dtype=dtype, yarn_factor=yarn_factor)
            models = load_models(options, dry=True)
            _show("Files", _file_rows(models))
            public_rows = models.target.public_rows
        rows = operator_rows(config, draft_config, public_rows, DTYPES[dtype])
        _show(f"Operators on a card in {dtype} (on a CPU: torch)", rows)
        typer.echo("ok: target and draft fit together" if draft_config else "ok: the target can be served")


def _show(title: str, rows: Rows) -> None:
    typer.echo(title)
    width = max(34, *(len(name) for name, _ in rows))
    for name, value in rows:
        typer.echo(f"  {name:{width}} {value}")


def amount(size: int) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} bytes"


def _target_rows(config: TargetConfig) -> Rows:
    rotary = config.rotary
    rows = [
        ("hidden / layers", f"{config.hidden_size} / {config.num_layers} "
         f"({len(config.full_layers)} full attention, {len(config.gdn_layers)} gated delta net)"),
        ("attention", f"{config.num_heads} query heads, {config.num_kv_heads} key/value heads of {config.head_dim}"),
        ("gated delta net", f"{config.gdn_key_heads} key heads of {config.gdn_key_dim}, {config.gdn_value_heads} value "
         f"heads of {config.gdn_value_dim}, {config.conv_kernel} taps over {config.conv_channels} channels"),
        ("rotary", f"{rotary.dim} of {config.head_dim} dimensions, theta {rotary.theta:g}"
         + (f", YaRN factor {rotary.yarn.factor:g}" if rotary.yarn else "")),
        ("positions", f"{config.max_positions}"),
        ("vocabulary", f"{config.vocab_size} rows, {'tied head' if config.tie_embeddings else 'head of its own'}"),
    ]  # fmt: skip
    if config.moe is None:
        return [*rows, ("feed-forward", f"dense, {config.intermediate_size}")]
    moe = config.moe
    mixture = f"{moe.experts_per_token} of {moe.num_experts} experts of {moe.intermediate_size}"
    return [*rows, ("feed-forward", f"{mixture}, and a shared one of {moe.shared_intermediate_size}")]


def _vision_rows(config: VisionConfig) -> Rows:
    seen = config.patch * config.merge
    return [
        ("hidden / layers", f"{config.hidden_size} / {config.depth}"),
        ("attention", f"{config.num_heads} heads of {config.head_dim}, within a frame"),
        ("patch", f"{config.patch} x {config.patch} pixels of {config.temporal_patch} frames"),
        ("positions", f"a grid of {config.position_side} x {config.position_side}, resampled"),
        ("one embedding", f"{seen} x {seen} pixels"),
    ]


def _draft_rows(config: DraftConfig) -> Rows:
    if config.causal is None:
        causality = "not said: non-causal, unless draft_causal is true"
    else:
        causality = "causal" if any(config.causal) else "non-causal"
    local = f"{len(config.sliding_layers)} local of window {config.window}, " if config.sliding_layers else ""
    rows = [
        ("kind", f"{config.kind}, block {config.block_size} (K = {config.block_size - 1})"),
        ("layers", f"{local}{len(config.full_layers)} full"),
        ("attention", f"{config.num_heads} query heads, {config.num_kv_heads} key/value heads of {config.head_dim}"),
        ("causality inside the block", causality),
        ("target blocks", ", ".join(map(str, config.target_layer_ids))),
        ("mask token", f"{config.mask_token_id}"),
        ("positions", f"{config.max_positions}"),
    ]  # fmt: skip
    if config.selector_rank is None:
        return rows
    convolution = f"{config.conv_taps} taps, groups of {config.conv_group}"
    selector = f"top {config.selector_top_k}, rank {config.selector_rank}"
    return [*rows, ("convolution", convolution), ("selector", selector)]


def _state_rows(geometry: StateGeometry) -> Rows:
    g = geometry
    rows = [
        ("target K/V per token", amount(g.target_page_bytes // 64)),
        ("GDN state per sequence", amount(g.gdn_bytes)),
        ("convolution history per sequence", amount(g.conv_bytes)),
        ("continuation hidden per sequence", amount(g.hidden_bytes)),
    ]
    if g.ring_layers:
        rows.append(("draft rings per sequence", amount(g.ring_bytes)))
    if g.full_layers:
        rows.append(("draft pages per token", amount(g.draft_page_bytes // 64)))
    return [*rows, ("image per sequence", amount(g.image_bytes))]


def _file_rows(models: Models) -> Rows:
    """What a load would read, and what it would leave."""
    from deployment.engine.loading import kinds_of

    rows = [("public token ids", f"{models.target.public_rows}")]
    if models.quantised is not None:
        blocks = f"{models.quantised.rows} x {models.quantised.columns}"
        rows.append(("FP8 weights", f"in blocks of {blocks}, computed with in the model's dtype"))
    rows.append(("images and video", _media_row(models)))
    for directory, names in models.skipped.items():
        if names:
            rows.append((f"skipped in {directory.name}", f"{len(names)} tensors ({', '.join(kinds_of(names))})"))
    return [*rows, ("every tensor it needs", "is there, in its shape")]


def _media_row(models: Models) -> str:
    if models.vision is None:
        return "refused: the files hold no vision tower"
    rules = models.vision.rules
    return f"images of up to {rules.image.max_pixels} pixels, videos of up to {rules.video.max_pixels} in all frames"
