"""A log record's bytes: what goes in comes out, and nothing else is taken for a record."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import pytest

from deployment.engine.commands import TokenLogprob
from deployment.ownership.log import (
    Deleted,
    HeadMoved,
    Record,
    Round,
    Sealed,
    SetNamed,
    TurnBegan,
    TurnEnded,
)
from deployment.ownership.log_format import VERSION, check, decode, encode
from deployment.ownership.words import Epoch, Member, Order
from state.errors import FormatError
from state.media import Media, PlacedMedia

ORDER = Order(Epoch(1_790_000_000, 4), 17)
PLACED = (
    PlacedMedia(Media("image", "a" * 64, (1, 3, 4, 8), 1, 2, (), bytes(96)), (1,)),
    PlacedMedia(Media("video", "b" * 64, (2, 3, 4, 4), 1, 1, (0.5, 1.5), b""), (1, 2)),
)
NOWHERE = replace(PLACED[0], starts=())
SHORT = replace(PLACED[0], media=replace(PLACED[0].media, pixels=b"x"))
RECORDS: list[Record] = [
    Sealed(ORDER, anew=True),
    SetNamed(ORDER, (Member("node", "0" * 32), Member("n2", "f" * 32)), "replica"),
    SetNamed(ORDER, (Member("node", "0" * 32),), "replica", alone=True),
    TurnBegan(ORDER, "t", {"messages": [{"role": "user", "content": "é"}]}, b"1" * 32, 2**64 - 1, "k", (0, 5), 2, 1.5),
    TurnBegan(ORDER, "t", {}, b"1" * 32, 0, None, (), 0, 1.5),
    TurnBegan(ORDER, "t", {}, b"1" * 32, 0, None, (1, 9, 9, 2), 0, 1.5, PLACED),
    Round(ORDER, "t", 3, 40, (248_076, 0), 1, None),
    Round(ORDER, "t", 0, 40, (7,), 0, 0, (TokenLogprob(7, -0.25, ((7, -0.25), (9, -1.75))),)),
    TurnEnded(ORDER, "t", 0, "stop", 3, 248_046, None, 0, 2.5),
    TurnEnded(ORDER, "t", 1, "stop", 3, None, "END", 2, 2.5),
    HeadMoved(ORDER, None, 0),
    HeadMoved(ORDER, "t", 12),
    Deleted(ORDER, 1.0),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_record_is_whole_again(record: Record):
    assert decode(encode(record)) == record
    head = check(encode(record))
    assert head.order == ORDER and head.kind is type(record)
    assert head.numbered == (not isinstance(record, Sealed | SetNamed))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_no_byte_may_change_and_none_may_lack(record: Record):
    data = encode(record)
    for place in range(len(data)):
        with pytest.raises(FormatError):
            check(data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        with pytest.raises(FormatError):
            check(data[:place])


def with_crc(data: bytes) -> bytes:
    return data + struct.pack(">I", zlib.crc32(data))


def test_record_of_another_version_or_kind_is_refused_by_name():
    data = encode(RECORDS[0])[:-4]
    with pytest.raises(FormatError, match=f"version is {VERSION + 1}, must be {VERSION}"):
        decode(with_crc(bytes([VERSION + 1]) + data[1:]))
    with pytest.raises(FormatError, match="kind is 200, must be below 7"):
        decode(with_crc(data[:1] + bytes([200]) + data[2:]))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Round(ORDER, "", 0, 0, (1,), 0, None), "turn"),
        (Round(ORDER, "t", 0, 0, (1,), -1, None), "held_back"),
        (TurnBegan(ORDER, "t", {}, b"short", 0, None, (), 0, 1.0), "request_sha256"),
        (TurnBegan(ORDER, "t", {}, bytes(32), 0, None, (), 0, 1.0, (NOWHERE,)), "starts"),
        (TurnBegan(ORDER, "t", {}, bytes(32), 0, None, (), 0, 1.0, (SHORT,)), "pixels"),
        (TurnEnded(ORDER, "t", 0, "tired", 0, None, None, 0, 1.0), "finish_reason"),  # pyright: ignore
        (SetNamed(ORDER, (Member("n", "not hex"),), "r"), "incarnation"),
    ],
)
def test_field_that_cannot_be_is_named(wrong: Record, said: str):
    with pytest.raises(FormatError, match=said):
        decode(encode(wrong))


def test_token_ids_and_orders_beyond_their_width_are_refused():
    with pytest.raises(FormatError, match="token ids"):
        encode(Round(ORDER, "t", 0, 0, (-1,), 0, None))
    with pytest.raises(FormatError, match="order is"):
        encode(Deleted(Order(Epoch(1, 2), -1), 1.0))
