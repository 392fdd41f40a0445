"""Pixels, sizes, frames and placeholders of media against transformers' processors, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from model.errors import MediaError, ModelError
from model.media import image_item, video_item
from model.media_rules import MediaRules, load_media_rules
from model.placeholders import MediaTokens, expand
from model.rotary_config import RotaryConfig
from model.tokenizer import Tokenizer
from model.vision import Affine, Merger, Tower
from model.vision_config import VisionConfig

Json = dict[str, Any]

CONFIG = VisionConfig(
    depth=0,
    hidden_size=4,
    intermediate_size=4,
    num_heads=1,
    patch=16,
    temporal_patch=2,
    merge=2,
    position_side=2,
    rotary_theta=1e4,
    output_size=4,
    image_token_id=0,
    video_token_id=1,
    start_token_id=2,
    end_token_id=3,
)
SIZES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
CONSTANTS = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.2]}
IMAGES: Json = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, **SIZES, **CONSTANTS}
VIDEOS: Json = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, **SIZES, **CONSTANTS}


def written(directory: Path, images: Json = IMAGES, videos: Json = VIDEOS) -> Path:
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    (directory / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return directory


@pytest.fixture
def rules(tmp_path: Path) -> MediaRules:
    return load_media_rules(written(tmp_path), CONFIG)


@pytest.fixture
def small(tmp_path: Path) -> MediaRules:
    """Limits that random arrays of a test reach from both sides."""
    images = IMAGES | {"size": {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}}
    videos = VIDEOS | {"size": {"shortest_edge": 2 * 64 * 64, "longest_edge": 4 * 128 * 128}}
    return load_media_rules(written(tmp_path, images, videos), CONFIG)


def patches(pixels: torch.Tensor, rules: MediaRules) -> torch.Tensor:
    nothing = Affine(torch.empty(0), torch.empty(0))
    tower = Tower(CONFIG, rules, nothing, torch.empty(0), (), Merger(nothing, nothing, nothing))
    return tower.patches(pixels).flatten(0, 1)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def smooth(height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    waves = [127.5 + 127.5 * np.sin(y / a + x / b) for a, b in ((7, 11), (13, 5), (9, 23))]
    return np.stack(waves, axis=-1).round().astype(np.uint8)


# ------------------------------------------------------------------------------------------------ against transformers

GOLDEN = json.loads((Path(__file__).parent / "golden_video.json").read_text())
"""What transformers' video processor answers, which does not run without torchvision."""


@pytest.fixture(scope="module")
def their_images() -> Any:
    """transformers' image processor, the one that needs pillow only."""
    pytest.importorskip("PIL", reason="transformers' image processors need pillow")
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl

    return image_processing_pil_qwen2_vl


def processed(their_images: Any, rules: MediaRules, image: np.ndarray) -> tuple[torch.Tensor, list[list[int]]]:
    size = {"shortest_edge": rules.image.min_pixels, "longest_edge": rules.image.max_pixels}
    processor = their_images.Qwen2VLImageProcessorPil(size=size, **SIZES, **CONSTANTS)
    out = processor(image, return_tensors="pt")
    return out["pixel_values"], out["image_grid_thw"].tolist()


def test_sizes_of_images_equal_transformers(their_images: Any, rules: MediaRules) -> None:
    limits = (rules.image.min_pixels, rules.image.max_pixels)
    sides = np.random.default_rng(0).integers(1, 6000, (400, 2)).tolist()
    for height, width in [*sides, [1, 200], [16, 3200], [48, 48], [80, 80]]:
        if max(height, width) <= 200 * min(height, width):
            assert rules.image_size(height, width) == their_images.smart_resize(height, width, 32, *limits)


def test_sizes_of_videos_equal_transformers(tmp_path: Path, rules: MediaRules) -> None:
    capped = load_media_rules(written(tmp_path, videos=VIDEOS | {"cap_pixels_per_frame": True}), CONFIG)
    for name, given in (("sizes", rules), ("capped", capped)):
        for *video, height, width in GOLDEN[name]:
            assert given.video_size(*video) == (height, width)


def test_sampled_frames_equal_transformers(rules: MediaRules) -> None:
    for sample in GOLDEN["sampled"]:
        assert rules.sampled_frames(sample["total"], sample["fps"]) == tuple(sample["frames"])


