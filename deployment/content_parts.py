"""What does a content part say? Text, or an image or a video and where its bytes are; in the forms of three interfaces.

    chat completions     {"type": "image_url", "image_url": {"url": ..., "detail": ...}}, and video_url alike
    Responses            {"type": "input_image", "image_url": ..., "detail": ...}
    Anthropic messages   {"type": "image", "source": {"type": "base64", "media_type": ..., "data": ...}},
                         or with the source {"type": "url", "url": ...}

A field that would change what the model sees, and is not supported, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deployment.errors import RequestError, invalid
from deployment.json_reading import shown
from state.media import MediaKind

DETAILS = ("auto", "low", "high", "original")
"""Accepted, and without effect: an image has the size that the model's own rules give it."""

Message = dict[str, Any]

_HINTS = {"type", "cache_control"}
"""What a part may say beside its content: a hint for caches changes nothing."""


@dataclass(frozen=True)
class Inline:
    """Bytes in base64, declared to be of a media type."""

    media_type: str
    base64: str


@dataclass(frozen=True)
class Link:
    """An http(s) URL."""

    url: str


@dataclass(frozen=True)
class Kept:
    """What a session keeps of a file that it was shown."""

    sha256: str


@dataclass(frozen=True)
class MediaPart:
    """`place`: the field that holds the bytes or the URL."""

    kind: MediaKind
    source: Inline | Link | Kept
    place: str


PartReader = Callable[[dict[str, Any], str], MediaPart | None]
"""From a part and its place to what it shows; None for text. Raises RequestError (400)."""


@dataclass(frozen=True)
class Parts:
    """`messages`, in whose contents a `MediaPart` stands for itself; `media`: all of them, in their order."""

    messages: tuple[Message, ...]
    media: tuple[MediaPart, ...]

    @property
    def inline_characters(self) -> int:
        return sum(len(part.source.base64) for part in self.media if isinstance(part.source, Inline))

    def at(self, places: Sequence[str]) -> Parts:
        """The same, with the media that are not kept at other places; one for which there is none stays at its own, so
        that what is refused about it has a name."""
        left = iter(places)
        media = (
            one if isinstance(one.source, Kept) else replace(one, place=next(left, one.place)) for one in self.media
        )
        return replace(self, media=tuple(media))

    def with_digests(self, digests: Sequence[str]) -> tuple[Message, ...]:
        """The messages as they are rendered, logged and kept. `digests`: sha256 of each item."""
        left = iter(digests)

        def shown(part: Message | MediaPart) -> Message:
            return {"type": part.kind, "sha256": next(left)} if isinstance(part, MediaPart) else part

        return tuple(
            {**message, "content": [shown(part) for part in message["content"]]}
            if isinstance(message.get("content"), list)
            else message
            for message in self.messages
        )


def parts_of(messages: Sequence[Message], reader: PartReader) -> Parts:
    """Raises RequestError (400) naming the first part at fault."""
    taken: list[Message] = []
    media: list[MediaPart] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            place = f"messages[{number}].content"
            found = [reader(part, f"{place}[{index}]") for index, part in enumerate(content)]
            media += [part for part in found if part is not None]
            message = {**message, "content": [new or part for new, part in zip(found, content, strict=True)]}
        taken.append(message)
    return Parts(tuple(taken), tuple(media))


def chat_part(part: dict[str, Any], place: str) -> MediaPart | None:
    """Of a chat completion."""
    kind = _kind(part, place, ("text", "image_url", "video_url"))
    if kind == "text":
        return _text(part, place)
    _only(part, {kind}, place)
    place, holder = f"{place}.{kind}", part.get(kind)
    if not isinstance(holder, dict):
        raise _wrong(place, "must be an object with a url", holder)
    _only(holder, {"url", "detail"} if kind == "image_url" else {"url"}, place)
    _check_detail(holder, place)
    return _of_url("image" if kind == "image_url" else "video", holder.get("url"), f"{place}.url")


