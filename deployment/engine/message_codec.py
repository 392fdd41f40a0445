"""Commands and events as bytes, for a pipe between two processes of one version of this program.

msgpack; a dataclass is its class name and its fields in order, and tuples and sets stay what they are. Only the classes
of `commands.py` and `events.py`, and what these hold, have names here: nothing else can come out of the bytes. What
every round brings has no lists: its arrays are tuples, so that ids need no code of ours. The bytes of states lie beside
the others, uncopied: they may have any size, msgpack's have 4 GiB at most. This is no stored format: state that
outlives a process is `state/FORMAT.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgpack

from deployment.engine.commands import (
    Command,
    Foreign,
    Grammar,
    Import,
    Resumed,
    Sampling,
    SegmentBytes,
    ThinkingBudget,
    TokenLogprob,
)
from deployment.engine.counts import Counts, Distribution, Flow
from deployment.engine.events import Event, Exported, Round, Tokens
from deployment.engine.options import EngineOptions
from state.container import Blob
from state.fingerprint import Mismatch
from state.image_pieces import ImagePart, ImagePiece
from state.media import Media, PlacedMedia
from state.names import Epoch, Order, SessionKey
from state.session_record import ForkPoint, SessionRecord, TurnRecord

_TUPLE, _DATACLASS, _PATH, _SET, _LISTLESS, _BESIDE = 1, 2, 3, 4, 5, 6
_HELD = (
    Counts, Distribution, EngineOptions, Epoch, Flow, Foreign, ForkPoint, Grammar, ImagePart, ImagePiece, Media,
    Mismatch, Order, PlacedMedia, Resumed, Sampling, SegmentBytes, SessionKey, SessionRecord, ThinkingBudget,
    TokenLogprob, TurnRecord,
)  # fmt: skip
_CLASSES: dict[str, Any] = {known.__name__: known for known in (*get_args(Command), *get_args(Event), *_HELD)}
_WITHOUT_LISTS = (Round, Tokens)
_FIELDS = {known: tuple(field.name for field in fields(known)) for known in _CLASSES.values()}
_STATE = {Exported: "document", ImagePiece: "data", Import: "document", SegmentBytes: "data"}
"""Fields whose bytes lie beside."""


def encode(message: Any, beside: list[Blob]) -> bytes:
    """Appends to `beside` what belongs to the message and is not among its bytes. Raises TypeError for anything that is
    no plain data and has no name here."""
    # Strict: tuples and dataclasses come to `_default` instead of becoming lists. Texts of clients may hold half a
    # surrogate pair.
    data = msgpack.packb(message, default=partial(_default, beside), strict_types=True, unicode_errors="surrogatepass")
    assert data is not None
    return data


def decode(data: Blob, beside: Sequence[Blob]) -> Any:
    """Raises ValueError for bytes that `encode` did not write."""
    ext_hook = partial(_ext_hook, beside)
    try:
        return msgpack.unpackb(data, ext_hook=ext_hook, strict_map_key=False, unicode_errors="surrogatepass")
    except (msgpack.UnpackException, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"not a message of this program: {error!r}") from None


def _default(beside: list[Blob], value: Any) -> msgpack.ExtType:
    kind = type(value)
    if (names := _FIELDS.get(kind)) is not None:
        named = [kind.__name__, *[getattr(value, name) for name in names]]
        if kind in _STATE:
            place = 1 + names.index(_STATE[kind])
            if not isinstance(named[place], Blob):
                raise TypeError(f"{kind.__name__}.{_STATE[kind]} is a {type(named[place]).__name__}, must be bytes")
            beside.append(named[place])
            named[place] = msgpack.ExtType(_BESIDE, str(len(beside) - 1).encode())
        if isinstance(value, _WITHOUT_LISTS):
            return msgpack.ExtType(_LISTLESS, msgpack.packb(named, default=partial(_default, beside)) or b"")
        return msgpack.ExtType(_DATACLASS, encode(named, beside))
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, encode(list(value), beside))
    if isinstance(value, frozenset):
        return msgpack.ExtType(_SET, encode(list(value), beside))
    if isinstance(value, Path):
        return msgpack.ExtType(_PATH, str(value).encode("utf-8", "surrogateescape"))
    raise TypeError(f"{kind.__name__} has no form on the engine's pipe")


def _ext_hook(beside: Sequence[Blob], code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(decode(data, beside))
    if code == _SET:
        return frozenset(decode(data, beside))
    if code == _LISTLESS:
        name, *values = msgpack.unpackb(data, ext_hook=partial(_ext_hook, beside), use_list=False)
        return _CLASSES[name](*values)
    if code == _DATACLASS:
        name, *values = decode(data, beside)
        return _CLASSES[name](*values)
    if code == _BESIDE:
        return beside[int(data)]
    if code == _PATH:
        return Path(data.decode("utf-8", "surrogateescape"))
    raise ValueError(f"not a message of this program: extension {code}")
