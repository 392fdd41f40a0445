"""From a request's files to its prompt: placeholders, places, limits, and what is refused by which part."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from deployment import media_items
from deployment.engine.loading import Vision
from deployment.engine.placing import media_of
from deployment.engine.service import EngineService
from deployment.errors import RequestError
from deployment.media import EndsEarly, Video, decode_image
from deployment.media_limits import MediaLimits
from deployment.ownership.words import Epoch, SessionKey
from deployment.prompting import Prompter
from deployment.session import Session
from deployment.turns import Prompt
from deployment.wire import MediaSource, TurnRequest
from model.chat_template import ChatTemplate
from model.media import image_item, video_item
from model.media_rules import ImageRules, MediaRules, VideoRules
from model.placeholders import MediaTokens
from model.tokenizer import Tokenizer
from model.vision_config import VisionConfig
from tests.deployment.media_files import animation, filmed, picture, shades
from tests.deployment.seeing_text import END, IMAGE, START, TOKENS, VIDEO, template_source, write_text

RULES = MediaRules(
    image=ImageRules(256, 1536),
    video=VideoRules(256, 6144, fps=2.0, min_frames=2, max_frames=8, max_frame_tokens=None),
    factor=8,
    temporal_patch=2,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
PICTURES = [picture(24 + 8 * i, 48) for i in range(3)]
FILM = animation(shades(6, 24, 32), "GIF", 250)
SYSTEM = {"role": "system", "content": "You look at pictures."}


def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as name:
        write_text(Path(name))
        return Tokenizer.load(Path(name))


TEXT, TEMPLATE = tokenizer(), ChatTemplate(template_source(), {})


def vision() -> Vision:
    ids = dict(
        zip(
            ("start_token_id", "end_token_id", "image_token_id", "video_token_id"), map(TEXT.id_of, TOKENS), strict=True
        )
    )
    sizes = dict.fromkeys((name for name in VisionConfig.__dataclass_fields__ if name not in ids), 1)
    config = VisionConfig(**(sizes | ids))  # pyright: ignore[reportArgumentType]
    return Vision(cast(Any, SimpleNamespace(config=config)), RULES, MediaTokens.of(config, TEXT))


def prompter(context: int = 2000, sees: bool = True, **limits: Any) -> Prompter:
    service = SimpleNamespace(
        tokenizer=TEXT, chat_template=TEMPLATE, vision=vision() if sees else None, context_limit=context
    )
    return Prompter(cast(EngineService, service), accept_new_weights=False, media=MediaLimits(**limits))


def source(data: bytes, kind: Any = "image", place: str = "messages[0].content[0].image_url.url") -> MediaSource:
    return MediaSource(kind, data, hashlib.sha256(data).hexdigest(), place)


def said(*parts: str | bytes) -> dict[str, Any]:
    shown = {FILM: "video"}
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": shown.get(part, "image"), "sha256": "x"}
        for part in parts
    ]
    return {"role": "user", "content": content}


def asked(*messages: dict[str, Any], media: Sequence[bytes | MediaSource] = (), **fields: Any) -> TurnRequest:
    sources = tuple(one if isinstance(one, MediaSource) else source(one) for one in media)
    return TurnRequest("t", "history", messages, media=sources, **fields)


def alone(request: TurnRequest, how: Prompter | None = None) -> Prompt:
    return asyncio.run((how or prompter()).alone(request))


def text_of(ids: Sequence[int]) -> str:
    return "".join(TEXT.token(i) for i in ids).replace("\u0120", " ").replace("\u010a", "\n")


def items(*files: bytes) -> list[Any]:
    return [image_item(decode_image(data, MediaLimits()), RULES) for data in files]


def test_each_image_has_as_many_placeholders_as_embeddings_where_its_part_stands() -> None:
    first, second, _ = PICTURES
    prompt = alone(asked(SYSTEM, said("Look: ", first, " and ", second, ", well?"), media=(first, second)))
    one, other = items(first, second)
    assert one.embeddings != other.embeddings
    assert (
        f"Look: {START}{IMAGE * one.embeddings}{END} and {START}{IMAGE * other.embeddings}{END}, well?<|im_end|>"
        in text_of(prompt.ids)
    )
    assert [placed.media for placed in prompt.media] == [media_of(one), media_of(other)]
    for placed, item in zip(prompt.media, (one, other), strict=True):
        (start,) = placed.starts
        assert prompt.ids[start : start + item.embeddings] == (TEXT.id_of(IMAGE),) * item.embeddings
        assert prompt.ids[start - 1] == TEXT.id_of(START)


def test_a_video_has_its_frames_with_their_times() -> None:
    prompt = alone(asked(said(FILM, "What?"), media=[source(FILM, "video")]))
    frames = shades(6, 24, 32)
    indices = RULES.sampled_frames(6, 4.0)
    item = video_item((frames[i] for i in indices), indices, 4.0, RULES)
    (placed,) = prompt.media
    assert (placed.media.times, placed.media.shape) == (item.times, tuple(item.pixels.shape))
    assert len(placed.starts) == item.frames and f"<{item.times[0]:.1f} seconds>{START}{VIDEO}" in text_of(prompt.ids)


def test_a_video_file_becomes_an_item() -> None:
    data = filmed(shades(25, 32, 48))
    prompt = alone(asked(said(FILM), media=[source(data, "video")]))
    assert prompt.media[0].media.kind == "video" and prompt.media[0].media.shape[1:] == (3, 32, 48)


def test_the_next_turn_s_prompt_begins_with_the_stable_part_of_this_one() -> None:
    first = said("Look: ", PICTURES[0])
    one = alone(asked(SYSTEM, first, media=PICTURES[:1]))
    later = (SYSTEM, first, {"role": "assistant", "content": "I see."}, said(PICTURES[1], "And?"))
    two = alone(asked(*later, media=PICTURES[:2]))
    assert 0 < one.stable_boundary < len(one.ids)
    assert two.ids[: one.stable_boundary] == one.ids[: one.stable_boundary] and two.media[:1] == one.media
    assert one.system_boundary == alone(asked(SYSTEM, said("Look."))).system_boundary > 0


def test_an_append_turn_places_what_it_brings_behind_the_ledger() -> None:
    ledger = alone(asked(said("Look: ", PICTURES[0]), media=PICTURES[:1])).ids
    session = Session(SessionKey("", "s"), Epoch(1, 1), ledger=ledger)
    request = asked(said(PICTURES[1], "And this?"), media=PICTURES[1:2])
    prompt = asyncio.run(prompter().appended(request, session))
    placed = prompt.media[-1]
    assert prompt.ids[: len(ledger)] == ledger and placed.start > len(ledger)
    assert prompt.ids[placed.start - 1] == TEXT.id_of(START) and prompt.ids[placed.start] == TEXT.id_of(IMAGE)
    assert placed.media == media_of(items(PICTURES[1])[0])


# ------------------------------------------------------------------------------------------------ what is refused


def refused(request: TurnRequest, how: Prompter | None = None) -> tuple[str, str | None, str]:
    with pytest.raises(RequestError) as caught:
        alone(request, how)
    told = caught.value.refused
    assert told.status == 400 and told.message.startswith(f"{told.param}: ")
    return told.code, told.param, told.message


def test_a_model_of_text_alone_refuses_an_image_by_its_part() -> None:
    code, param, message = refused(asked(said(PICTURES[0]), media=PICTURES[:1]), prompter(sees=False))
    assert (code, param) == ("invalid_media", "messages[0].content[0].image_url.url")
    assert "is a part of type 'image', but the model is one of text alone" in message


def test_a_placeholder_that_a_message_spells_out_is_refused_by_a_model_that_sees() -> None:
    for parts, media in ((("see <|image_pad|>",), ()), ((PICTURES[0], "and <|image_pad|>"), PICTURES[:1])):
        code, param, message = refused(asked(said(*parts), media=media))
        assert (code, param) == ("invalid_request", "messages") and "has placeholders for image" in message
    request = TurnRequest("t", "prompt", (), prompt="see <|image_pad|>")
    assert refused(request)[:2] == ("invalid_request", "prompt")
    assert alone(request, prompter(sees=False)).media == ()


def test_the_item_at_fault_is_named() -> None:
    bad = source(picture()[:-900], place="messages[0].content[1].image_url.url")
    code, param, message = refused(asked(said(PICTURES[0], PICTURES[1]), media=(PICTURES[0], bad)))
    assert (code, param) == ("invalid_media", bad.place) and "is damaged or cut off" in message
    long = source(picture(4, 1200), place="messages[0].content[1].image_url.url")
    assert "a ratio of 300.0, must be at most 200" in refused(asked(said(PICTURES[0]), media=[long]))[2]


def test_media_that_fill_the_context_are_refused_before_the_rest_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = counted(monkeypatch)
    code, param, message = refused(asked(said(*PICTURES), media=PICTURES), prompter(context=30))
    assert (code, param) == ("context_length_exceeded", "messages[0].content[0].image_url.url")
    assert "the context limit is 30 tokens" in message and len(decoded) == 2


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every file that is decoded from now on."""
    decoded: list[bytes] = []

    def decode(data: bytes, limits: MediaLimits) -> np.ndarray:
        decoded.append(data)
        return decode_image(data, limits)

    monkeypatch.setattr(media_items, "decode_image", decode)
    return decoded


