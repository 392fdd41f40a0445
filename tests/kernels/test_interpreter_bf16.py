"""Triton's interpreter must compute bfloat16 as a card does, or interpreted kernel tests would prove nothing."""

# A launch passes plain numbers for constexpr parameters.
# pyright: reportArgumentType=false

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None or torch.cuda.is_available():
    pytest.skip("the interpreter is used only with triton and without a card", allow_module_level=True)

import numpy as np
import triton
import triton.language as tl

from tests.triton_interpreter import narrow, widen

N = 256


@triton.jit
def elementwise(x_ptr, y_ptr, sum_ptr, product_ptr, ratio_ptr, fused_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(sum_ptr + i, x + y)
    tl.store(product_ptr + i, x * y)
    tl.store(ratio_ptr + i, x / y)
    tl.store(fused_ptr + i, -x * 0.5 + 1.0)


@triton.jit
def convert(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(tl.bfloat16))


@triton.jit
def store_implicitly(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i))


@triton.jit
def matmul(a_ptr, b_ptr, out_ptr, M: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, M)[None, :]
    a, b = tl.load(a_ptr + i * M + j), tl.load(b_ptr + i * M + j)
    tl.store(out_ptr + i * M + j, tl.dot(a, b))


@triton.jit
def reduce(x_ptr, out_ptr, raw_ptr, index_ptr, M: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, M)[None, :]
    x = tl.load(x_ptr + i * M + j)
    wide = x.to(tl.float32)
    rows = tl.arange(0, M)
    tl.store(out_ptr + rows, tl.sum(wide, axis=1))
    tl.store(out_ptr + M + rows, tl.max(wide, axis=1))
    tl.store(raw_ptr + rows, tl.sum(x, axis=1))
    tl.store(raw_ptr + M + rows, tl.max(x, axis=1))
    tl.store(index_ptr + rows, tl.argmax(x, axis=1))


@triton.jit
def compare(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i, mask=i < N - 1, other=0.5)
    both = (x < y) & (tl.abs(x) > 0.25)
    tl.store(out_ptr + i, tl.where(both, tl.maximum(x, y), tl.full((N,), 1.5, tl.bfloat16)))


@triton.jit
def to_integer(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, (x * 8.0).to(tl.int32))


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def test_add_multiply_and_divide_round_like_torch() -> None:
    x, y = bf16(N, seed=1), bf16(N, seed=2)
    total, product, ratio, fused = (torch.empty_like(x) for _ in range(4))
    elementwise[(1,)](x, y, total, product, ratio, fused, N)
    assert torch.equal(total, x + y)
    assert torch.equal(product, x * y)
    assert torch.equal(ratio, x / y)
    assert torch.equal(fused, -x * 0.5 + 1.0)


def test_without_the_patch_addition_is_wrong(plain_interpreter: None) -> None:
    x, y = bf16(N, seed=1), bf16(N, seed=2)
    total, product, ratio, fused = (torch.empty_like(x) for _ in range(4))
    try:
        elementwise[(1,)](x, y, total, product, ratio, fused, N)
    except Exception:
        return  # a later Triton may refuse what it cannot compute; silence is what the patch is against
    assert not torch.equal(total, x + y)


@pytest.mark.parametrize("kernel", [convert, store_implicitly])
def test_float32_becomes_bfloat16_to_nearest_even(kernel) -> None:
    # Halfway cases between two bfloat16 values, one unit around them, both signs, infinities, overflow, subnormals.
    halfway = torch.arange(0x3F808000, 0x3F808000 + 40 * 0x8000, 0x8000, dtype=torch.int32)
    near = torch.cat([halfway, halfway + 1, halfway - 1]).view(torch.float32)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e-40, -3e-41, 1.2e-38])
    x = torch.cat([near, -near, special])
    x = torch.cat([x, torch.randn(512 - x.numel(), generator=torch.Generator().manual_seed(3))])
    out = torch.empty(512, dtype=torch.bfloat16)
    kernel[(1,)](x, out, 512)
    assert torch.equal(out.view(torch.int16), x.to(torch.bfloat16).view(torch.int16))


def test_without_the_patch_stores_truncate(plain_interpreter: None) -> None:
    x = torch.randn(N, generator=torch.Generator().manual_seed(4))
    out = torch.empty(N, dtype=torch.bfloat16)
    convert[(1,)](x, out, N)
    assert (out != x.to(torch.bfloat16)).float().mean() > 0.2


def test_not_a_number_survives_both_ways() -> None:
    patterns = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32).numpy()
    assert np.isnan(widen(narrow(patterns))).all()


def test_dot_multiplies_values_and_accumulates_in_float32() -> None:
    a, b = bf16(32, 32, seed=5), bf16(32, 32, seed=6)
    out = torch.empty(32, 32)
    matmul[(1,)](a, b, out, 32)
    assert torch.allclose(out, a.float() @ b.float(), atol=1e-5, rtol=1e-5)


def test_reductions_are_right_upcast_or_not() -> None:
    x = bf16(32, 32, seed=7)
    wide, raw, index = torch.empty(2, 32), torch.empty(2, 32, dtype=torch.bfloat16), torch.empty(32, dtype=torch.int32)
    reduce[(1,)](x, wide, raw, index, 32)
    assert torch.allclose(wide[0], x.float().sum(1), atol=1e-5)
    assert torch.equal(wide[1], x.float().amax(1))
    assert torch.allclose(raw[0].float(), x.float().sum(1), atol=0.05, rtol=1e-2)
    assert torch.equal(raw[1], x.amax(1))
    assert torch.equal(index.long(), x.float().argmax(1))


def test_comparisons_selects_and_constants_see_numbers() -> None:
    x, y = bf16(N, seed=8), bf16(N, seed=9)
    out = torch.empty_like(x)
    compare[(1,)](x, y, out, N)
    masked = y.clone()
    masked[-1] = 0.5
    both = (x < masked) & (x.abs() > 0.25)
    assert torch.equal(out, torch.where(both, torch.maximum(x, masked), torch.tensor(1.5, dtype=torch.bfloat16)))


def test_casts_to_integers_see_numbers() -> None:
    x = bf16(N, seed=10)
    out = torch.empty(N, dtype=torch.int32)
    to_integer[(1,)](x, out, N)
    assert torch.equal(out, (x * 8.0).to(torch.int32))
