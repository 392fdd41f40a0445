"""Content parts in the forms of three interfaces: what they show, and what is refused, by which field."""

from __future__ import annotations

from typing import Any

import pytest

from deployment.content_parts import (
    Inline,
    Link,
    MediaPart,
    PartReader,
    anthropic_part,
    chat_part,
    parts_of,
    responses_part,
)
from deployment.errors import RequestError

DATA = "data:image/png;base64,AAAA"
HTTPS = "https://example.org/a.png"
PLACE = "messages[2].content[1]"


BYTES = Inline("image/png", "AAAA")
BASE64 = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


@pytest.mark.parametrize(
    "reader, part, source, field",
    [
        (chat_part, {"type": "image_url", "image_url": {"url": DATA}}, BYTES, "image_url.url"),
        (chat_part, {"type": "image_url", "image_url": {"url": HTTPS, "detail": "low"}}, Link(HTTPS), "image_url.url"),
        (responses_part, {"type": "input_image", "image_url": DATA, "detail": "auto"}, BYTES, "image_url"),
        (responses_part, {"type": "input_image", "image_url": HTTPS, "file_id": None}, Link(HTTPS), "image_url"),
        (anthropic_part, {"type": "image", "source": BASE64, "cache_control": {}}, BYTES, "source.data"),
        (anthropic_part, {"type": "image", "source": {"type": "url", "url": HTTPS}}, Link(HTTPS), "source.url"),
    ],
)
def test_an_image_is_read_from_each_interface_s_form(
    reader: PartReader, part: dict[str, Any], source: Inline | Link, field: str
) -> None:
    assert reader(part, PLACE) == MediaPart("image", source, f"{PLACE}.{field}")


def test_a_video_is_read() -> None:
    part = {"type": "video_url", "video_url": {"url": HTTPS}}
    assert chat_part(part, PLACE) == MediaPart("video", Link(HTTPS), f"{PLACE}.video_url.url")


@pytest.mark.parametrize(
    "reader, kind", [(chat_part, "text"), (responses_part, "input_text"), (anthropic_part, "text")]
)
def test_text_is_text(reader: PartReader, kind: str) -> None:
    assert reader({"type": kind, "text": "Look."}, PLACE) is None
    assert refused(reader, {"type": kind}) == "text"


@pytest.mark.parametrize(
    "reader, part, field",
    [
        (chat_part, {}, "type"),
        (chat_part, {"type": ["text"]}, "type"),
        (chat_part, {"type": "input_audio"}, "type"),
        (chat_part, {"type": "image_url"}, "image_url"),
        (chat_part, {"type": "image_url", "image_url": DATA}, "image_url"),
        (chat_part, {"type": "image_url", "image_url": {}}, "image_url.url"),
        (chat_part, {"type": "image_url", "image_url": {"url": 3}}, "image_url.url"),
        (chat_part, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image_url.url"),
        (chat_part, {"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "image_url.url"),
        (chat_part, {"type": "image_url", "image_url": {"url": "ftp://example.org/a.png"}}, "image_url.url"),
        (chat_part, {"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "image_url.url"),
        (chat_part, {"type": "image_url", "image_url": {"url": "data:image/png;base64"}}, "image_url.url"),
        (chat_part, {"type": "image_url", "image_url": {"url": DATA, "detail": "best"}}, "image_url.detail"),
        (chat_part, {"type": "image_url", "image_url": {"url": DATA, "max_pixels": 9}}, "image_url.max_pixels"),
        (chat_part, {"type": "image_url", "image_url": {"url": DATA}, "min_pixels": 9}, "min_pixels"),
        (chat_part, {"type": "video_url", "video_url": {"url": DATA, "detail": "low"}}, "video_url.detail"),
        (responses_part, {"type": "input_image", "file_id": "file-1"}, "file_id"),
        (responses_part, {"type": "input_file", "file_id": "file-1"}, "type"),
        (responses_part, {"type": "input_image"}, "image_url"),
        (anthropic_part, {"type": "document"}, "type"),
        (anthropic_part, {"type": "image"}, "source"),
        (anthropic_part, {"type": "image", "source": {"type": "file", "file_id": "f"}}, "source.type"),
        (anthropic_part, {"type": "image", "source": {"type": "base64", "data": "AAAA"}}, "source.media_type"),
        (anthropic_part, {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}, "source.data"),
        (anthropic_part, {"type": "image", "source": {"type": "url", "url": DATA}}, "source.url"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_field(reader: PartReader, part: dict[str, Any], field: str) -> None:
    assert refused(reader, part) == field


def refused(reader: PartReader, part: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as caught:
        reader(part, PLACE)
    told = caught.value.refused
    assert told.status == 400 and told.param and told.message.startswith(f"{told.param}: ") and "got " in told.message
    return told.param.removeprefix(f"{PLACE}.")


def test_messages_keep_a_digest_in_the_place_of_each_image() -> None:
    image = {"type": "image_url", "image_url": {"url": DATA}}
    text = {"type": "text", "text": "Look."}
    messages = ({"role": "system", "content": "x"}, {"role": "user", "content": [image, text, image], "name": "me"})
    parts = parts_of(messages, chat_part)
    assert [part.place for part in parts.media] == [f"messages[1].content[{i}].image_url.url" for i in (0, 2)]
    assert parts.inline_characters == 8
    shown = [{"type": "image", "sha256": "a"}, text, {"type": "image", "sha256": "b"}]
    assert parts.with_digests(["a", "b"]) == (messages[0], {"role": "user", "content": shown, "name": "me"})


def test_media_for_which_no_other_place_is_told_stay_at_their_own() -> None:
    shown = [{"type": "image_url", "image_url": {"url": HTTPS}}] * 2
    moved = parts_of([{"role": "user", "content": shown}], chat_part).at(["input[0].content[0].image_url"])
    places = [part.place for part in moved.media]
    assert places == ["input[0].content[0].image_url", "messages[0].content[1].image_url.url"]
