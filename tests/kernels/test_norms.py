"""The three forms of RMS normalisation, their values in FP64 and their rounding points in BF16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.norms import (
    add_offset_rms_norm,
    add_offset_rms_norm_triton,
    add_plain_rms_norm,
    add_plain_rms_norm_triton,
    gated_rms_norm,
    gated_rms_norm_triton,
    offset_rms_norm,
    offset_rms_norm_triton,
    plain_rms_norm,
    plain_rms_norm_triton,
    summed_plain_rms_norm,
)
from tests.kernels import oracles
from tests.kernels.devices import DEVICE

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


# ------------------------------------------------------------------------------------------------ kernels


Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
AddingNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]

each_form = pytest.mark.parametrize(
    "kernel, reference", [(plain_rms_norm_triton, plain_rms_norm), (offset_rms_norm_triton, offset_rms_norm)]
)


@each_form
@pytest.mark.parametrize("width", [16, 80, 96])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0, 1e15])
def test_the_kernel_is_the_formula_at_any_width_and_size(
    width: int, scale: float, kernel: Norm, reference: Norm
) -> None:
    x, _, weight = inputs(torch.float32)
    x, weight = x[:, :4, :width] * scale, weight[:width]
    gain = weight.double() + (reference is offset_rms_norm)
    oracles.close(kernel(x.to(DEVICE), weight.to(DEVICE), EPS).cpu(), gain * oracles.rms(x, EPS), 1e-6)


def test_the_kernels_round_where_the_references_do() -> None:
    x, _, weight = inputs(torch.bfloat16)
    x = x[:, :8]
    got = plain_rms_norm_triton(x.to(DEVICE), weight.to(DEVICE), EPS).cpu()
    oracles.rounds_like(got, weight.double() * oracles.rms(x, EPS).float().bfloat16().double())
    oracles.rounds_like(got, plain_rms_norm(x, weight, EPS).double(), share=0.001)
    got = offset_rms_norm_triton(x.to(DEVICE), weight.to(DEVICE), EPS).cpu()
    oracles.rounds_like(got, (1 + weight.double()) * oracles.rms(x, EPS))


@each_form
def test_the_kernel_takes_rows_of_any_stride(kernel: Norm, reference: Norm) -> None:
    x, _, weight = inputs(torch.float32)
    x = x[:, :3]
    wide = torch.cat((x, torch.full_like(x, torch.nan)), dim=-1).to(DEVICE)[..., :96]
    for rows, expected in ((wide, x), (wide.transpose(0, 1), x.transpose(0, 1))):  # of two strides, the second time
        oracles.close(kernel(rows, weight.to(DEVICE), EPS).cpu(), reference(expected, weight, EPS), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, width", [(1, 96), (5, 96), (12, 80), (20, 64)])
def test_the_gated_kernel_is_its_formula_for_gates_of_any_stride(heads: int, width: int, dtype: torch.dtype) -> None:
    x, _, weight = inputs(dtype)
    x, weight = x[:, :heads, :width].contiguous(), weight[:width]
    projection = inputs(dtype, seed=1)[0].flatten(1)  # the gate is a part of each row
    gate = projection[:, 7 : 7 + heads * width].unflatten(-1, (heads, width))
    got = gated_rms_norm_triton(x.to(DEVICE), gate.to(DEVICE), weight.to(DEVICE), EPS).cpu()
    assert got.dtype == dtype
    if dtype == torch.float32:
        oracles.close(got, weight.double() * oracles.rms(x, EPS) * silu(gate), 1e-6)
    inner = (weight.double() * oracles.rms(x, EPS).to(dtype).double()).to(dtype).double()
    oracles.rounds_like(got.bfloat16(), inner * silu(gate))


def test_a_bfloat16_gain_over_fp32_values_stays_fp32() -> None:
    x, _, weight = inputs(torch.float32)
    got = plain_rms_norm_triton(x[:, :2].to(DEVICE), weight.bfloat16().to(DEVICE), EPS).cpu()
    assert got.dtype == torch.float32
    oracles.close(got, plain_rms_norm(x[:, :2], weight.bfloat16(), EPS), 1e-6)


@pytest.mark.parametrize(
    "kernel, adding, norm",
    [
        (add_plain_rms_norm_triton, add_plain_rms_norm, plain_rms_norm),
        (add_offset_rms_norm_triton, add_offset_rms_norm, offset_rms_norm),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_after_an_addition_sees_the_rounded_sum(
    dtype: torch.dtype, kernel: AddingNorm, adding: AddingNorm, norm: Norm
) -> None:
    x, y, weight = (t[:, :4] if t.dim() > 1 else t for t in inputs(dtype))
    total, normed = (t.cpu() for t in kernel(x.to(DEVICE), y.to(DEVICE), weight.to(DEVICE), EPS))
    assert torch.equal(total, x + y)
    oracles.rounds_like(normed.bfloat16(), norm(x + y, weight, EPS).double(), share=0.001)
    expected = adding(x, y, weight, EPS)
    assert torch.equal(expected[0], total)
    assert torch.equal(expected[1], norm(x + y, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_summed_in_fp32_and_rounded_before_they_are_added(dtype: torch.dtype) -> None:
    """As a mixture's are: 256 and eight times 1 is 264 in FP32, and stays 256 where each sum is rounded to BF16."""
    x, _, weight = inputs(dtype)
    x = x[:, :4]
    parts = torch.ones(*x.shape[:-1], 9, x.shape[-1], dtype=dtype)
    parts[..., 0, :] = 256.0
    there = add_offset_rms_norm_triton(x.to(DEVICE), parts.to(DEVICE), weight.to(DEVICE), EPS)
    total, normed = (part.cpu() for part in there)
    assert torch.equal(total, x + 264.0)
    oracles.rounds_like(normed.bfloat16(), offset_rms_norm(total, weight, EPS).double(), share=0.001)
    expected = add_offset_rms_norm(x, parts, weight, EPS)
    assert torch.equal(expected[0], total)
    oracles.rounds_like(normed.bfloat16(), expected[1].double(), share=0.001)