@pytest.mark.parametrize("shape", [(96, 64), (64, 128), (128, 128)])
def test_patches_of_an_image_that_keeps_its_size_equal_transformers(
    their_images: Any, small: MediaRules, shape: tuple[int, int]
) -> None:
    image = noise(*shape, 3)
    oracle, grid = processed(their_images, small, image)
    item = image_item(image, small)
    assert [[item.frames, 2 * item.rows, 2 * item.columns]] == grid
    torch.testing.assert_close(patches(item.pixels, small), oracle, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", [(50, 70), (33, 300), (301, 212), (120, 131)])
@pytest.mark.parametrize("content", [noise, smooth])
def test_a_resized_image_is_within_two_levels_of_pillow_s(
    their_images: Any, small: MediaRules, content: Any, shape: tuple[int, int]
) -> None:
    image = noise(*shape, 3) if content is noise else smooth(*shape)
    oracle, grid = processed(their_images, small, image)
    item = image_item(image, small)
    assert [[item.frames, 2 * item.rows, 2 * item.columns]] == grid
    apart = (patches(item.pixels, small) - oracle).unflatten(1, (3, -1)).abs()
    levels = 255 * apart * torch.tensor(CONSTANTS["image_std"])[:, None]
    assert float(levels.max()) < 2.01 and float(levels.mean()) < 0.05


@pytest.mark.parametrize("frames", [2, 3, 6, 7])
def test_patches_of_a_video_are_those_of_its_frames_group_by_group(
    their_images: Any, small: MediaRules, frames: int
) -> None:
    """The oracle shows each frame as an image, which stands on both places of a patch in time."""
    pixels = noise(frames, 96, 64, 3)
    item = video_item(pixels, range(frames), 2.0, small)
    alone = [processed(their_images, small, frame)[0].unflatten(1, (3, 2, -1)) for frame in pixels]
    alone += alone[-1:] * (frames % 2)
    groups = [torch.stack((a[:, :, 0], b[:, :, 1]), dim=2) for a, b in zip(alone[::2], alone[1::2], strict=True)]
    assert (item.frames, item.rows, item.columns) == (len(groups), 3, 2)
    torch.testing.assert_close(patches(item.pixels, small), torch.cat(groups).flatten(1), rtol=0, atol=2e-6)


def test_placeholders_equal_transformers(small: MediaRules) -> None:
    from transformers.models.qwen3_vl import processing_qwen3_vl

    theirs: Any = processing_qwen3_vl.Qwen3VLProcessor  # its methods, for a stand-in that has no tokenizer
    indices, fps = [0, 3, 9, 14, 20, 31, 40], 7.0
    items = [image_item(noise(100, 70, 3), small), video_item(noise(len(indices), 40, 90, 3), indices, fps, small)]
    text = "see <|vision_start|><|image_pad|><|vision_end|> and <|vision_start|><|video_pad|><|vision_end|>, then"
    processor = SimpleNamespace(
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        image_processor=SimpleNamespace(merge_size=2),
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        all_special_multimodal_tokens=["<|image_pad|>", "<|video_pad|>"],
    )
    processor._calculate_timestamps = lambda *given: theirs._calculate_timestamps(processor, *given)
    grids = [torch.tensor([[item.frames, 2 * item.rows, 2 * item.columns]]) for item in items]
    metadata = [SimpleNamespace(fps=fps, frames_indices=np.array(indices))]
    written = (
        [theirs.replace_image_token(processor, {"image_grid_thw": grids[0]}, 0)],
        [theirs.replace_video_token(processor, {"video_grid_thw": grids[1], "video_metadata": metadata}, 0)],
    )
    (oracle,), _ = theirs.get_text_with_replacements(processor, [text], *written)
    assert expand(text, items, TOKENS) == oracle


# ------------------------------------------------------------------------------------------------ items and text

TOKENS = MediaTokens("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def test_equal_pixels_have_one_digest_and_others_have_another(small: MediaRules) -> None:
    image = noise(96, 64, 3)
    other = image.copy()
    other[95, 63, 2] ^= 1
    digests = {image_item(a, small).digest for a in (image, image.copy(), other, image.reshape(64, 96, 3))}
    digests.add(video_item(image[None].repeat(2, axis=0), (0, 1), 2.0, small).digest)
    assert len(digests) == 4


@pytest.mark.parametrize("text", ["none", "<|image_pad|> <|image_pad|>", "<|video_pad|>", "<|video_pad|><|image_pad|>"])
def test_placeholders_that_do_not_fit_what_was_sent_are_refused(text: str, small: MediaRules) -> None:
    with pytest.raises(MediaError, match="but is sent with image"):
        expand(text, [image_item(noise(64, 64, 3), small)], TOKENS)


@pytest.mark.parametrize(
    "array, sentence",
    [
        (np.zeros((8, 8, 4), np.uint8), r"uint8 \[8, 8, 4\], must be uint8 \[H, W, 3\]"),
        (np.zeros((8, 8, 3), np.float32), "the image is float32"),
        (np.zeros((0, 8, 3), np.uint8), "0 x 8 pixels, must have at least one"),
        (np.zeros((1, 201, 3), np.uint8), "a ratio of 201.0, must be at most 200"),
    ],
)
def test_an_image_that_cannot_be_seen_is_refused(array: np.ndarray, sentence: str, small: MediaRules) -> None:
    with pytest.raises(MediaError, match=sentence):
        image_item(array, small)


def test_a_video_that_cannot_be_seen_is_refused(small: MediaRules) -> None:
    with pytest.raises(MediaError, match="the video has 1 frames, must have at least 2"):
        video_item(noise(1, 40, 40, 3), (0,), 2.0, small)
    with pytest.raises(MediaError, match="the video has 2 frames, but 3 numbers"):
        video_item(noise(2, 40, 40, 3), (0, 1, 2), 2.0, small)
    with pytest.raises(MediaError, match="has nan frames a second"):
        small.sampled_frames(3, float("nan"))


# ------------------------------------------------------------------------------------------------ rules


def test_rules_are_read_from_the_combined_file_first(tmp_path: Path, rules: MediaRules) -> None:
    nested = {"image_processor": IMAGES | {"min_pixels": 1024}, "video_processor": VIDEOS | {"fps": 1}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    combined = load_media_rules(tmp_path, CONFIG)
    assert (combined.image.min_pixels, combined.video.fps) == (1024, 1.0)
    assert (rules.image.min_pixels, rules.video.fps) == (65536, 2.0)
    (tmp_path / "processor_config.json").write_text("{}")
    assert load_media_rules(tmp_path, CONFIG) == rules


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"patch_size": 14}, "patch_size is 14, but the vision_config says 16"),
        ({"do_resize": False}, "do_resize is False"),
        ({"resample": 2}, "resample is 2"),
        ({"rescale_factor": 1.0}, "rescale_factor is 1, but must be 1/255"),
        ({"image_mean": [0.5, 0.5]}, "image_mean is"),
        ({"image_mean": [0.1, 0.1, 0.1]}, "but must be those of images"),
        ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "at least 9 pixels and at most 8"),
        ({"size": {"longest_edge": 8}}, "shortest_edge is required"),
        ({"num_frames": 8}, "num_frames is 8"),
    ],
)
def test_rules_that_are_not_ours_are_refused_by_name(change: Json, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=sentence):
        load_media_rules(written(tmp_path, videos=VIDEOS | change), CONFIG)


def test_a_missing_file_of_rules_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"preprocessor_config\.json does not exist"):
        load_media_rules(tmp_path, CONFIG)


def test_tokens_of_media_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate("abcd")}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert MediaTokens.of(CONFIG, tokenizer) == MediaTokens("a", "b", "c", "d")
    with pytest.raises(ModelError, match="token id 9 is unknown"):
        MediaTokens.of(VisionConfig(**(vars(CONFIG) | {"end_token_id": 9})), tokenizer)


@pytest.mark.parametrize(
    "sections, interleaved, axes",
    [
        (None, False, (0,) * 8),
        ((3, 3, 2), True, (0, 1, 2, 0, 1, 2, 0, 1)),
        ((6, 1, 1), True, (0, 1, 2, 0, 0, 0, 0, 0)),
        ((3, 3, 2), False, (0, 0, 0, 1, 1, 1, 2, 2)),
    ],
)
def test_a_frequency_turns_by_its_section_s_axis(sections: Any, interleaved: bool, axes: tuple[int, ...]) -> None:
    assert RotaryConfig(1e4, 16, sections, interleaved, None).axes == axes
