"""Turns with images and video from a request's content parts to tokens: transformers' greedy continuation of what its
own processors make of the same bytes."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from deployment.engine.commands import Submit
from deployment.engine.events import Finished
from deployment.engine.options import EngineOptions
from deployment.engine.service import EngineService
from deployment.media_intake import MediaIntake
from deployment.media_limits import MediaLimits
from deployment.prompting import Prompter
from deployment.turns import Prompt
from deployment.wire import TurnRequest
from model.tokenizer import Tokenizer
from tests.deployment.media_files import animation, noise, picture
from tests.deployment.seeing_text import IMAGE, TOKENS, VIDEO, write_text
from tests.deployment.serving import serving
from tests.model.parity import randomise
from tests.model.test_vision import TEXT, VISION

NEW_TOKENS = 8
SIZES = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
CONSTANTS = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.2]}
PIXELS = {"size": {"shortest_edge": 64, "longest_edge": 1 << 16}}
# Sides are multiples of a merged patch's, so that nothing is resized.
FIRST, SECOND = picture(24, 40), picture(16, 32, "WebP", lossless=True)
FRAMES = [noise(16, 24, 3, seed=i) for i in range(4)]


class Seeing:
    """A tiny random model that sees, served in this process, and transformers' of the same weights."""

    def __init__(self, directory: Path) -> None:
        from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

        write_text(directory)
        ids = dict(zip(TOKENS, map(Tokenizer.load(directory).id_of, TOKENS), strict=True))
        named = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
        config: Any = dict(zip(named, ids.values(), strict=True))
        text = dict(TEXT) | {"vocab_size": max(i for i in ids.values() if i is not None) + 1}
        made = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=dict(VISION), **config))
        self.theirs: Any = made.eval().float()
        randomise(self.theirs, 1)
        self.theirs.save_pretrained(directory)
        (directory / "preprocessor_config.json").write_text(json.dumps(SIZES | CONSTANTS | PIXELS))
        frames = {"fps": 2, "min_frames": 4, "max_frames": 8}
        (directory / "video_preprocessor_config.json").write_text(json.dumps(SIZES | CONSTANTS | PIXELS | frames))
        self.service = EngineService.start(EngineOptions(directory, lanes=2, context=256))
        self.prompter = Prompter(self.service, accept_new_weights=False)
        self.ids = ids

    def prompt(self, *parts: dict[str, Any]) -> Prompt:
        async def steps() -> Prompt:
            request = TurnRequest("t", "history", ({"role": "user", "content": list(parts)},))
            return await self.prompter.alone(await MediaIntake(MediaLimits()).taken(request, 1000))

        return asyncio.run(steps())

    def continued(self, prompt: Prompt) -> tuple[int, ...]:
        async def steps() -> Finished:
            submit = Submit("t", prompt.ids, max_tokens=NEW_TOKENS, ignore_eos=True, media=prompt.media)
            last = None
            async for event in self.service.turn(submit):
                last = event
            assert isinstance(last, Finished), last
            return last

        return asyncio.run(steps()).token_ids

    def oracle(self, prompt: Prompt, images: list[bytes], frames: list[np.ndarray]) -> tuple[int, ...]:
        ids = torch.tensor(prompt.ids)
        kinds = (ids == self.ids[IMAGE]) + 2 * (ids == self.ids[VIDEO])
        inputs = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
        inputs["mm_token_type_ids"] = kinds.int()[None]
        if images:
            given = self._processed([Image.open(io.BytesIO(data)) for data in images])
            inputs |= {"pixel_values": given["pixel_values"], "image_grid_thw": given["image_grid_thw"]}
        if frames:
            # Its video processor needs torchvision. Each frame as an image stands on both places of a patch in time.
            alone = self._processed([Image.fromarray(frame) for frame in frames])
            (_, rows, columns), each = alone["image_grid_thw"][0].tolist(), alone["pixel_values"]
            each = each.unflatten(0, (len(frames), -1)).unflatten(2, (3, 2, -1))
            pairs = torch.stack((each[::2, :, :, 0], each[1::2, :, :, 1]), dim=3)
            inputs["pixel_values_videos"] = pairs.flatten(2).flatten(0, 1)
            inputs["video_grid_thw"] = torch.tensor([[len(frames) // 2, rows, columns]])
        with torch.no_grad():
            out = self.theirs.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        return tuple(out[0, len(ids) :].tolist())

    def _processed(self, images: list[Image.Image]) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        settings: Any = SIZES | CONSTANTS | PIXELS
        return Qwen2VLImageProcessorPil(**settings)(images, return_tensors="pt")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    made = Seeing(tmp_path_factory.mktemp("seeing"))
    yield made
    made.service.close()


def part(data: bytes, media_type: str, kind: str = "image_url") -> dict[str, Any]:
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return {"type": kind, kind: {"url": url}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    "parts, images, frames",
    [
        ([said("See: "), part(FIRST, "image/png"), said(" What is it?")], [FIRST], []),
        ([part(FIRST, "image/png"), said("and"), part(SECOND, "image/webp")], [FIRST, SECOND], []),
        ([part(animation(FRAMES, "PNG", 500), "image/png", "video_url"), said("Tell.")], [], FRAMES),
        (
            [part(animation(FRAMES, "PNG", 500), "image/png", "video_url"), said("and"), part(FIRST, "image/png")],
            [FIRST],
            FRAMES,
        ),
    ],
    ids=["an image", "two images", "a video", "a video and an image"],
)
def test_a_request_s_tokens_are_those_of_transformers_for_the_same_bytes(
    parts: list[dict[str, Any]], images: list[bytes], frames: list[np.ndarray], seeing: Seeing
) -> None:
    prompt = seeing.prompt(*parts)
    assert len(prompt.media) == len(images) + bool(frames)
    assert seeing.continued(prompt) == seeing.oracle(prompt, images, frames)


def test_an_image_says_the_same_through_every_interface(seeing: Seeing):
    """Chat completions, Responses and Anthropic's messages, each in its own form."""
    data = base64.b64encode(FIRST).decode()
    url, asked = f"data:image/png;base64,{data}", "See."
    inline = {"type": "base64", "media_type": "image/png", "data": data}
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}},
                                                      {"type": "text", "text": asked}]}],
            "max_tokens": NEW_TOKENS,
        },
        "responses": {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"},
                                                   {"type": "input_text", "text": asked}]}],
            "max_output_tokens": NEW_TOKENS, "store": False,
        },
        "messages": {
            "messages": [{"role": "user", "content": [{"type": "image", "source": inline},
                                                      {"type": "text", "text": asked}]}],
            "max_tokens": NEW_TOKENS,
        },
    }  # fmt: skip
    with serving(seeing.service) as server:
        answers = {
            name: httpx.post(f"{server}/v1/{name}", json={"model": "demo", "temperature": 0, **body}, timeout=60)
            for name, body in bodies.items()
        }
    for name, answer in answers.items():
        assert answer.status_code == 200, (name, answer.text)
    said = {name: answer.json() for name, answer in answers.items()}
    texts = {
        said["chat/completions"]["choices"][0]["message"]["content"],
        "".join(part["text"] for item in said["responses"]["output"] for part in item["content"]),
        "".join(block["text"] for block in said["messages"]["content"]),
    }
    assert len(texts) == 1
    used = said["chat/completions"]["usage"]["prompt_tokens"]
    assert said["responses"]["usage"]["input_tokens"] == used


