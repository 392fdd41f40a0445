"""How large are an engine's pools? Arithmetic alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from deployment.engine.histories import Histories
from deployment.engine.options import EngineOptions
from deployment.engine.pools import Later, PoolSizes, pool_sizes
from model.errors import ModelError
from tests.engine.driving import TARGET, Driver
from tests.engine.hashing import GEOMETRY

IMAGE, PAGE = GEOMETRY.image_bytes, GEOMETRY.target_page_bytes + GEOMETRY.draft_page_bytes

NOTHING = Later()


def made(**more: Any) -> EngineOptions:
    return EngineOptions(model=TARGET, **{"lanes": 4, "images": 6, **more})


def sizes(free: int | None, context: int = 640, later: Later = NOTHING, **more: Any) -> PoolSizes:
    return pool_sizes(made(**more), GEOMETRY, context, free, later)


def test_without_a_bound_there_are_pages_for_all_lanes_and_half_as_many_for_checkpoints():
    assert (sizes(None).images, sizes(None).pages) == (10, 10 * 6)
    assert sizes(None, lanes=1).pages == 10 * 2
    assert sizes(None, pages=7).pages == 7


def test_a_device_gives_nine_tenths_of_what_is_free_and_images_come_first():
    """Free memory for 10 images and exactly 20 pages, then one byte less."""
    enough = (10 * IMAGE + 20 * PAGE) * 10 // 9 + 1
    assert sizes(enough).pages == 20 and sizes(enough - 2).pages == 19
    assert sizes(enough * 100).pages == 60
    assert sizes(enough).image_bytes + sizes(enough).target_bytes + sizes(enough).draft_bytes <= enough * 9 / 10


def test_what_is_allocated_later_is_left_free_and_named_where_it_leaves_too_little():
    enough = (10 * IMAGE + 20 * PAGE) * 10 // 9 + 1
    later = Later.of(made(media_cache_bytes=5000), vocabulary=1000, sees=True)
    histories = Histories(4, 1000, torch.device("cpu"))
    histories.follow([])
    planes = (histories.bias, histories.in_prompt, histories.counts)
    assert later == Later(5000, sum(plane.nbytes for plane in planes))
    assert Later.of(made(media_cache_bytes=5000), vocabulary=1000, sees=False) == Later(0, later.penalties)
    assert sizes(enough + later.media + later.penalties, later=later).pages == 20
    with pytest.raises(ModelError, match=rf"beside 5000 .* \(media_cache_bytes\) and {later.penalties} for penalties"):
        sizes(enough, later=later, pages=20)
    with pytest.raises(ModelError, match="0 bytes can be used"):
        sizes(100, later=later)


@pytest.mark.parametrize("pages, free", [(None, 10 * IMAGE), (20, 10 * IMAGE + 20 * PAGE)])
def test_what_does_not_fit_is_refused_with_all_numbers(pages, free):
    with pytest.raises(ModelError, match=f"10 images of {IMAGE} bytes and {pages or 1} pages of {PAGE} bytes"):
        sizes(free, pages=pages)


def test_an_engine_says_at_its_start_how_large_its_pools_are(caplog):
    caplog.set_level(logging.INFO, "deployment.engine.pools")
    Driver("dflash2", lanes=2, images=3, pages=64, context=1024)
    (line,) = caplog.messages
    assert line.startswith(
        "state pools on cpu: 5 images (3.9 MiB), 64 target pages (4.0 MiB) and draft pages (0.0 MiB)"
    )
    assert line.endswith("the pages hold 4.0 sequences of 1024 tokens")
