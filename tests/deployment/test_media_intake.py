"""From content parts to bytes at the ingress: base64, media types, limits, and what the messages keep."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from typing import Any

import pytest

from deployment.errors import Refused, RequestError
from deployment.media_fetch import Fetched, Fetcher
from deployment.media_intake import MediaIntake
from deployment.media_limits import MediaLimits
from deployment.request_reading import MAX_BODY_BYTES
from deployment.turn_records import request_sha256
from deployment.wire import MediaSource, TurnRequest
from model.errors import MediaError
from tests.deployment.media_files import animation, filmed, picture, shades

PNG, JPEG = picture(), picture(kind="JPEG")


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def turn(*urls: str, kind: str = "image_url") -> TurnRequest:
    parts = [{"type": kind, kind: {"url": url}} for url in urls]
    return TurnRequest("t", "history", ({"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]},))


def taken(asked: TurnRequest, limits: MediaLimits | None = None, fetcher: Any = None, body: int = 1000) -> TurnRequest:
    return asyncio.run(MediaIntake(limits or MediaLimits(), fetcher).taken(asked, body))


def refused(asked: TurnRequest, *given: Any, **how: Any) -> Refused:
    with pytest.raises(RequestError) as caught:
        taken(asked, *given, **how)
    told = caught.value.refused
    assert told.param is None or told.message.startswith(f"{told.param}: ")
    assert len(told.message) < 400 and "\n" not in told.message
    return told


class Site(Fetcher):
    """Answers with what it is told, and keeps what it was asked."""

    def __init__(self, *answers: Fetched | Exception | float) -> None:
        self.asked: list[tuple[str, int]] = []
        self._answers = list(answers)

    async def fetch(self, url: str, limit: int) -> Fetched:
        self.asked.append((url, limit))
        answer = self._answers.pop(0)
        if isinstance(answer, float):
            await asyncio.sleep(answer)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Fetched)
        return answer


def test_a_turn_has_its_images_beside_its_messages_which_keep_digests() -> None:
    gif = animation(shades(2), "GIF")
    asked = taken(turn(data_url(PNG), data_url(gif, "IMAGE/GIF"), data_url(JPEG, "image/jpg")))
    places = [f"messages[0].content[{i}].image_url.url" for i in range(3)]
    digests = [hashlib.sha256(data).hexdigest() for data in (PNG, gif, JPEG)]
    assert asked.media == tuple(
        MediaSource("image", data, digest, place)
        for data, digest, place in zip((PNG, gif, JPEG), digests, places, strict=True)
    )
    assert asked.messages[0]["content"][:3] == [{"type": "image", "sha256": digest} for digest in digests]


def test_two_requests_differ_by_their_images_though_their_text_is_one() -> None:
    first, again, other = (request_sha256(taken(turn(data_url(data)))) for data in (PNG, PNG, picture(64, 64)))
    assert first == again != other


def test_a_turn_without_media_is_left_as_it_is() -> None:
    asked = TurnRequest("t", "history", ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": None}))
    assert taken(asked) is asked


@pytest.mark.parametrize("kind, data", [("video/mp4", filmed(shades(2))), ("image/gif", animation(shades(2), "GIF"))])
def test_a_video_is_a_file_or_an_animation(kind: str, data: bytes) -> None:
    (source,) = taken(turn(data_url(data, kind), kind="video_url")).media
    assert isinstance(source, MediaSource)
    assert (source.kind, source.data, source.place) == ("video", data, "messages[0].content[0].video_url.url")


@pytest.mark.parametrize(
    "url, nature",
    [
        (data_url(JPEG, "image/png"), "is declared as image/png, but its bytes are JPEG"),
        (data_url(PNG, "image/svg+xml"), "which is SVG, a document that would have to be rendered"),
        (data_url(PNG, "text/html"), "has the media type 'text/html', which is not supported"),
        (data_url(PNG, ""), "has the media type '', which is not supported"),
        (data_url(b"<svg/>"), "is SVG"),
        (data_url(b""), "is empty"),
        (data_url(filmed(shades(2)), "video/mp4"), "is a video .MP4., but stands where an image belongs"),
        (data_url(PNG)[:-3] + "=", "is not base64: "),
        (data_url(PNG)[:-4] + "A\nAA", "is not base64: "),
        (data_url(PNG)[:-4] + "A-_A", "is not base64: "),
        (data_url(PNG) + "====", "is not base64: "),
        (data_url(PNG)[:-4] + "ÄAAA", "is not base64: character .* is none of its alphabet"),
        ("https://example.org/a.png", "is a URL, but this server fetches none; send the bytes as a data URL"),
    ],
)
def test_bytes_that_are_not_what_they_should_be_are_refused(url: str, nature: str) -> None:
    told = refused(turn(data_url(PNG), url))
    assert (told.status, told.code) == (400, "invalid_media")
    assert told.param == "messages[0].content[1].image_url.url"
    assert re.search(f": .*{nature}", told.message), told.message


def test_an_image_where_a_video_belongs_is_refused() -> None:
    told = refused(turn(data_url(JPEG, "image/jpeg"), kind="video_url"))
    assert "is an image (JPEG), but stands where a video belongs" in told.message


def test_too_many_bytes_are_a_413_that_names_the_item() -> None:
    told = refused(turn(data_url(JPEG, "image/jpeg"), data_url(PNG)), MediaLimits(item_bytes=len(PNG) - 1))
    assert (told.status, told.code, told.param) == (413, "media_too_large", "messages[0].content[1].image_url.url")
    assert f"has more than {len(PNG) - 1} bytes" in told.message
    told = refused(turn(*[data_url(PNG)] * 3), MediaLimits(total_bytes=3 * len(PNG) - 1))
    assert (told.status, told.param) == (413, "messages[0].content[2].image_url.url") and "in all" in told.message
    assert len(taken(turn(*[data_url(PNG)] * 3), MediaLimits(item_bytes=len(PNG), total_bytes=3 * len(PNG))).media) == 3


def test_too_many_items_are_refused_before_any_is_read() -> None:
    told = refused(turn(*["https://example.org/a.png"] * 3), MediaLimits(items=2), Site())
    assert told.status == 400 and "have 3 images and videos; at most 2 are taken" in told.message


def test_text_beside_images_keeps_the_limit_of_text() -> None:
    url = data_url(PNG)
    images = len(url) - url.index(",") - 1
    assert taken(turn(url), body=MAX_BODY_BYTES + images).media
    told = refused(turn(url), body=MAX_BODY_BYTES + images + 1)
    assert (told.status, told.code) == (413, "body_too_large")


def test_a_body_may_hold_all_media_in_base64() -> None:
    limits = MediaLimits(total_bytes=1000)
    assert MediaIntake(limits).body_bytes == MAX_BODY_BYTES + len(base64.b64encode(bytes(1000)))


@pytest.mark.parametrize("said", [None, "image/png", "application/octet-stream"])
def test_a_url_s_bytes_are_told_by_what_they_are(said: str | None) -> None:
    site = Site(Fetched(PNG, said))
    asked = taken(turn("https://example.org/a"), MediaLimits(item_bytes=1 << 20), site)
    (source,) = asked.media
    assert isinstance(source, MediaSource) and source.data == PNG and site.asked == [("https://example.org/a", 1 << 20)]


@pytest.mark.parametrize(
    "answer, nature",
    [
        (Fetched(PNG, "image/jpeg"), "is declared as image/jpeg, but its bytes are PNG"),
        (Fetched(b"<html>", "text/html"), "has the media type 'text/html'"),
        (MediaError("leads elsewhere"), "leads elsewhere"),
    ],
)
def test_a_url_that_brings_something_else_is_refused(answer: Any, nature: str) -> None:
    told = refused(turn("https://example.org/a"), None, Site(answer))
    assert told.code == "invalid_media" and nature in told.message


def test_urls_have_a_time_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployment.media_intake.FETCH_SECONDS", 0.05)
    told = refused(turn("https://example.org/a"), None, Site(5.0))
    assert "cannot be fetched: it takes more than 0.05 s" in told.message
