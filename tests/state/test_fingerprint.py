"""State is loaded only where everything it depends on is the same."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from state.errors import FingerprintMismatch
from state.fingerprint import compare, make_fingerprint
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
    compare(dict(reversed(whole.items())), whole)


@pytest.mark.parametrize("name", NAMES)
def test_each_named_fact_counts(name: str) -> None:
    with pytest.raises(FingerprintMismatch) as refused:
        compare(make_fingerprint(FP32, **NAMES | {name: "other"}), make_fingerprint(FP32, **NAMES))
    assert (refused.value.field, refused.value.stored) == (name, "other")


@pytest.mark.parametrize("field", [field.name for field in fields(StateGeometry)])
def test_each_size_and_dtype_of_the_geometry_counts(field: str) -> None:
    value = getattr(FP32, field)
    changed = torch.bfloat16 if isinstance(value, torch.dtype) else value + 1
    other = make_fingerprint(replace(FP32, **{field: changed}), **NAMES)
    with pytest.raises(FingerprintMismatch) as refused:
        compare(other, make_fingerprint(FP32, **NAMES))
    assert refused.value.field == f"geometry.{field}"


def test_the_page_size_is_part_of_the_geometry() -> None:
    assert make_fingerprint(FP32, **NAMES)["geometry.page_tokens"] == 64


def test_the_tokenizer_is_reported_before_what_follows_from_it() -> None:
    other = make_fingerprint(replace(FP32, kv_layers=9), **NAMES | {"tokenizer": "x", "weights": "y"})
    with pytest.raises(FingerprintMismatch, match=r"^fingerprint field tokenizer is 'x' in the stored state, but 't'"):
        compare(other, make_fingerprint(FP32, **NAMES))


def test_text_and_number_are_not_the_same_fact() -> None:
    with pytest.raises(FingerprintMismatch):
        compare({"window": "256"}, {"window": 256})
    with pytest.raises(FingerprintMismatch):
        compare({"window": True}, {"window": 1})
    with pytest.raises(FingerprintMismatch, match="is absent in the stored state"):
        compare({}, {"window": 256})
