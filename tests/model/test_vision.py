"""Multimodal targets against transformers' own code, in FP32 with random weights: tower, positions, logits, greedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from model import vision
from model.config import load_target_config
from model.errors import MediaError
from model.media import MediaItem, image_item, video_item
from model.media_positions import media_positions, rope_delta
from model.media_rules import ImageRules, MediaRules, VideoRules
from model.placeholders import find_spans
from model.target import Target
from model.vision import Tower
from model.vision_config import VisionConfig, load_vision_config
from model.weights import WeightFiles
from tests.model.parity import Runner, distance, random_sizes, randomise

VOCABULARY, IMAGE, VIDEO, START, END = 64, 60, 61, 62, 63
RULES = MediaRules(
    image=ImageRules(256, 1536),
    video=VideoRules(256, 6144, fps=2.0, min_frames=2, max_frames=8, max_frame_tokens=None),
    factor=8,
    temporal_patch=2,
    mean=(0.5, 0.4, 0.6),
    std=(0.5, 0.3, 0.2),
)
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_heads": 4,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 25,
}
IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


@dataclass(frozen=True)
class Pair:
    """transformers' model, and ours of the same weights."""

    theirs: Any
    target: Target
    tower: Tower

    @property
    def config(self) -> VisionConfig:
        return self.tower.config


def load(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Target, Tower]:
    config, cpu = load_target_config(directory), torch.device("cpu")
    vision_config = load_vision_config(directory, config)
    assert vision_config is not None
    files = WeightFiles.open(directory)
    target = Target.load(files, config, VOCABULARY, cpu, dtype)
    tower = Tower.load(files, vision_config, RULES, cpu, dtype)
    assert files.unused() == ()
    return target, tower


@cache
def pair() -> Pair:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    theirs = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=dict(TEXT), vision_config=dict(VISION), **IDS))
    theirs = theirs.eval().float()
    randomise(theirs, 1)
    with TemporaryDirectory() as name:
        theirs.save_pretrained(name)
        return Pair(theirs, *load(Path(name)))


def image(height: int, width: int, seed: int = 0) -> MediaItem:
    return image_item(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8), RULES)


def video(frames: int, height: int, width: int, fps: float = 2.0) -> MediaItem:
    pixels = np.random.default_rng(frames).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    indices = RULES.sampled_frames(frames, fps)
    return video_item(pixels[list(indices)], indices, fps, RULES)


def words(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, IMAGE, count).tolist()


