"""The target's short convolution and DFlash2's grouped one, channel by channel in FP64."""

from __future__ import annotations

import pytest
import torch

from kernels.grouped_convolution import finish, prepare
from kernels.short_convolution import advance_history, short_convolution
from tests.kernels import oracles
from tests.kernels.oracles import POISON


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + len(shape)))


# ------------------------------------------------------------------------------------------------ short


def naive_short(x: torch.Tensor, history: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One row: `x` [T, C], `history` [C, n - 1] oldest first, `weight` [C, n] -> FP64 [T, C]."""
    line = torch.cat((history.double().T, x.double()))
    taps = weight.shape[1]
    out = torch.empty(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for c in range(x.shape[1]):
            total = sum(float(weight[c, j]) * float(line[t + j, c]) for j in range(taps))
            out[t, c] = total / (1 + torch.tensor(-total, dtype=torch.float64).exp())
    return out


@pytest.mark.parametrize("columns", [1, 2, 3, 16, 70])
def test_short_convolution_continues_the_history_causally(columns: int) -> None:
    x, history, weight = normal(2, columns, 6), normal(2, 6, 3, seed=1), normal(6, 4)
    got = short_convolution(x, history, weight)
    for row in range(2):
        oracles.close(got[row], naive_short(x[row], history[row], weight), 2e-6)


def test_a_column_never_sees_a_later_one() -> None:
    x, history, weight = normal(1, 9, 5), normal(1, 5, 3, seed=1), normal(5, 4)
    clean = short_convolution(x, history, weight)
    x[:, 6:] = POISON
    assert torch.equal(short_convolution(x, history, weight)[:, :6], clean[:, :6])


@pytest.mark.parametrize("taps", [2, 4])
def test_history_is_the_last_columns_of_what_was_accepted(taps: int) -> None:
    x, history = normal(9, 8, 5), normal(9, 5, taps - 1, seed=2)
    counts = torch.arange(9)
    lines = torch.cat((history, x.transpose(1, 2)), dim=-1)
    poisoned = x.clone()
    for row in range(9):
        poisoned[row, row:] = POISON
    after = advance_history(history, poisoned, counts)
    for row in range(9):
        assert torch.equal(after[row], lines[row, :, row : row + taps - 1])
    assert torch.equal(after[0], history[0])


def test_convolving_in_pieces_with_the_history_is_convolving_at_once() -> None:
    x, history, weight = normal(1, 12, 5), normal(1, 5, 3, seed=1), normal(5, 4)
    whole = short_convolution(x, history, weight)
    pieces = []
    for start, end in ((0, 1), (1, 3), (3, 12)):
        pieces.append(short_convolution(x[:, start:end], history, weight))
        history = advance_history(history, x[:, start:end], torch.tensor([end - start]))
    oracles.close(torch.cat(pieces, dim=1), whole, 1e-6)


def test_history_keeps_its_own_dtype() -> None:
    x, history = normal(1, 4, 5).bfloat16(), normal(1, 5, 3)
    assert advance_history(history, x, torch.tensor([2])).dtype == torch.float32
    assert short_convolution(x, history, normal(5, 4).bfloat16()).dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------ grouped


GROUP, HIDDEN, WIDTH = 16, 64, 5


def grouped_inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    x, z = normal(2, WIDTH, HIDDEN), normal(2, WIDTH, HIDDEN, seed=3)
    base, projection = normal(2, 2, HIDDEN, seed=4), normal(4 * HIDDEN // GROUP, HIDDEN, seed=5) / 8
    return tuple(t.to(dtype) for t in (x, z, base, projection))


def naive_delta(x: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """`x` [W, H] -> FP64 [W, 2 sides, 2 taps, groups], in the specification's order of rows."""
    return (x.double() @ projection.double().T).reshape(x.shape[0], 2, 2, HIDDEN // GROUP)


def test_prepare_convolves_its_input_with_side_zero_and_keeps_the_delta_of_side_one() -> None:
    x, _, base, projection = grouped_inputs()
    prepared, finish_delta = prepare(x, base, projection)
    for row in range(2):
        delta = naive_delta(x[row], projection)
        oracles.close(prepared[row], oracles.grouped_convolution(x[row], base[0], delta[:, 0]), 1e-5)
        oracles.close(finish_delta[row], delta[:, 1], 1e-5)


def test_finish_applies_the_delta_of_the_branchs_input_to_its_output() -> None:
    x, z, base, projection = grouped_inputs()
    finished = finish(z, base, prepare(x, base, projection)[1])
    for row in range(2):
        expected = oracles.grouped_convolution(z[row], base[1], naive_delta(x[row], projection)[:, 1])
        oracles.close(finished[row], expected, 1e-5)
        projected_again = oracles.grouped_convolution(z[row], base[1], naive_delta(z[row], projection)[:, 1])
        assert float((finished[row].double() - projected_again).abs().max()) > 0.1


def test_column_zero_has_no_preceding_tap() -> None:
    x, z, base, projection = grouped_inputs()
    base[:, 1] = 1e30  # the second tap would show
    projection.zero_()
    prepared, finish_delta = prepare(x, base, projection)
    oracles.close(prepared[:, 0], base[0, 0].double() * x[:, 0].double(), 1e-6)
    oracles.close(finish(z, base, finish_delta)[:, 0], base[1, 0].double() * z[:, 0].double(), 1e-6)


def test_a_column_sees_itself_and_the_one_before_it_only() -> None:
    x, _, base, projection = grouped_inputs()
    clean = prepare(x, base, projection)[0]
    for column in range(WIDTH):
        disturbed = x.clone()
        disturbed[:, column] += 1.0
        changed = (prepare(disturbed, base, projection)[0] != clean).any(-1).any(0)
        assert changed.nonzero().flatten().tolist() == [i for i in (column, column + 1) if i < WIDTH]


def test_bfloat16_convolution_sums_in_fp32_and_rounds_once() -> None:
    x, z, base, projection = grouped_inputs(torch.bfloat16)
    prepared, finish_delta = prepare(x, base, projection)
    assert prepared.dtype == finish_delta.dtype == torch.bfloat16
    exact = torch.stack([oracles.grouped_convolution(z[b], base[1], finish_delta[b]) for b in range(2)])
    oracles.rounds_like(finish(z, base, finish_delta), exact)
    for row in range(2):
        oracles.close(finish_delta[row], naive_delta(x[row], projection)[:, 1], 2.0**-7)
        delta = naive_delta(x[row], projection)[:, 0]
        oracles.close(prepared[row], oracles.grouped_convolution(x[row], base[0], delta), 2.0**-5)