@pytest.mark.parametrize(
    ("name", "part", "field"),
    [
        ("responses", {"type": "input_image", "file_id": "file-1"}, "file_id"),
        ("responses", {"type": "input_image", "image_url": "file:///etc/passwd"}, "image_url"),
        ("messages", {"type": "image", "source": {"type": "file", "file_id": "f"}}, "source.type"),
        ("messages", {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}, "source.data"),
    ],
)
def test_an_image_in_a_form_that_is_not_supported_is_refused_by_field(
    seeing: Seeing, name: str, part: dict[str, Any], field: str
):
    content = [{"role": "user", "content": [part]}]
    said = {"input": content} if name == "responses" else {"messages": content, "max_tokens": 4}
    with serving(seeing.service) as server:
        answer = httpx.post(f"{server}/v1/{name}", json={"model": "demo", **said}, timeout=60)
    assert answer.status_code == 400 and field in answer.json()["error"]["message"], answer.text


BAD = base64.b64encode(b"no image at all").decode()


@pytest.mark.parametrize(
    ("name", "said", "field"),
    [
        (
            "responses",
            {"instructions": "See.", "input": [{"role": "user", "content": "x"}, {"role": "user", "content": [
                {"type": "input_text", "text": "x"},
                {"type": "input_image", "image_url": f"data:image/png;base64,{BAD}"}]}]},
            "input[1].content[1].image_url",
        ),
        (
            "responses",
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                       {"type": "function_call_output", "call_id": "c", "output": [
                           {"type": "input_image", "image_url": f"data:image/png;base64,{BAD}"}]}]},
            "input[1].output[0].image_url",
        ),
        (
            "messages",
            {"system": "See.", "messages": [{"role": "user", "content": [
                {"type": "text", "text": "x"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BAD}}]}]},
            "messages[0].content[1].source.data",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [
                {"type": "image", "source": {"type": "url", "url": "http://nobody.example/x"}},
                {"type": "tool_result", "tool_use_id": "c", "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BAD}}]}]}]},
            "messages[0].content[1].content[0].source.data",
        ),
    ],
)  # fmt: skip
def test_an_image_that_is_none_is_named_by_where_its_request_has_it(
    seeing: Seeing, name: str, said: dict[str, Any], field: str
):
    limit = "max_output_tokens" if name == "responses" else "max_tokens"
    with serving(seeing.service) as server:
        answer = httpx.post(f"{server}/v1/{name}", json={"model": "demo", limit: 4, **said}, timeout=60)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith(f"{field}: "), message