def prompt(*parts: list[int] | MediaItem) -> tuple[torch.Tensor, list[MediaItem]]:
    """Ids of text and media in that order, and the media."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, list):
            ids += part
        elif part.kind == "image":
            ids += [START, *[IMAGE] * part.embeddings, END]
        else:
            frame = part.embeddings // part.frames
            ids += [START, *[i for _ in range(part.frames) for i in (7, 8, START, *[VIDEO] * frame, END)], END]
    return torch.tensor(ids), [part for part in parts if isinstance(part, MediaItem)]


def their_inputs(ids: torch.Tensor, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    tower = pair().tower
    inputs = {"input_ids": ids[None], "mm_token_type_ids": ((ids == IMAGE) + 2 * (ids == VIDEO)).int()[None]}
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        mine = [item for item in items if item.kind == kind]
        if mine:
            inputs[pixels] = torch.cat([tower.patches(item.pixels).flatten(0, 1) for item in mine])
            inputs[grid] = torch.tensor([[item.frames, 2 * item.rows, 2 * item.columns] for item in mine])
    return inputs


PROMPTS: dict[str, Callable[[], tuple[torch.Tensor, list[MediaItem]]]] = {
    "one image": lambda: prompt(words(9), image(32, 40), words(12)),
    "an image first and last": lambda: prompt(image(33, 17), words(7), image(9, 130, 1)),
    "several images of odd sizes": lambda: prompt(
        words(3), image(31, 47), words(2), image(47, 31, 1), image(8, 8, 2), words(5), image(20, 97, 3), words(4)
    ),
    "a video of odd length": lambda: prompt(words(5), video(5, 27, 33), words(8)),
    "images and a video": lambda: prompt(image(24, 24), words(4), video(6, 16, 40), words(3), image(40, 16, 1)),
    # pages have 64 tokens, and an item has one token before its placeholders
    "an image that begins on a page": lambda: prompt(words(63), image(32, 40), words(9)),
    "an image that ends with a page": lambda: prompt(words(43), image(32, 40), words(9)),
    "an image over a page's edge": lambda: prompt(words(55), image(32, 40), words(60), image(32, 40, 1), words(5)),
}


# ------------------------------------------------------------------------------------------------ tower


@pytest.mark.parametrize(
    "item",
    [image(32, 40), image(17, 90), image(200, 11), image(64, 64), video(2, 16, 24), video(7, 35, 50)],
    ids=lambda item: f"{item.kind} {item.frames} x {item.rows} x {item.columns}",
)
def test_an_item_s_embeddings_equal_transformers(item: MediaItem) -> None:
    p = pair()
    grid = torch.tensor([[item.frames, 2 * item.rows, 2 * item.columns]])
    with torch.no_grad():
        oracle = p.theirs.model.visual(p.tower.patches(item.pixels).flatten(0, 1), grid_thw=grid).pooler_output
    mine = p.tower.encode(item)
    assert mine.shape == (item.embeddings, TEXT["hidden_size"]) == oracle.shape
    assert distance(mine, oracle) < 1e-5


def test_a_tower_in_bfloat16_rounds_where_transformers_does(tmp_path: Path) -> None:
    theirs = pair().theirs
    theirs.save_pretrained(tmp_path)
    _, tower = load(tmp_path, torch.bfloat16)
    item = image(48, 56)
    grid = torch.tensor([[1, 2 * item.rows, 2 * item.columns]])
    with torch.no_grad():
        narrow = type(theirs.model.visual)(theirs.config.vision_config).eval()
        narrow.load_state_dict(theirs.model.visual.state_dict())
        oracle = narrow.bfloat16()(tower.patches(item.pixels).flatten(0, 1).bfloat16(), grid_thw=grid).pooler_output
    exact = pair().tower.encode(item)
    noise = distance(oracle.float(), exact)
    assert distance(tower.encode(item).float(), exact) < 1.2 * noise
    assert distance(tower.encode(item).float(), oracle.float()) < noise


def test_frames_of_a_long_video_may_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    item = video(8, 24, 24)
    whole = pair().tower.encode(item)
    monkeypatch.setattr(vision, "_MAX_PATCHES", 2 * 4 * item.rows * item.columns)
    torch.testing.assert_close(pair().tower.encode(item), whole)


# ------------------------------------------------------------------------------------------------ positions


@pytest.mark.parametrize("name", PROMPTS)
def test_positions_and_the_rope_delta_equal_transformers(name: str) -> None:
    ids, items = PROMPTS[name]()
    inputs = their_inputs(ids, items)
    grids = {name: inputs.get(name) for name in ("image_grid_thw", "video_grid_thw")}
    oracle, delta = pair().theirs.model.get_rope_index(ids[None], inputs["mm_token_type_ids"], **grids)
    spans = find_spans(ids.tolist(), items, pair().config)
    assert torch.equal(media_positions(spans, 0, len(ids)).T, oracle[:, 0])
    assert rope_delta(spans, len(ids)) == int(delta)
    after = media_positions(spans, len(ids), len(ids) + 3)
    assert after.tolist() == [[len(ids) + i + int(delta)] * 3 for i in range(3)]


def test_positions_of_a_part_are_that_part_of_all_positions() -> None:
    ids, items = PROMPTS["images and a video"]()
    spans = find_spans(ids.tolist(), items, pair().config)
    whole = media_positions(spans, 0, len(ids))
    for start in range(0, len(ids), 3):
        for stop in range(start, len(ids) + 1, 5):
            assert torch.equal(media_positions(spans, start, stop), whole[start:stop])


def test_equal_axes_turn_as_one_position_does() -> None:
    rotary = pair().target.rotary
    positions = torch.arange(40).view(2, 20) * 7
    for scalar, by_axis in zip(
        rotary.tables(positions), rotary.tables(positions[..., None].expand(-1, -1, 3).contiguous()), strict=True
    ):
        assert torch.equal(scalar, by_axis)


# ------------------------------------------------------------------------------------------------ the whole


@torch.no_grad()
def residuals_and_logits(theirs: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle in one piece: logits [T, V], and the residual after each block side by side."""
    residuals: list[torch.Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        residuals.append((output[0] if isinstance(output, tuple) else output)[0])

    hooks = [layer.register_forward_hook(keep) for layer in theirs.model.language_model.layers]
    logits = theirs(**inputs, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.cat(residuals, dim=-1)


def runner(ids: torch.Tensor, items: Sequence[MediaItem]) -> Runner:
    spans = find_spans(ids.tolist(), items, pair().config)
    return Runner(pair().target, spans, [pair().tower.encode(item) for item in items])


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_tap_features_of_a_prompt_equal_transformers_however_it_is_cut(name: str) -> None:
    ids, items = PROMPTS[name]()
    logits, residuals = residuals_and_logits(pair().theirs, their_inputs(ids, items))
    pages = [64] * (len(ids) // 64) + [len(ids) % 64]
    for sizes in ([len(ids)], random_sizes(len(ids), 1), random_sizes(len(ids), 2), pages):
        mine, features = runner(ids, items).chunks(ids, sizes)
        assert distance(mine, logits) < 1e-4, sizes
        assert distance(features, residuals) < 1e-4, sizes


@pytest.mark.parametrize("name", ["several images of odd sizes", "a video of odd length", "an image first and last"])
def test_greedy_continuations_equal_transformers(name: str) -> None:
    ids, items = PROMPTS[name]()
    inputs = their_inputs(ids, items) | {"attention_mask": torch.ones_like(ids)[None]}
    with torch.no_grad():
        oracle = pair().theirs.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)
    run = runner(ids, items)
    continuation = [int(run.run(ids)[0][-1].argmax())]
    while len(continuation) < 12:
        continuation.append(int(run.run(torch.tensor(continuation[-1:]))[0][-1].argmax()))
    assert continuation == oracle[0, len(ids) :].tolist()


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda ids: ids[:12] + ids[13:], "19 of image at 10, but frame 0 of its image 0 has 20"),
        (lambda ids: [VIDEO if i == IMAGE else i for i in ids], "20 of video at 10, but frame 0 of its image 0 has 20"),
        (lambda ids: [*ids, IMAGE], "2 runs of them, but its media have 1 frames"),
        (lambda ids: ids[:9], "0 runs of them"),
    ],
)
def test_placeholders_that_do_not_fit_the_media_are_refused(change: Any, sentence: str) -> None:
    ids, items = PROMPTS["one image"]()
    with pytest.raises(MediaError, match=sentence):
        find_spans(change(ids.tolist()), items, pair().config)
