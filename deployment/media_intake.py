"""From the content parts of a request to the bytes of its images and videos, at the ingress.

Messages keep a digest in the place of the bytes: they are logged, copied and kept, and the bytes are none of that.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import replace

from deployment.content_parts import Inline, Kept, Link, MediaPart, PartReader, chat_part, parts_of
from deployment.errors import invalid_media, media_too_large
from deployment.media_fetch import Fetcher, TooLarge
from deployment.media_formats import MOVING, STILL, Format, check_declared, format_of, known_type, listed
from deployment.media_limits import MediaLimits
from deployment.request_reading import MAX_BODY_BYTES, beside, body_too_large
from deployment.wire import KeptMedia, MediaSource, TurnRequest
from model.errors import MediaError

FETCH_SECONDS = 20.0
"""For all URLs of a request together."""

_SAYS_NOTHING = ("application/octet-stream", "binary/octet-stream")
"""What hosts call files of which they know nothing."""


class MediaIntake:
    def __init__(self, limits: MediaLimits, fetcher: Fetcher | None = None) -> None:
        self._limits = limits
        self._fetcher = Fetcher(limits.hosts) if fetcher is None else fetcher

    @property
    def body_bytes(self) -> int:
        """How large a body may be: its text, and all media in base64."""
        return MAX_BODY_BYTES + 4 * -(-self._limits.total_bytes // 3)

    async def taken(
        self,
        turn: TurnRequest,
        body_bytes: int,
        places: Sequence[str] | None = None,
        reader: PartReader = chat_part,
    ) -> TurnRequest:
        """The turn with its media beside its messages. `body_bytes`: how large the body was. `places`: what holds each
        of the media in the body, where that was not a chat completion's. Raises RequestError, 400 or 413."""
        parts = await beside(body_bytes, parts_of, turn.messages, reader)
        if places is not None:
            parts = parts.at(places)
        if body_bytes - parts.inline_characters > MAX_BODY_BYTES:
            raise body_too_large(MAX_BODY_BYTES, "without its images and videos ")
        if not parts.media:
            return turn
        if len(parts.media) > self._limits.items:
            message = f"messages: have {len(parts.media)} images and videos; at most {self._limits.items} are taken"
            raise invalid_media(message, "messages")
        sources = await self._sources(parts.media)
        return replace(turn, messages=parts.with_digests([source.sha256 for source in sources]), media=sources)

    async def _sources(self, parts: Sequence[MediaPart]) -> tuple[MediaSource | KeptMedia, ...]:
        sources: list[MediaSource | KeptMedia] = []
        left = self._limits.total_bytes
        end = asyncio.get_running_loop().time() + FETCH_SECONDS
        for part in parts:
            if isinstance(part.source, Kept):
                sources.append(KeptMedia(part.kind, part.source.sha256, part.place))
                continue
            try:
                source = await self._source(part, part.source, min(self._limits.item_bytes, left), end)
            except TooLarge:
                item, total = self._limits.item_bytes, self._limits.total_bytes
                what = f"has more than {item} bytes" if item <= left else f"makes it more than {total} bytes in all"
                raise media_too_large(f"{part.place}: {what}", part.place) from None
            except MediaError as error:
                raise invalid_media(f"{part.place}: {error}", part.place) from None
            sources.append(source)
            left -= len(source.data)
        return tuple(sources)

    async def _source(self, part: MediaPart, source: Inline | Link, limit: int, end: float) -> MediaSource:
        if isinstance(source, Inline):
            # Megabytes to decode and to hash: other requests' streams must not wait for them.
            return await asyncio.to_thread(_of_inline, part, source, limit)
        try:
            async with asyncio.timeout_at(end):
                found = await self._fetcher.fetch(source.url, limit)
        except TimeoutError:
            raise MediaError(f"cannot be fetched: it takes more than {FETCH_SECONDS:g} s") from None
        declared = None if found.media_type in _SAYS_NOTHING else found.media_type
        return await asyncio.to_thread(_checked, part, declared, found.data)


def _of_inline(part: MediaPart, source: Inline, limit: int) -> MediaSource:
    wanted = known_type(source.media_type)
    _check_kind(part, wanted)
    if 3 * (len(source.base64) // 4) - 2 > limit:
        raise TooLarge("")
    data = _decoded(source.base64)
    if len(data) > limit:
        raise TooLarge("")
    return _checked(part, source.media_type, data)


def _decoded(text: str) -> bytes:
    # Python's strict mode takes any number of = behind whole groups.
    if len(text) % 4 or text.find("=", 0, -2) != -1:
        raise MediaError("is not base64: its groups have 4 characters each, and only the last may end in = or ==")
    try:
        return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
    except UnicodeEncodeError as error:
        raise MediaError(f"is not base64: character {error.start} is none of its alphabet") from None
    except binascii.Error as error:
        raise MediaError(f"is not base64: {error}") from None


def _checked(part: MediaPart, declared: str | None, data: bytes) -> MediaSource:
    """Raises MediaError for bytes that are not what they are declared to be, or not what their part may show."""
    found = format_of(data) if declared is None else check_declared(declared, data)
    _check_kind(part, found)
    return MediaSource(part.kind, data, hashlib.sha256(data).hexdigest(), part.place)


def _check_kind(part: MediaPart, found: Format) -> None:
    if part.kind == "image" and found not in STILL:
        raise MediaError(f"is a video ({found}), but stands where an image belongs; an image is {listed(STILL)}")
    if part.kind == "video" and found not in MOVING:
        raise MediaError(f"is an image ({found}), but stands where a video belongs; a video is {listed(MOVING)}")
