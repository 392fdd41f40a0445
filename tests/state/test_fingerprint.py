"""State is loaded only where everything it depends on is the same."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from state.errors import FingerprintMismatch
from state.fingerprint import Matter, compare, make_fingerprint, require_equal
from state.geometry import StateGeometry
from tests.state.samples import FP32

NAMES = {
    "config": "k",
    "draft_config": "l",
    "weights": "w",
    "drafter": "d",
    "tokenizer": "t",
    "template": "c",
    "backend": "dflash",
    "numeric_path": "torch 2.13 cpu",
}


def test_equal_fingerprints_pass_whatever_their_order() -> None:
    whole = make_fingerprint(FP32, **NAMES)
    require_equal(dict(reversed(whole.items())), whole)
    assert compare(dict(reversed(whole.items())), whole) is None


@pytest.mark.parametrize("name", NAMES)
def test_each_named_fact_counts(name: str) -> None:
    with pytest.raises(FingerprintMismatch) as refused:
        require_equal(make_fingerprint(FP32, **NAMES | {name: "other"}), make_fingerprint(FP32, **NAMES))
    assert (refused.value.field, refused.value.stored) == (name, "other")


@pytest.mark.parametrize("field", [field.name for field in fields(StateGeometry)])
def test_each_size_and_dtype_of_the_geometry_counts(field: str) -> None:
    value = getattr(FP32, field)
    changed = torch.bfloat16 if isinstance(value, torch.dtype) else value + 1
    other = make_fingerprint(replace(FP32, **{field: changed}), **NAMES)
    with pytest.raises(FingerprintMismatch) as refused:
        require_equal(other, make_fingerprint(FP32, **NAMES))
    assert refused.value.field == f"geometry.{field}"


def test_the_page_size_is_part_of_the_geometry() -> None:
    assert make_fingerprint(FP32, **NAMES)["geometry.page_tokens"] == 64


def test_the_tokenizer_is_reported_before_what_follows_from_it() -> None:
    other = make_fingerprint(replace(FP32, kv_layers=9), **NAMES | {"tokenizer": "x", "weights": "y"})
    with pytest.raises(FingerprintMismatch, match=r"^fingerprint field tokenizer is 'x' in the stored state, but 't'"):
        require_equal(other, make_fingerprint(FP32, **NAMES))


def test_text_and_number_are_not_the_same_fact() -> None:
    with pytest.raises(FingerprintMismatch):
        require_equal({"window": "256"}, {"window": 256})
    with pytest.raises(FingerprintMismatch):
        require_equal({"window": True}, {"window": 1})
    with pytest.raises(FingerprintMismatch, match="is absent in the stored state"):
        require_equal({}, {"window": 256})


@pytest.mark.parametrize(
    ("matter", "names", "geometry"),
    [
        ("text", ("tokenizer", "template"), ()),
        ("weights", ("weights", "config"), ("kv_layers", "gdn_heads", "hidden_size", "conv_channels")),
        (
            "form",
            ("drafter", "draft_config", "backend"),
            ("window", "ring_layers", "full_layers", "kv_dtype", "ring_key_dtype", "ring_value_dtype", "hidden_dtype"),
        ),
        ("numeric", ("numeric_path",), ()),
    ],
)
def test_a_difference_says_what_it_means_for_the_session(
    matter: Matter, names: tuple[str, ...], geometry: tuple[str, ...]
) -> None:
    here = make_fingerprint(FP32, **NAMES)
    for name in names:
        mismatch = compare(make_fingerprint(FP32, **NAMES | {name: "other"}), here)
        assert mismatch is not None and (mismatch.field, mismatch.matter) == (name, matter)
    for field in geometry:
        value = getattr(FP32, field)
        changed = torch.bfloat16 if isinstance(value, torch.dtype) else value + 1
        mismatch = compare(make_fingerprint(replace(FP32, **{field: changed}), **NAMES), here)
        assert mismatch is not None and (mismatch.field, mismatch.matter) == (f"geometry.{field}", matter)


def test_of_several_differences_the_gravest_counts() -> None:
    here = make_fingerprint(FP32, **NAMES)
    for changed, field in (
        ({"numeric_path": "x", "backend": "y"}, "backend"),
        ({"numeric_path": "x", "backend": "y", "weights": "z"}, "weights"),
        ({"weights": "z", "template": "t2"}, "template"),
    ):
        mismatch = compare(make_fingerprint(FP32, **NAMES | changed), here)
        assert mismatch is not None and mismatch.field == field
    larger = make_fingerprint(replace(FP32, kv_layers=9), **NAMES | {"drafter": "y"})
    mismatch = compare(larger, here)
    assert mismatch is not None and mismatch.field == "geometry.kv_layers"


def test_a_page_size_that_differs_is_a_difference_of_form_and_an_unknown_fact_one_of_weights() -> None:
    here = make_fingerprint(FP32, **NAMES)
    for field, matter in (("geometry.page_tokens", "form"), ("something.new", "weights")):
        mismatch = compare({**here, field: 7}, here)
        assert mismatch is not None and (mismatch.field, mismatch.matter) == (field, matter)
