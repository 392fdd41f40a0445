"""A tiny random target with a vision tower, and both drafters, as checkpoints on disk; and prompts with media for them.

Six tokens have far higher logits than the others, so that drafters of random weights are right now and then.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deployment.engine.engine import Engine
from deployment.engine.loading import Models, load_models
from deployment.engine.options import Backend, EngineOptions
from deployment.engine.placing import placed
from model.media import MediaItem
from state.media import Placed
from tests.engine.driving import TARGET, Driver
from tests.model import test_drafter as draft
from tests.model.parity import randomise
from tests.model.test_vision import IDS, RULES, TEXT, VISION, VOCABULARY, prompt

DRAFT_TOKENS = 4
TAPS = (1, 3)
LIKELY = 6
KINDS = {"dflash": ["sliding_attention", "full_attention"], "dflash2": ["sliding_attention", "sliding_attention"]}
SEEDS = {"dflash": 13, "dflash2": 15}
"""Of drafters that are right now and then."""


@functools.cache
def theirs() -> Any:
    """transformers' model of the same weights."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    made = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=dict(TEXT), vision_config=dict(VISION), **IDS))
    made = made.eval().float()
    randomise(made, 4)
    made.lm_head.weight.data[LIKELY:] *= 0.05
    return made


def draft_settings(kind: str) -> dict[str, Any]:
    settings = draft.draft_settings(
        kind, KINDS[kind], vocab_size=VOCABULARY, num_target_layers=4, max_position_embeddings=256, rms_norm_eps=1e-6
    )
    settings["dflash_config"] |= {"target_layer_ids": list(TAPS), "block_size": DRAFT_TOKENS + 1}
    return settings


@functools.cache
def draft_weights(kind: str) -> draft.Weights:
    weights = draft.random_weights(draft_settings(kind), SEEDS[kind])
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in weights if name.endswith("codebook")]:
        weights[name] = torch.randn(VOCABULARY, draft.RANK, generator=generator)
    return weights


@functools.cache
def directories() -> Path:
    """`target`, `dflash` and `dflash2`, written once a process and removed with it."""
    root = Path(_kept_directory().name)
    theirs().save_pretrained(root / "target")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TARGET / name, root / "target" / name)
    sizes = {"patch_size": VISION["patch_size"], "merge_size": VISION["spatial_merge_size"]}
    common = sizes | {"temporal_patch_size": RULES.temporal_patch, "image_mean": RULES.mean, "image_std": RULES.std}
    image = {"size": {"shortest_edge": RULES.image.min_pixels, "longest_edge": RULES.image.max_pixels}}
    video = {"size": {"shortest_edge": RULES.video.min_pixels, "longest_edge": RULES.video.max_pixels}}
    video |= {"fps": RULES.video.fps, "min_frames": RULES.video.min_frames, "max_frames": RULES.video.max_frames}
    (root / "target" / "preprocessor_config.json").write_text(json.dumps(common | image))
    (root / "target" / "video_preprocessor_config.json").write_text(json.dumps(common | video))
    for kind in KINDS:
        (root / kind).mkdir()
        (root / kind / "config.json").write_text(json.dumps(draft_settings(kind)))
        save_file(draft_weights(kind), root / kind / "model.safetensors")
    return root


@functools.cache
def _kept_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="seeing-model-")


def seeing_options(backend: Backend = "none", **more: Any) -> EngineOptions:
    path = None if backend == "none" else directories() / backend
    more.setdefault("check_invariants", True)
    return EngineOptions(directories() / "target", path, backend, public_rows=VOCABULARY, **more)


@functools.cache
def seeing_models(backend: Backend = "none") -> Models:
    return load_models(seeing_options(backend))


class SeeingDriver(Driver):
    """A driver whose engine has the tiny model with a tower."""

    def __init__(self, backend: Backend = "none", **more: Any) -> None:
        self.events = []
        self.engine = Engine(seeing_models(backend), seeing_options(backend, **more), self.events.append)

    @property
    def encoded(self) -> int:
        """Bytes of what the tower made that are kept."""
        cache = self.engine._executor._media
        assert cache is not None
        return cache.bytes


def shown(*parts: list[int] | MediaItem) -> tuple[tuple[int, ...], Placed]:
    """A prompt of text and media in that order, as a `Submit` carries it."""
    return placed_prompt(*prompt(*parts))


def placed_prompt(ids: torch.Tensor, items: list[MediaItem]) -> tuple[tuple[int, ...], Placed]:
    vision = seeing_models().vision
    assert vision is not None
    return tuple(ids.tolist()), placed(ids.tolist(), items, vision.tower.config)