def test_a_response_whose_past_has_images_is_gone_on_from_without_sending_them_again(seeing: Seeing):
    """The same tokens as with all images sent in one request, from the newest response and from an older one."""
    first, second = ({"type": "input_image", "image_url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}
                     for data in (FIRST, picture(32, 16)))  # fmt: skip
    texts = ("See.", "And this?", "Else?")
    asked = [{"role": "user", "content": [*shown, {"type": "input_text", "text": text}]}
             for shown, text in zip(([first], [second], []), texts, strict=True)]  # fmt: skip
    with serving(seeing.service) as server, httpx.Client(base_url=server, timeout=60) as client:

        def ask(said: Any, status: int = 200, **more: Any) -> Any:
            body = {"input": said, "max_output_tokens": 3, "temperature": 0, **more}
            answer = client.post("/v1/responses", json=body)
            assert answer.status_code == status, answer.text
            return answer.json()

        one = ask([asked[0]])
        two = ask([asked[1]], previous_response_id=one["id"])
        older = ask([asked[1]], previous_response_id=one["id"])
        three = ask([asked[2]], previous_response_id=two["id"])
        whole = ask([asked[0], *one["output"], asked[1], *two["output"], asked[2]], store=False)
        assert older["output"][0]["content"] == two["output"][0]["content"] and older["id"][:37] != two["id"][:37]
        assert three["output"][0]["content"] == whole["output"][0]["content"]
        assert three["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        assert three["usage"]["input_tokens_details"]["cached_tokens"] > one["usage"]["total_tokens"]

        refused = ask("And?", 400, previous_response_id=two["id"], store=False)["error"]
        assert refused["param"] == "store"
        body = {"input": "And?", "previous_response_id": two["id"]}
        assert client.post("/v1/responses/input_tokens", json=body).json()["error"]["param"] == "previous_response_id"
