"""Commands and events as bytes, for a pipe between two processes of one version of this program.

msgpack; a dataclass is its class name and its fields in order, and tuples and sets stay what they are. Only the classes
of `commands.py` and `events.py`, and what these hold, have names here: nothing else can come out of the bytes. What
every round brings has no lists: its arrays are tuples, so that ids need no code of ours. This is no stored format:
state that outlives a process is `state/FORMAT.md`.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import msgpack

from deployment.engine.commands import (
    Command,
    Foreign,
    Grammar,
    Resumed,
    Sampling,
    SegmentBytes,
    ThinkingBudget,
    TokenLogprob,
)
from deployment.engine.counts import Counts, Distribution, Flow
from deployment.engine.events import Event, Round, Tokens
from deployment.engine.options import EngineOptions
from state.begun_image import ImagePiece
from state.fingerprint import Mismatch
from state.media import Media, PlacedMedia
from state.names import Epoch, Order, SessionKey
from state.session_record import ForkPoint, SessionRecord, TurnRecord

_TUPLE, _DATACLASS, _PATH, _SET, _LISTLESS = 1, 2, 3, 4, 5
_HELD = (
    Counts, Distribution, EngineOptions, Epoch, Flow, Foreign, ForkPoint, Grammar, ImagePiece, Media, Mismatch, Order,
    PlacedMedia, Resumed, Sampling, SegmentBytes, SessionKey, SessionRecord, ThinkingBudget, TokenLogprob, TurnRecord,
)  # fmt: skip
_CLASSES: dict[str, Any] = {known.__name__: known for known in (*get_args(Command), *get_args(Event), *_HELD)}
_WITHOUT_LISTS = (Round, Tokens)
_FIELDS = {known: tuple(field.name for field in fields(known)) for known in _CLASSES.values()}


def encode(message: Any) -> bytes:
    """Raises TypeError for anything that is no plain data and has no name here."""
    # Strict: tuples and dataclasses come to `_default` instead of becoming lists. Texts of clients may hold half a
    # surrogate pair.
    data = msgpack.packb(message, default=_default, strict_types=True, unicode_errors="surrogatepass")
    assert data is not None
    return data


def decode(data: bytes | memoryview) -> Any:
    """Raises ValueError for bytes that `encode` did not write."""
    try:
        return msgpack.unpackb(data, ext_hook=_ext_hook, strict_map_key=False, unicode_errors="surrogatepass")
    except (msgpack.UnpackException, TypeError, KeyError) as error:
        raise ValueError(f"not a message of this program: {error!r}") from None


def _default(value: Any) -> msgpack.ExtType:
    if (names := _FIELDS.get(type(value))) is not None:
        named = [type(value).__name__, *[getattr(value, name) for name in names]]
        if isinstance(value, _WITHOUT_LISTS):
            return msgpack.ExtType(_LISTLESS, msgpack.packb(named, default=_default) or b"")
        return msgpack.ExtType(_DATACLASS, encode(named))
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, encode(list(value)))
    if isinstance(value, frozenset):
        return msgpack.ExtType(_SET, encode(list(value)))
    if isinstance(value, Path):
        return msgpack.ExtType(_PATH, str(value).encode("utf-8", "surrogateescape"))
    raise TypeError(f"{type(value).__name__} has no form on the engine's pipe")


def _ext_hook(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(decode(data))
    if code == _SET:
        return frozenset(decode(data))
    if code in (_DATACLASS, _LISTLESS):
        name, *values = (
            decode(data) if code == _DATACLASS else msgpack.unpackb(data, ext_hook=_ext_hook, use_list=False)
        )
        return _CLASSES[name](*values)
    if code == _PATH:
        return Path(data.decode("utf-8", "surrogateescape"))
    raise ValueError(f"not a message of this program: extension {code}")
