"""The product of few rows with a large weight: our kernel in the interpreter against the FP64 product."""

from __future__ import annotations

import pytest
import torch

from kernels.head import head_product, head_scores
from kernels.linear import (
    Linear,
    Tiling,
    linear,
    linear_parts_triton,
    linear_reference,
    linear_triton,
    shared_evenly,
)
from tests.kernels.devices import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def operands(rows: int, n: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + n + depth)
    x, weight = torch.randn(rows, depth, generator=generator), torch.randn(n, depth, generator=generator)
    return x.to(DEVICE, dtype), (weight * depth**-0.5).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, n, depth, splits", [(1, 5, 48, 1), (7, 70, 96, 3), (17, 33, 80, 2), (8, 64, 32, 8)])
def test_the_kernel_gives_the_product_rounded_once(
    rows: int, n: int, depth: int, splits: int, out: torch.dtype, dtype: torch.dtype
) -> None:
    x, weight = operands(rows, n, depth, dtype)
    got = linear_triton(x, weight, out, Tiling(16, 32, 16, splits, 2, 1))
    oracle = x.double() @ weight.double().T
    assert got.dtype == out and got.shape == oracle.shape
    tolerance = TOLERANCE[out] if out == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), oracle, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got, linear_reference(x, weight, out), rtol=tolerance, atol=tolerance)


def test_the_tilings_that_are_chosen_by_themselves_are_right_too() -> None:
    for n, dtype in ((129, torch.float32), (129, torch.bfloat16), (8500, torch.bfloat16)):  # the last in even shares
        x, weight = operands(3, n, 200, dtype)
        got = linear_triton(x, weight, torch.float32)
        torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


def test_the_parts_of_a_product_are_its_own_and_their_sum_is_the_product() -> None:
    x, weight = operands(6, 40, 64, torch.bfloat16)
    halves = linear_parts_triton(x.view(2, 3, 64), weight, Tiling(16, 32, 16, 2, 2, 1))
    assert halves.shape == (2, 3, 2, 40) and halves.dtype == torch.float32
    for half, begin in zip(halves.view(6, 2, 40).unbind(1), (0, 32), strict=True):
        exact = x[:, begin:][:, :32].double() @ weight[:, begin:][:, :32].double().T
        torch.testing.assert_close(half.double(), exact, rtol=1e-5, atol=1e-5)
    whole = linear_parts_triton(x, weight, Tiling(16, 32, 16, 1, 2, 1))
    assert torch.equal(whole, linear_triton(x, weight, torch.bfloat16, Tiling(16, 32, 16, 1, 2, 1)))


@pytest.mark.parametrize("taken", [1, 20, 31])
def test_programs_that_take_fewer_rows_than_their_tile_has_leave_out_none(taken: int) -> None:
    x, weight = operands(5, 67, 64, torch.float32)
    got = linear_triton(x, weight, torch.float32, Tiling(16, 32, 16, 1, 2, 1, taken))
    assert torch.equal(got, linear_triton(x, weight, torch.float32, Tiling(16, 32, 16, 1, 2, 1)))


@pytest.mark.parametrize("rows, n", [(1, 1024), (64, 10_240), (17, 12_288), (64, 20_480), (8, 96)])
def test_an_even_share_keeps_every_multiprocessor_as_long_as_the_others(rows: int, n: int) -> None:
    tiling = shared_evenly(rows, n)
    assert rows <= tiling.rows and 0 < tiling.taken <= tiling.weights <= 128
    programs = -(-n // tiling.taken)
    waves = -(-programs // 132)
    assert n <= 132 * waves * tiling.taken < n + 132 * waves * 16


def test_a_row_has_the_same_bits_whatever_stands_beside_it() -> None:
    x, weight = operands(9, 40, 64, torch.bfloat16)
    alone = linear_triton(x[4:5], weight, torch.float32)
    assert torch.equal(linear_triton(x, weight, torch.float32)[4:5], alone)


def test_leading_axes_are_kept_and_no_rows_give_no_rows() -> None:
    x, weight = operands(6, 10, 16, torch.float32)
    assert linear_triton(x.view(2, 3, 16), weight, torch.float32).shape == (2, 3, 10)
    assert linear(x.view(2, 3, 16), weight).shape == (2, 3, 10)
    assert linear_triton(x[:0], weight, torch.float32).shape == (0, 10)


def test_a_weight_of_another_width_or_dtype_is_refused_by_name() -> None:
    x, weight = operands(2, 8, 16, torch.float32)
    with pytest.raises(ValueError, match=r"x: shape \(2, 16\), must be \(2, 12\)"):
        linear_triton(x, weight[:, :12].contiguous(), torch.float32)
    with pytest.raises(ValueError, match=r"weight: torch\.bfloat16, must be torch\.float32"):
        linear_triton(x, weight.bfloat16(), torch.float32)


def test_head_scores_are_those_of_the_first_rows_in_fp32() -> None:
    x, weight = operands(3, 24, 16, torch.bfloat16)
    scores = head_scores(x, weight, 21)
    assert scores.dtype == torch.float32 and scores.shape == (3, 21)
    torch.testing.assert_close(scores.double(), x.double() @ weight[:21].double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "rows, n, depth, dtype, runs",
    [
        (64, 5120, 17408, torch.bfloat16, "streaming"),
        (65, 5120, 17408, torch.bfloat16, "cuBLAS"),
        (8, 64, 48, torch.bfloat16, "streaming"),
        (8, 248320, 5120, torch.bfloat16, "streaming"),
        (8, 248320, 5120, torch.float32, "cuBLAS"),
    ],
)
def test_few_rows_in_bf16_are_streamed_on_a_card(rows: int, n: int, depth: int, dtype: torch.dtype, runs: str) -> None:
    matrix = Linear(torch.empty(n, depth, dtype=dtype, device="meta"))
    assert (matrix.product(rows, card=True), matrix.product(rows, card=False)) == (runs, "torch")


@pytest.mark.parametrize("every, rows, taken", [(24, 21, 24), (24, 16, 16), (23, 21, 21)])
def test_the_library_scores_a_whole_head_where_rows_do_not_come_in_eights(every: int, rows: int, taken: int) -> None:
    weight = torch.empty(every, 16)
    assert head_product(3, rows, weight, card=True) == (taken, "cuBLAS")
    assert head_product(3, rows, weight, card=False) == (rows, "torch")
