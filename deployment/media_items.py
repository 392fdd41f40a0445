"""From the files of a request to what the model's tower sees, at the replica, where the model's rules are known.

Two files are decoded at a time, beside the event loop. What a file became is kept for a while: a conversation sends its
images again with every turn.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from deployment.engine.errors import CONTEXT_LENGTH_EXCEEDED
from deployment.errors import RequestError, invalid_media
from deployment.media import Deadline, EndsEarly, Video, decode_image, open_video
from deployment.media_limits import MediaLimits
from deployment.media_queue import MediaQueue
from deployment.wire import KeptMedia, MediaSource
from model.errors import MediaError
from model.media import MediaItem, image_item, video_item
from model.media_rules import MediaRules
from state.media import Media

DECODERS = 2
"""Each takes memory for one item as it was sent, `MediaLimits.pixels` at most."""

KEPT_BYTES = 256 << 20
"""Of resized pixels."""


class MediaItems:
    """`rules`: those of the model; None: it has no tower. `context`: how many tokens a prompt may have."""

    def __init__(self, rules: MediaRules | None, limits: MediaLimits, context: int) -> None:
        self._rules = rules
        self._limits = limits
        self._context = context
        self._queue = MediaQueue(ThreadPoolExecutor(DECODERS, "media"), DECODERS)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], MediaItem] = OrderedDict()
        self._bytes = 0

    async def of(
        self, sources: Sequence[MediaSource | KeptMedia], tenant: str, kept: Mapping[str, Media] | None = None
    ) -> tuple[MediaItem, ...]:
        """In their order. `tenant`: whose they are. `kept`: what the turn's session has, by the sha256 of the files.
        Raises RequestError: 400 naming the content part at fault, or 429 where too many wait."""
        if not sources:
            return ()
        if self._rules is None:
            source = sources[0]
            message = f"{source.place}: is a part of type {source.kind!r}, but the model is one of text alone"
            raise invalid_media(message, source.place)
        size = sum(len(source.data) for source in sources if isinstance(source, MediaSource))
        return await self._queue.run(tenant, size, self._all, sources, self._rules, kept or {})

    def _all(
        self, sources: Sequence[MediaSource | KeptMedia], rules: MediaRules, kept: Mapping[str, Media]
    ) -> tuple[MediaItem, ...]:
        items: list[MediaItem] = []
        tokens = 0
        deadline = Deadline()
        for source in sources:
            try:
                if isinstance(source, KeptMedia):
                    items.append(kept_item(source, kept))
                else:
                    items.append(self._one(source, rules, deadline))
            except MediaError as error:
                raise invalid_media(f"{source.place}: {error}", source.place) from None
            tokens += items[-1].embeddings
            if tokens >= self._context:
                message = f"the media up to here have {tokens} tokens, but the context limit is {self._context} tokens"
                raise RequestError(400, CONTEXT_LENGTH_EXCEEDED, f"{source.place}: {message}", source.place)
        return tuple(items)

    def _one(self, source: MediaSource, rules: MediaRules, deadline: Deadline) -> MediaItem:
        key = (source.kind, source.sha256)
        with self._lock:
            item = self._kept.get(key)
            if item is not None:
                self._kept.move_to_end(key)
                return item
        item = item_of(source, rules, self._limits, deadline)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = item
                self._bytes += item.pixels.nbytes
            while self._bytes > KEPT_BYTES:
                _, gone = self._kept.popitem(last=False)
                self._bytes -= gone.pixels.nbytes
        return item


def kept_item(source: KeptMedia, kept: Mapping[str, Media]) -> MediaItem:
    """Raises MediaError where the session has no such image."""
    media = kept.get(source.sha256)
    if media is None or media.kind != source.kind or not media.pixels:
        raise MediaError(f"shows an {source.kind} that its session does not have any more; send it again")
    # A copy: torch refuses memory that nobody may write.
    pixels = torch.frombuffer(bytearray(media.pixels), dtype=torch.uint8).view(media.shape)
    return MediaItem(media.kind, pixels, media.frames, media.rows, media.columns, media.times, media.digest)


def item_of(source: MediaSource, rules: MediaRules, limits: MediaLimits, deadline: Deadline) -> MediaItem:
    """Raises MediaError. One image is decoded to its end, whatever the time."""
    deadline.check()
    if source.kind == "image":
        return image_item(decode_image(source.data, limits), rules)
    video = open_video(source.data, limits, deadline)
    try:
        return _sampled(video, video.total, rules)
    except EndsEarly as early:  # a container may list packets that show nothing
        return _sampled(video, early.frames, rules)


def _sampled(video: Video, total: int, rules: MediaRules) -> MediaItem:
    indices = rules.sampled_frames(total, video.fps)
    return video_item(video.frames(indices), indices, video.fps, rules)
