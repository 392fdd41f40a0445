"""Memory that processes share becomes pinned memory of a card, and where there is none, nothing happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from state.arena import Arena
from state.arena_view import ArenaView
from state.errors import StateError
from state.pinned_memory import pin
from tests.state.arenas import APPLICATION, KEY, NODE, open_small, order, shared_directory


@pytest.fixture
def directory() -> Iterator[Path]:
    with shared_directory() as path:
        yield path


@pytest.fixture
def arena(directory: Path) -> Iterator[Arena]:
    opened = open_small(directory, 1 << 20)
    yield opened
    opened.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_nothing_is_pinned(arena: Arena, directory: Path) -> None:
    view = ArenaView(APPLICATION, NODE, arena.incarnation, writable=True, directory=directory)
    assert pin(view.memory) is None
    view.close()


def test_memory_that_is_mapped_read_only_is_refused(arena: Arena, directory: Path) -> None:
    view = ArenaView(APPLICATION, NODE, arena.incarnation, directory=directory)
    with pytest.raises(StateError, match="mapped read-only, must be writable"):
        pin(view.memory)
    view.close()


@pytest.mark.gpu
def test_a_document_goes_from_the_card_into_the_arena_as_into_a_pinned_buffer(arena: Arena, directory: Path) -> None:
    view = ArenaView(APPLICATION, NODE, arena.incarnation, writable=True, directory=directory)
    pinned = pin(view.memory)
    assert pinned is not None
    content = torch.arange(200_000, device="cuda").to(torch.uint8)
    reservation = arena.reserve("engine", KEY, order(1), (), len(content))
    buffer = torch.frombuffer(view.write(reservation), dtype=torch.uint8)
    assert buffer.is_pinned()
    buffer.copy_(content, non_blocking=True)
    torch.cuda.synchronize()
    stored = arena.ready(reservation)
    assert arena.document(stored) == content.cpu().numpy().tobytes()
    pinned.release()
    view.close()