# ------------------------------------------------------------------------------------------------ decoding


def test_an_image_that_comes_again_is_not_decoded_again_while_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = counted(monkeypatch)
    how = prompter()
    request = asked(said(*PICTURES[:2]), media=PICTURES[:2])
    assert alone(request, how) == alone(request, how) and len(decoded) == 2
    monkeypatch.setattr(media_items, "KEPT_BYTES", 0)
    alone(asked(said(PICTURES[2]), media=PICTURES[2:]), how)
    alone(request, how)
    assert decoded[2:] == [PICTURES[2], *PICTURES[:2]]


def test_all_media_of_a_request_have_one_time_to_be_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def decode(data: bytes, limits: MediaLimits) -> np.ndarray:
        nonlocal now
        now += 40.0
        return decode_image(data, limits)

    monkeypatch.setattr(media_items, "decode_image", decode)
    monkeypatch.setattr("deployment.media.time", SimpleNamespace(monotonic=lambda: now))
    last = source(picture(40, 48), place="messages[0].content[2].image_url.url")
    how, request = prompter(), asked(said(*PICTURES), media=[*PICTURES[:2], last])
    code, param, message = refused(request, how)
    assert (code, param, now) == ("invalid_media", last.place, 80.0)
    assert "with the media before it takes more than 60 s to decode" in message
    assert len(alone(request, how).media) == 3  # what was decoded is kept, and takes no time again


def test_the_event_loop_goes_on_while_an_image_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def decode(data: bytes, limits: MediaLimits) -> np.ndarray:
        assert gate.wait(5)
        return decode_image(data, limits)

    monkeypatch.setattr(media_items, "decode_image", decode)

    async def steps() -> Prompt:
        how = prompter()
        running = asyncio.create_task(how.alone(asked(said(PICTURES[0]), media=PICTURES[:1])))
        text = await how.alone(asked(said("Hello")))
        assert text.media == () and not running.done()
        gate.set()
        return await running

    assert len(asyncio.run(steps()).media) == 1


def test_a_video_that_ends_early_is_sampled_over_the_frames_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shades(6, 24, 32)

    def frames(numbers: Sequence[int]) -> Iterator[np.ndarray]:
        yield from (whole[number] for number in numbers if number < 6)
        if max(numbers) >= 6:
            raise EndsEarly(6)

    monkeypatch.setattr(media_items, "open_video", lambda data, limits, deadline: Video(9, 4.0, frames))
    (placed,) = alone(asked(said(FILM), media=[source(FILM, "video")])).media
    indices = RULES.sampled_frames(6, 4.0)
    assert placed.media == media_of(video_item((whole[i] for i in indices), indices, 4.0, RULES))
