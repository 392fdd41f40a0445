"""An engine's process that holds a card ends with its parent, and the card is free again. Run with `-m gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from deployment.engine.commands import Submit
from tests.engine.driving import models, options, prompt
from tests.engine.test_process import gone_within, lines_of, parent_of_an_engine

pytestmark = pytest.mark.gpu

PAGES = 32768
OPTIONS = options("dflash2", device="cuda", dtype="bfloat16", lanes=2, images=2, pages=PAGES)
LONG = Submit("long", prompt(0), max_tokens=3500, ignore_eos=True)
SLACK = 64 << 20
"""Bytes that the driver may keep, or give to somebody else's context."""


def free() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("loaded", [False, True], ids=["while it loads", "while it decodes"])
def test_an_engine_ends_with_its_killed_parent_and_the_card_has_its_memory_back(loaded):
    before = free()
    with parent_of_an_engine(__name__) as parent:
        lines = lines_of(parent)
        engine = int(next(lines))
        if loaded:
            assert "Tokens\n" in lines
            pages = PAGES * models("dflash2", dtype=OPTIONS.dtype).geometry.target_page_bytes
            assert free() < before - pages
        else:
            until(lambda: free() < before - SLACK, time.monotonic() + 60)
        killed = time.monotonic()
        parent.kill()
        assert gone_within(1.0, engine)
        until(lambda: free() > before - SLACK, killed + 1.0)


def until(reached: Callable[[], bool], deadline: float) -> None:
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)
