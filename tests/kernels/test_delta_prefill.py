"""The gated delta rule in chunks, against the serial FP64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.delta_blocks import EXTREMES, KERNEL, extreme, random_block, random_state

both = pytest.mark.parametrize("by", ["reference", KERNEL])
MORE, FEW = (2, 4), (1, 2)
"""Heads of q and k, and of v; few of them where more would show no more."""


@pytest.mark.parametrize(
    "width, heads, by",
    [
        *((n, MORE, "reference") for n in (1, 2, 63, 64, 65, 200)),
        *((n, MORE, KERNEL) for n in (1, 17, 65)),
        *((n, FEW, KERNEL) for n in (63, 64, 130)),
    ],
)
def test_prefill_is_the_serial_recurrence_at_every_chunk_boundary(width: int, heads: tuple[int, int], by: str) -> None:
    block, state = random_block(2, width, width, heads), random_state(2, heads=heads[1])
    outputs, after = block.prefill(state, by=by)
    expected, expected_state = block.oracle(state)
    assert outputs.shape == block.v.shape and after.dtype == torch.float32
    oracles.close(outputs, expected, 2e-5)
    oracles.close(after, expected_state, 2e-5)


@both
@pytest.mark.parametrize("case", EXTREMES)
def test_prefill_in_chunks_survives_extreme_keys_and_gates(case: str, by: str) -> None:
    block, state = extreme(random_block(1, 130, 7, FEW), case), random_state(1, heads=2)
    outputs, after = block.prefill(state, by=by)
    expected, expected_state = block.oracle(state)
    oracles.close(outputs, expected, 2e-5)
    oracles.close(after, expected_state, 2e-5)


@both
def test_a_key_that_is_repeated_for_ever_and_written_fully_is_solved_to_its_last_digits(by: str) -> None:
    """The powers of L have entries of 10^17 then, the inverse of I + L has none above 1."""
    block, state = random_block(1, 128, 23, FEW), random_state(1, heads=2)
    block = replace(block, k=block.k[:, :1].repeat(1, 128, 1, 1), g=block.g * 0, beta=block.beta * 0 + 1)
    outputs, after = block.prefill(state, by=by)
    expected, expected_state = block.oracle(state)
    oracles.close(outputs, expected, 2e-5)
    oracles.close(after, expected_state, 2e-5)


@pytest.mark.parametrize("case", ["plain", "forgets at times", "writes fully"])
def test_of_bfloat16_columns_the_state_keeps_more_digits_than_they_have(case: str) -> None:
    block, state = extreme(random_block(1, 130, 24, FEW), case), random_state(1, heads=2)
    block = replace(block, q=block.q.bfloat16(), k=block.k.bfloat16(), v=block.v.bfloat16())
    outputs, after = block.prefill(state)
    expected, expected_state = block.oracle(state)
    assert outputs.dtype == torch.bfloat16
    assert float((after - expected_state).norm() / expected_state.norm()) < 1e-4
    # y is rounded, and so are both factors of one of its two products
    assert float((outputs.double() - expected).norm() / expected.norm()) < 5e-3


@both
def test_prefill_in_pieces_is_prefill_in_one_piece(by: str) -> None:
    block, state = random_block(1, 150, 8, FEW), random_state(1, heads=2)
    whole, after = block.prefill(state, by=by)
    first, middle = block.columns(0, 37).prefill(state, by=by)
    second, last = block.columns(37).prefill(middle, by=by)
    oracles.close(torch.cat((first, second), dim=1), whole, 2e-5)
    oracles.close(last, after, 2e-5)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_cut_at_whole_chunks_has_the_bits_of_one_piece(by: str, dtype: torch.dtype) -> None:
    block, state = random_block(1, 205, 18, FEW), random_state(1, heads=2)
    block = replace(block, q=block.q.to(dtype), k=block.k.to(dtype), v=block.v.to(dtype))
    whole, after = block.prefill(state, by=by)
    parts: list[torch.Tensor] = []
    for start, end in ((0, 64), (64, 192), (192, 205)):
        part, state = block.columns(start, end).prefill(state, by=by)
        parts.append(part)
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert torch.equal(state, after)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_card_a_prompt_cut_at_whole_chunks_has_its_bits_at_the_official_geometry(dtype: torch.dtype) -> None:
    dims = (128, 128)
    block, state = random_block(1, 300, 25, (16, 48), dims), random_state(1, 26, 48, dims)
    block = replace(block, q=block.q.to(dtype), k=block.k.to(dtype), v=block.v.to(dtype))
    whole, after = block.prefill(state)
    first, middle = block.columns(0, 192).prefill(state)
    second, last = block.columns(192).prefill(middle)
    assert torch.equal(torch.cat((first, second), dim=1), whole)
    assert torch.equal(last, after)


@both
@pytest.mark.parametrize("heads", [(1, 1), (2, 6)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 16), (256, 32)])
def test_any_heads_and_dimensions_are_those_of_the_formula(
    heads: tuple[int, int], dims: tuple[int, int], by: str
) -> None:
    block, state = random_block(1, 70, 19, heads, dims), random_state(1, 20, heads[1], dims)
    outputs, after = block.prefill(state, by=by)
    expected, expected_state = block.oracle(state)
    oracles.close(outputs, expected, 2e-5)
    oracles.close(after, expected_state, 2e-5)