def kept_or_chat_part(part: dict[str, Any], place: str) -> MediaPart | None:
    """Of a chat completion, or of what a session keeps of its messages."""
    sha256 = part.get("sha256")
    if part.get("type") in ("image", "video") and isinstance(sha256, str):
        return MediaPart(part["type"], Kept(sha256), place)
    return chat_part(part, place)


def responses_part(part: dict[str, Any], place: str) -> MediaPart | None:
    """Of a Responses request's input."""
    if _kind(part, place, ("input_text", "output_text", "input_image")) != "input_image":
        return _text(part, place)
    _only(part, {"image_url", "detail"}, place)
    _check_detail(part, place)
    return _of_url("image", part.get("image_url"), f"{place}.image_url")


def anthropic_part(part: dict[str, Any], place: str) -> MediaPart | None:
    """Of an Anthropic message: text and images."""
    if _kind(part, place, ("text", "image")) == "text":
        return _text(part, place)
    _only(part, {"source"}, place)
    place, source = f"{place}.source", part.get("source")
    if not isinstance(source, dict):
        raise _wrong(place, "must be an object with a type", source)
    if _kind(source, place, ("base64", "url")) == "url":
        _only(source, {"url"}, place)
        part_of_url = _of_url("image", source.get("url"), f"{place}.url")
        if isinstance(part_of_url.source, Inline):
            raise _wrong(f"{place}.url", "must be an http(s) URL; bytes belong in a source of type base64", "data:")
        return part_of_url
    _only(source, {"media_type", "data"}, place)
    declared, data = source.get("media_type"), source.get("data")
    if not isinstance(declared, str):
        raise _wrong(f"{place}.media_type", "must be a media type, as in image/png", declared)
    if not isinstance(data, str):
        raise _wrong(f"{place}.data", "must be bytes in base64", data)
    return MediaPart("image", Inline(declared, data), f"{place}.data")


def checked(reader: PartReader, part: Any) -> Any:
    """The part, if the reader takes it: for models of a request's body, which know its place. Raises ValueError."""
    if isinstance(part, dict):
        try:
            reader(part, "")
        except RequestError as error:
            raise ValueError(error.refused.message.removeprefix(".")) from None
    return part


def _kind(part: dict[str, Any], place: str, known: tuple[str, ...]) -> str:
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in known:
        raise _wrong(f"{place}.type", f"must be one of {', '.join(known)}", kind)
    return kind


def _text(part: dict[str, Any], place: str) -> None:
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{place}.text", "must be a string", part.get("text"))


def _only(fields: dict[str, Any], known: set[str], place: str) -> None:
    for name, value in fields.items():
        if name not in known | _HINTS and value is not None:
            raise _wrong(f"{place}.{name}", "is not supported", value)


def _check_detail(fields: dict[str, Any], place: str) -> None:
    detail = fields.get("detail")
    if detail is not None and detail not in DETAILS:
        raise _wrong(f"{place}.detail", f"must be one of {', '.join(DETAILS)}", detail)


def _of_url(kind: MediaKind, url: Any, place: str) -> MediaPart:
    if not isinstance(url, str):
        raise _wrong(place, "must be a data URL or an http(s) URL", url)
    scheme, _, rest = url.partition(":")
    if scheme.lower() == "data":
        return MediaPart(kind, _data_url(rest, place), place)
    if scheme.lower() in ("http", "https"):
        return MediaPart(kind, Link(url), place)
    raise _wrong(place, "must be a data URL or an http(s) URL", url)


def _data_url(rest: str, place: str) -> Inline:
    header, comma, data = rest.partition(",")
    media_type, *parameters = header.split(";")
    if not comma or not parameters or parameters[-1].strip().lower() != "base64":
        raise _wrong(place, "must have its bytes in base64, as in data:image/png;base64,iVBO...", f"data:{header}")
    return Inline(media_type.strip(), data)


def _wrong(place: str, must: str, value: Any) -> RequestError:
    return invalid(f"{place}: {must}, got {shown(value)}", place)
