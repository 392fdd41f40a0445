"""One good document, and the expectation that another is refused and leaves nothing behind."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from state.checkpoint import Checkpoint
from state.codec import encode_session
from state.document import SessionDocument, open_document
from state.errors import FormatError, StateError
from state.fingerprint import Fingerprint, require_equal
from state.geometry import StateGeometry
from state.memory import StateMemory
from tests.state.blobs import Parts, take_apart
from tests.state.samples import (
    FINGERPRINT,
    MIXED,
    PUBLIC_ROWS,
    checkpoint_at,
    everything_free,
    memory_of,
    record_of,
)

FRONTIER = 70


@cache
def good_blob() -> bytes:
    memory = memory_of(MIXED)
    checkpoint = checkpoint_at(memory, FRONTIER)
    return encode_session(memory, [checkpoint], record_of(checkpoint.ledger), FINGERPRINT)


def good_parts() -> Parts:
    return take_apart(good_blob())


def brought_in(
    memory: StateMemory,
    blob: bytes | bytearray | memoryview,
    fingerprint: Fingerprint = FINGERPRINT,
    public_rows: int = PUBLIC_ROWS,
    **how: Any,
) -> tuple[SessionDocument, list[Checkpoint]]:
    """All phases, in the order of FORMAT.md."""
    document = open_document(blob, **how)
    require_equal(document.manifest.fingerprint, fingerprint)
    document.check_tokens(public_rows)
    document.check_fit(memory.geometry)
    document.check_payload()
    loaded: list[Checkpoint] = []
    try:
        for entry in document.manifest.checkpoints:
            loaded.append(document.load(memory, entry))
    except BaseException:
        for checkpoint in loaded:
            memory.release(checkpoint)
        raise
    return document, loaded


def refused(
    blob: bytes | bytearray, kind: type[StateError] = FormatError, geometry: StateGeometry = MIXED, **here: Any
) -> Any:
    """Brings a document in, expects `kind`, and checks that the memory is as empty as before. Returns the error."""
    memory = memory_of(geometry)
    with pytest.raises(StateError) as error:
        brought_in(memory, blob, **here)
    assert type(error.value) is kind, error.value
    assert everything_free(memory) and memory.checkpoints == ()
    memory.check_invariants()
    return error.value
