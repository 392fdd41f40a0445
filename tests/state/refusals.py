"""One good blob, and the expectation that another is refused and leaves nothing behind."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from state.codec import decode_checkpoint, encode_checkpoint
from state.errors import FormatError, StateError
from state.geometry import StateGeometry
from tests.state.blobs import Parts, take_apart
from tests.state.samples import FINGERPRINT, MIXED, PUBLIC_ROWS, checkpoint_at, everything_free, memory_of

FRONTIER = 70


@cache
def good_blob() -> bytes:
    memory = memory_of(MIXED)
    return encode_checkpoint(memory, checkpoint_at(memory, FRONTIER), FINGERPRINT, {"session": "s"})


def good_parts() -> Parts:
    return take_apart(good_blob())


def refused(
    blob: bytes | bytearray, kind: type[StateError] = FormatError, geometry: StateGeometry = MIXED, **here: Any
) -> Any:
    """Decodes, expects `kind`, and checks that the memory is as empty as before. Returns the error."""
    memory = memory_of(geometry)
    with pytest.raises(StateError) as error:
        decode_checkpoint(memory, blob, here.get("fingerprint", FINGERPRINT), here.get("public_rows", PUBLIC_ROWS))
    assert type(error.value) is kind, error.value
    assert everything_free(memory) and memory.checkpoints == ()
    memory.check_invariants()
    return error.value
