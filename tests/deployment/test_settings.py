"""Settings: the demo needs none, and a wrong one is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deployment.media_limits import MediaLimits
from deployment.settings import AppArgs
from model import DEMO


def test_default_is_the_demo_model_with_its_dflash2_drafter():
    args = AppArgs()
    assert (args.model, args.draft, args.model_id) == (DEMO / "target", DEMO / "dflash2", "demo")


def test_a_model_has_as_many_names_as_it_is_given():
    assert AppArgs().model_ids == ("demo",)
    assert AppArgs(model_name="a", model_aliases="b, c").model_ids == ("a", "b", "c")  # pyright: ignore
    assert AppArgs(model_aliases=("gpt-4o", "demo")).model_ids == ("demo", "gpt-4o")


def test_demo_model_brings_the_drafter_of_the_backend():
    assert AppArgs(backend="dflash").draft == DEMO / "dflash"
    assert AppArgs(backend="none").draft is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"backend": "none", "draft": DEMO / "dflash"}, "draft"),
        ({"backend": "none", "draft_tokens": 3}, "draft_tokens"),
        ({"model": DEMO}, "draft"),
        ({"model": Path("/nowhere/at-all")}, "/nowhere/at-all"),
        ({"draft_tokens": 16}, "draft_tokens"),
        ({"replicas": 0}, "replicas"),
        ({"model_aliases": ["a", " "]}, "model_aliases"),
        ({"colour": "red"}, "colour"),
        ({"media_hosts": "a.org,https://b.org"}, "media_hosts\n.*'https://b.org' is no host"),
        ({"media_hosts": ["*"]}, "media_hosts"),
        ({"media_pixels": 0}, "media_pixels"),
    ],
)
def test_wrong_setting_is_named(change: dict[str, Any], named: str):
    with pytest.raises(ValidationError, match=named):
        AppArgs(**change)


def test_gpu_replicas_ask_for_a_gpu_and_cpu_replicas_share_cores():
    assert AppArgs(device="cuda").ray_actor_options["num_gpus"] == 1
    assert AppArgs().ray_actor_options == {"num_cpus": 0.1}


def test_images_and_checks_are_the_engines_matter_and_a_negative_least_is_refused_by_both():
    options = AppArgs(image_min_tokens=512, check_invariants=True).engine_options()
    assert (options.image_min_tokens, options.check_invariants) == (512, True)
    with pytest.raises(ValueError, match="image_min_tokens"):
        AppArgs(image_min_tokens=-1)
    with pytest.raises(ValueError, match="image_min_tokens is -1"):
        replace(options, image_min_tokens=-1)
    with pytest.raises(ValueError, match="images is -1, must not be negative"):
        replace(options, images=-1)


def test_whatever_an_engine_can_be_told_under_a_name_it_is_told_by_the_application():
    """A setting that the application takes and forgets to pass on would be a silent default."""
    given: dict[str, Any] = {
        "lanes": 3, "images": 5, "pages": 700, "media_cache_bytes": 9, "queue_turns": 11, "staged_bytes": 13,
        "max_stall_ms": 17.0, "queue_seconds": 19.0, "tenant_lanes": 2, "preempt_seconds": 23.0, "durable_bytes": 29,
    }  # fmt: skip
    options = AppArgs(**given).engine_options()
    assert {name: getattr(options, name) for name in given} == given


def test_media_have_limits_and_hosts_are_a_list_or_text():
    assert AppArgs().media_limits == MediaLimits()
    for hosts in ("a.org, *.b.org:8443", ["a.org", "*.b.org:8443"]):
        limits = AppArgs(media_hosts=hosts, media_bytes=5, media_seconds=2).media_limits  # pyright: ignore[reportArgumentType]
        assert limits == MediaLimits(item_bytes=5, seconds=2, hosts=("a.org", "*.b.org:8443"))
