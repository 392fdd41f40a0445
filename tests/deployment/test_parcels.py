"""Segments in parts: what comes together again is what was cut, in whatever order and how often its parts come."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployment.engine.commands import SegmentBytes
from deployment.parcels import Assembly, Parcel, Piece, parcels
from state.errors import StateError


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.integers(1, 40), st.randoms(use_true_random=False))
def test_segments_come_together_from_parts_in_any_order_and_twice(
    contents: list[bytes], most: int, chance: random.Random
):
    segments = [SegmentBytes(bytes([number]), data) for number, data in enumerate(contents)]
    sent = list(parcels(segments, most))
    assert all(0 < len(parcel.data) <= most for parcel in sent)
    assert sum(len(parcel.data) for parcel in sent) == sum(map(len, contents))
    again = [parcel for parcel in sent if chance.random() < 0.5]
    chance.shuffle(sent)
    assembly = Assembly()
    came: dict[bytes, bytes] = {}
    for parcel in again + sent:
        came |= {segment.sha256: segment.data for segment in assembly.add(parcel)}
    assert came == {segment.sha256: segment.data for segment in segments}


@pytest.mark.parametrize(
    ("pieces", "data", "problem"),
    [
        ((Piece(b"n", 4, 0, 2),), b"abc", "a parcel has 3 bytes, its pieces have 2"),
        ((Piece(b"n", 4, 3, 2),), b"ab", "2 bytes at 3, its segment has 4"),
        ((Piece(b"n", 4, -1, 2),), b"ab", "2 bytes at -1"),
        ((Piece(b"known", 5, 0, 2),), b"ab", "size is 5, was 4 before"),
    ],
)
def test_a_parcel_that_contradicts_itself_or_an_earlier_one_is_refused(
    pieces: tuple[Piece, ...], data: bytes, problem: str
):
    assembly = Assembly()
    assembly.add(Parcel((Piece(b"known", 4, 0, 1),), np.frombuffer(b"x", np.uint8)))
    with pytest.raises(StateError, match=problem):
        assembly.add(Parcel(pieces, np.frombuffer(data, np.uint8)))
