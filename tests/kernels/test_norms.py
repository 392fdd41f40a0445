"""The three forms of RMS normalisation, their values in FP64 and their rounding points in BF16."""

from __future__ import annotations

import pytest
import torch

from kernels.norms import gated_rms_norm, offset_rms_norm, plain_rms_norm
from tests.kernels import oracles

EPS = 1e-6


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, gate = (torch.randn(3, 40, 96, generator=generator) * 5 for _ in range(2))
    return x.to(dtype), gate.to(dtype), torch.randn(96, generator=generator).to(dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    return x.double() / (1 + (-x.double()).exp())


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_each_form_is_its_formula(eps: float) -> None:
    x, gate, weight = inputs(torch.float32)
    n, w = oracles.rms(x, eps), weight.double()
    oracles.close(plain_rms_norm(x, weight, eps), w * n, 1e-6)
    oracles.close(offset_rms_norm(x, weight, eps), (1 + w) * n, 1e-6)
    oracles.close(gated_rms_norm(x, gate, weight, eps), w * n * silu(gate), 1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-3, 1e15])
def test_rows_of_any_size_give_finite_values(scale: float) -> None:
    x, _, weight = inputs(torch.float32)
    x = x * scale
    oracles.close(plain_rms_norm(x, weight, EPS), weight.double() * oracles.rms(x, EPS), 1e-6)


def test_plain_rounds_the_normalised_value_before_the_gain_in_bfloat16() -> None:
    x, _, weight = inputs(torch.bfloat16)
    twice = weight.double() * oracles.rms(x, EPS).float().bfloat16().double()
    once = weight.double() * oracles.rms(x, EPS)
    got = plain_rms_norm(x, weight, EPS)
    oracles.rounds_like(got, twice)
    with pytest.raises(AssertionError):
        oracles.rounds_like(got, once)


def test_offset_applies_its_gain_in_fp32_and_rounds_once() -> None:
    x, _, weight = inputs(torch.bfloat16)
    once = (1 + weight.double()) * oracles.rms(x, EPS)
    twice = (1 + weight.double()) * oracles.rms(x, EPS).float().bfloat16().double()
    got = offset_rms_norm(x, weight, EPS)
    oracles.rounds_like(got, once)
    with pytest.raises(AssertionError):
        oracles.rounds_like(got, twice)


def test_gated_multiplies_the_rounded_plain_norm_by_an_fp32_gate_and_rounds_once() -> None:
    x, gate, weight = inputs(torch.bfloat16)
    inner = (weight.double() * oracles.rms(x, EPS).float().bfloat16().double()).float().bfloat16().double()
    got = gated_rms_norm(x, gate, weight, EPS)
    oracles.rounds_like(got, inner * silu(gate))
    with pytest.raises(AssertionError):
        oracles.rounds_like(got, inner * silu(gate).float().bfloat16().double())
