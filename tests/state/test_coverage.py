"""A state is usable only if every plane covers exactly its frontier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from state.coverage import FORMS, Form, check_coverage, full_coverage
from state.errors import CoverageError
from state.geometry import StateGeometry
from tests.state.samples import FP32, FULL_ONLY, GEOMETRIES, LOCAL_ONLY, NO_DRAFTER, WINDOW

FRONTIERS = (1, 2, 63, 64, 65, WINDOW - 1, WINDOW, WINDOW + 1, 1000)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
@pytest.mark.parametrize("form", FORMS)
def test_full_coverage_is_accepted_at_every_frontier(geometry: StateGeometry, form: Form) -> None:
    for frontier in FRONTIERS:
        check_coverage(full_coverage(geometry, form, frontier), geometry)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("frontier", FRONTIERS)
@pytest.mark.parametrize("plane", ["ledger_tokens", "target_kv", "gdn", "conv", "hidden", "draft_kv"])
@pytest.mark.parametrize("off", [-1, 1])
def test_a_plane_one_token_off_is_refused_by_name(form: Form, frontier: int, plane: str, off: int) -> None:
    whole = full_coverage(FP32, form, frontier)
    changes: dict[str, Any] = {plane: getattr(whole, plane) + off}
    with pytest.raises(CoverageError) as refused:
        check_coverage(replace(whole, **changes), FP32)
    assert refused.value.plane == plane
    assert (refused.value.has, refused.value.needs) == (getattr(whole, plane) + off, getattr(whole, plane))


@pytest.mark.parametrize("frontier", FRONTIERS)
@pytest.mark.parametrize("off", [(-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (1, 1)])
def test_a_ring_interval_one_position_off_is_refused(frontier: int, off: tuple[int, int]) -> None:
    whole = full_coverage(FP32, "decode", frontier)
    assert whole.ring is not None
    start, end = whole.ring
    with pytest.raises(CoverageError) as refused:
        check_coverage(replace(whole, ring=(start + off[0], end + off[1])), FP32)
    assert refused.value.plane == "ring"


def test_the_live_interval_of_a_ring_is_the_last_window() -> None:
    assert full_coverage(FP32, "prompt", WINDOW - 1).ring == (0, WINDOW - 1)
    assert full_coverage(FP32, "prompt", WINDOW).ring == (0, WINDOW)
    assert full_coverage(FP32, "prompt", WINDOW + 1).ring == (1, WINDOW + 1)


def test_a_ledger_of_one_form_is_refused_as_the_other() -> None:
    pairs: list[tuple[Form, Form]] = [("decode", "prompt"), ("prompt", "decode")]
    for form, other in pairs:
        with pytest.raises(CoverageError, match="ledger_tokens"):
            check_coverage(replace(full_coverage(FP32, form, 40), form=other), FP32)


def test_an_unknown_form_and_an_empty_state_are_refused() -> None:
    with pytest.raises(CoverageError, match="form"):
        check_coverage(replace(full_coverage(FP32, "decode", 4), form="both"), FP32)  # type: ignore[arg-type]
    with pytest.raises(CoverageError, match="frontier"):
        check_coverage(full_coverage(FP32, "decode", 0), FP32)


@pytest.mark.parametrize(
    ("made_by", "read_by", "plane"),
    [
        (FP32, LOCAL_ONLY, "draft_kv"),
        (FP32, FULL_ONLY, "ring"),
        (LOCAL_ONLY, NO_DRAFTER, "ring"),
        (NO_DRAFTER, LOCAL_ONLY, "ring"),
        (NO_DRAFTER, FULL_ONLY, "draft_kv"),
    ],
)
def test_planes_of_another_drafter_are_refused(made_by: StateGeometry, read_by: StateGeometry, plane: str) -> None:
    with pytest.raises(CoverageError) as refused:
        check_coverage(full_coverage(made_by, "decode", 40), read_by)
    assert refused.value.plane == plane


def test_the_sentence_names_plane_and_both_facts() -> None:
    with pytest.raises(CoverageError, match=r"^coverage of gdn is 39, but the frontier needs 40$"):
        check_coverage(replace(full_coverage(FP32, "decode", 40), gdn=39), FP32)
