"""Do these media stand where a row of tokens has placeholders for them, and as this model's tower sees them?"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import get_args

from deployment.engine import errors
from deployment.engine.commands import Submit
from deployment.engine.errors import EngineError
from deployment.engine.loading import Vision
from state.media import Media, MediaKind, Placed, frames


def check_media(submit: Submit, vision: Vision | None) -> None:
    """Raises EngineError for a turn whose media do not fit its prompt or this model."""
    problem = misplaced(submit.prompt_ids, submit.media, vision) or _not_whole(submit)
    if problem is not None:
        raise EngineError(errors.INVALID_REQUEST, f"media{problem}", "media")


def misplaced(tokens: Sequence[int], placed: Placed, vision: Vision | None) -> str | None:
    """What is wrong, behind the name of the field that holds `placed`; None if nothing is."""
    if not placed:
        return None
    if vision is None:
        return f" holds {len(placed)} items, but the model has no vision tower"
    for number, one in enumerate(placed):
        problem = _unlike(one.media, vision)
        if problem is not None:
            return f"[{number}]{problem}"
        if not 1 <= len(one.starts) <= one.media.frames:
            return f"[{number}].starts has {len(one.starts)} entries, must have 1 to {one.media.frames}"
    config = vision.tower.config
    free = 0
    for frame in frames(placed):
        kind = placed[frame.item].media.kind
        token = config.image_token_id if kind == "image" else config.video_token_id
        if frame.start < free:
            return f"[{frame.item}].starts has {frame.start}, must be {free} or later"
        stop = min(frame.stop, len(tokens))
        wrong = next((at for at in range(frame.start, stop) if tokens[at] != token), None)
        if wrong is not None or frame.start >= len(tokens):
            at = frame.start if wrong is None else wrong
            found = f"id {tokens[at]}" if at < len(tokens) else "the end"
            return f"[{frame.item}] stands at {frame.start}, but token {at} is {found}, must be the {kind}'s {token}"
        free = frame.stop
    return None


def _unlike(media: Media, vision: Vision) -> str | None:
    """What the tower could not have been shown."""
    count, channels, height, width = media.shape
    if media.kind not in get_args(MediaKind):
        return f".kind is {media.kind!r}, must be {' or '.join(get_args(MediaKind))}"
    factor, group = vision.rules.factor, vision.rules.temporal_patch
    sides = (media.rows * factor, media.columns * factor)
    if min(sides) < 1 or channels != 3 or (height, width) != sides:
        return f".shape is {list(media.shape)}, must be [n, 3, {sides[0]}, {sides[1]}] for its grid"
    shown = 1 if media.kind == "image" else media.frames * group
    if not shown - group < count <= shown or (media.kind == "image") != (not media.times):
        return f" has {count} frames of pixels, which is no {media.kind} of {len(media.times)} times"
    return None


def _not_whole(submit: Submit) -> str | None:
    """An answer cannot begin inside an item, and a tower needs all of its pixels."""
    for number, one in enumerate(submit.media):
        found, wanted = len(one.media.pixels), prod(one.media.shape)
        if found != wanted:
            return f"[{number}].pixels has {found} bytes, must have {wanted} for its shape"
        if len(one.starts) < one.media.frames:
            return f"[{number}].starts has {len(one.starts)} entries, must have {one.media.frames}"
        stop = one.starts[-1] + one.media.rows * one.media.columns
        if stop > len(submit.prompt_ids):
            return f"[{number}] ends at {stop}, but the prompt at {len(submit.prompt_ids)}"
    return None