def test_the_parts_of_a_product_are_added_wherever_they_lie() -> None:
    """FP32 beside a residual of BF16, each part of all rows by itself."""
    x, _, weight = inputs(torch.bfloat16)
    parts = torch.randn(3, *x.shape, generator=torch.Generator().manual_seed(3))
    apart = parts.to(DEVICE).movedim(0, -2)
    assert not apart.is_contiguous()
    for kernel, norm in (
        (add_offset_rms_norm_triton, add_offset_rms_norm),
        (add_plain_rms_norm_triton, add_plain_rms_norm),
    ):
        total, normed = (part.cpu() for part in kernel(x.to(DEVICE), apart, weight.to(DEVICE), EPS))
        whole = (parts[0] + parts[1] + parts[2]).bfloat16()
        assert torch.equal(total, x + whole)
        oracles.rounds_like(normed.bfloat16(), norm(x, whole, weight, EPS)[1].double(), share=0.001)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("rows, width", [(1, 16), (5, 352)])
def test_the_norm_of_a_product_in_parts_is_that_of_the_product(rows: int, width: int, parts: int) -> None:
    """Rounded where it would be if the product were stored, in BF16 and in FP32."""
    generator = torch.Generator().manual_seed(rows + parts)
    split = torch.randn(parts, rows, width, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(width, generator=generator).to(dtype)
        got = summed_plain_rms_norm(split.to(DEVICE), weight.to(DEVICE), EPS).cpu()
        product = split[0].clone()
        for part in split[1:]:
            product += part
        expected = plain_rms_norm(product.to(dtype), weight, EPS)
        assert got.dtype == dtype
        oracles.close(got, expected, 1e-6 if dtype == torch.float32 else 2.0**-7)
        assert dtype == torch.float32 or float((got == expected).double().mean()) > 0.9


def test_the_kernel_refuses_a_gain_of_another_width() -> None:
    x, y, weight = inputs(torch.float32)
    with pytest.raises(ValueError, match=r"weight: shape \(80,\), must be \(96,\)"):
        plain_rms_norm_triton(x, weight[:80], EPS)
    with pytest.raises(ValueError, match=r"y: torch.bfloat16, must be torch.float32"):
        add_plain_rms_norm_triton(x, y.bfloat16(), weight, EPS)
    with pytest.raises(ValueError, match=r"gate: torch.bfloat16, must be torch.float32"):
        gated_rms_norm_triton(x, y.bfloat16(), weight, EPS)
