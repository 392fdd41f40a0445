"""How large are an engine's pools? Arithmetic alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from deployment.engine.options import EngineOptions
from deployment.engine.pools import PoolSizes, pool_sizes
from model.errors import ModelError
from tests.engine.driving import TARGET, Driver
from tests.engine.hashing import GEOMETRY

IMAGE, PAGE = GEOMETRY.image_bytes, GEOMETRY.target_page_bytes + GEOMETRY.draft_page_bytes


def sizes(free: int | None, context: int = 640, **options: Any) -> PoolSizes:
    return pool_sizes(EngineOptions(model=TARGET, **{"lanes": 4, "images": 6, **options}), GEOMETRY, context, free)


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
