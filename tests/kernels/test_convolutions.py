"""The target's short convolution and DFlash2's grouped one, channel by channel in FP64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels import grouped_convolution
from kernels.grouped_convolution import (
    Residual,
    enter_reference,
    enter_triton,
    finish_reference,
    finish_triton,
    prepare_reference,
    prepare_triton,
)
from kernels.linear import Tiling
from kernels.short_convolution import (
    advance_histories_reference,
    advance_histories_triton,
    short_convolution_reference,
    short_convolution_triton,
)
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, poison_new_memory
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


def slots_of(batch: int) -> torch.Tensor:
    """Rows lie in the pool in another order, and not in all of it: slot 2 b + 1, from the end."""
    return 2 * torch.arange(batch).flip(0) + 1


def pool_of(history: torch.Tensor) -> torch.Tensor:
    """`history` [L, B, C, n - 1] as layers 1 .. L of a pool [slots, L + 2, C, n - 1], poison everywhere else."""
    layers, batch = history.shape[:2]
    pool = torch.full((2 * batch + 1, layers + 2, *history.shape[2:]), POISON, dtype=history.dtype)
    pool[slots_of(batch), 1 : layers + 1] = history.transpose(0, 1)
    return pool.to(DEVICE)


def convolve(
    x: torch.Tensor, history: torch.Tensor, weight: torch.Tensor, by: str = "kernel"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [B, T, C], `history` [B, C, n - 1] -> what the operator fills. x is a part of wider rows, as projections
    leave it; the pool must stay as it was."""
    run = short_convolution_triton if by == "kernel" else short_convolution_reference
    pool = pool_of(history[None])
    before = pool.clone()
    wide = torch.cat((x, torch.full_like(x, POISON)), dim=-1).to(DEVICE)[..., : x.shape[-1]]
    out, columns = (torch.full(x.shape, POISON, dtype=x.dtype, device=DEVICE) for _ in range(2))
    run(wide, pool[:, 1], slots_of(len(x)).to(DEVICE), weight.to(DEVICE), out, columns)
    torch.testing.assert_close(pool, before, rtol=0, atol=0, equal_nan=True)
    return out.cpu(), columns.cpu()


def advance(history: torch.Tensor, columns: torch.Tensor, counts: torch.Tensor, by: str = "kernel") -> torch.Tensor:
    """`history` [L, B, C, n - 1] after `columns` [L, B, T, C]; fails if the pool around it lost its poison."""
    run = advance_histories_triton if by == "kernel" else advance_histories_reference
    (layers, batch), pool = history.shape[:2], pool_of(history)
    slots = slots_of(batch)
    run(pool[:, 1 : layers + 1], slots.to(DEVICE), columns.to(DEVICE), counts.to(DEVICE))
    pool = pool.cpu()
    after = pool[slots, 1 : layers + 1].clone()
    pool[slots, 1 : layers + 1] = POISON
    assert bool(pool.isnan().all())
    return after.transpose(0, 1)


by_both = pytest.mark.parametrize("by", ["reference", "kernel"])


@by_both
@pytest.mark.parametrize("columns, taps", [(1, 4), (2, 4), (3, 4), (5, 2), (16, 4), (37, 3)])
def test_short_convolution_continues_the_history_causally_and_copies_its_inputs(
    columns: int, taps: int, by: str
) -> None:
    x, history, weight = normal(2, columns, 6), normal(2, 6, taps - 1, seed=1), normal(6, taps)
    got, kept = convolve(x, history, weight, by)
    for row in range(2):
        oracles.close(got[row], naive_short(x[row], history[row], weight), 2e-6)
    assert torch.equal(kept, x)


@by_both
def test_channels_beyond_one_program_are_convolved_too(by: str) -> None:
    x, history, weight = normal(1, 2, 300), normal(1, 300, 3, seed=1), normal(300, 4)
    oracles.close(convolve(x, history, weight, by)[0][0], naive_short(x[0], history[0], weight), 2e-6)


@by_both
def test_a_column_never_sees_a_later_one(by: str) -> None:
    x, history, weight = normal(1, 9, 5), normal(1, 5, 3, seed=1), normal(5, 4)
    clean, _ = convolve(x, history, weight, by)
    x[:, 6:] = POISON
    assert torch.equal(convolve(x, history, weight, by)[0][:, :6], clean[:, :6])


@by_both
def test_short_convolution_rounds_once(by: str) -> None:
    x, history, weight = normal(2, 40, 24).bfloat16(), normal(2, 24, 3, seed=1).bfloat16(), normal(24, 4).bfloat16()
    got, _ = convolve(x, history, weight, by)
    oracles.rounds_like(got, torch.stack([naive_short(x[row], history[row], weight) for row in range(2)]))


@by_both
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_history_is_the_last_columns_of_what_was_accepted(taps: int, by: str) -> None:
    x, history = normal(2, 9, 8, 5), normal(2, 9, 5, taps - 1, seed=2)
    counts = torch.arange(9)
    lines = torch.cat((history, x.transpose(2, 3)), dim=-1)
    for row in range(9):
        x[:, row, row:] = POISON
    after = advance(history, x, counts, by)
    for row in range(9):
        assert torch.equal(after[:, row], lines[:, row, :, row : row + taps - 1])
    assert torch.equal(after[:, 0].view(torch.int32), history[:, 0].view(torch.int32))


@by_both
def test_convolving_in_pieces_with_the_history_is_convolving_at_once(by: str) -> None:
    x, history, weight = normal(1, 12, 5), normal(1, 5, 3, seed=1), normal(5, 4)
    whole, _ = convolve(x, history, weight, by)
    pieces = []
    for start, end in ((0, 1), (1, 3), (3, 12)):
        piece, columns = convolve(x[:, start:end], history, weight, by)
        pieces.append(piece)
        history = advance(history[None], columns[None], torch.tensor([end - start]), by)[0]
    oracles.close(torch.cat(pieces, dim=1), whole, 1e-6)
    assert by == "reference" or torch.equal(torch.cat(pieces, dim=1), whole)


@by_both
def test_history_keeps_its_own_dtype(by: str) -> None:
    x, history = normal(1, 4, 5).bfloat16(), normal(1, 5, 3)
    after = advance(history[None], x[None], torch.tensor([2]), by)[0]
    assert after.dtype == torch.float32
    assert torch.equal(after[0], torch.cat((history[0, :, 2:], x[0, :2].T.float()), dim=-1))
    assert convolve(x, history, normal(5, 4).bfloat16(), by)[0].dtype == torch.bfloat16


def test_the_short_convolution_refuses_a_history_of_other_taps() -> None:
    x, pool, slots = normal(1, 2, 5).to(DEVICE), pool_of(normal(1, 1, 5, 3))[:, 1], slots_of(1).to(DEVICE)
    with pytest.raises(ValueError, match=r"histories: shape \(3, 1, 5, 3\), must be \(3, 1, 5, 2\)"):
        short_convolution_triton(x, pool, slots, normal(5, 3).to(DEVICE), torch.empty_like(x), torch.empty_like(x))


# ------------------------------------------------------------------------------------------------ grouped


EPS = 1e-6
GROUP, HIDDEN, WIDTH = 16, 64, 5

Pair = tuple[torch.Tensor, torch.Tensor]


def prepare_on_device(x: torch.Tensor, norm: torch.Tensor, *weights: torch.Tensor) -> Pair:
    entered = enter_triton(x.to(DEVICE), norm.to(DEVICE))
    prepared, finish_delta = prepare_triton(entered, *(t.to(DEVICE) for t in weights), EPS)  # type: ignore[call-arg]
    return prepared.cpu(), finish_delta.cpu()


def prepare_as_told(x: torch.Tensor, norm: torch.Tensor, *weights: torch.Tensor) -> Pair:
    return prepare_reference(enter_reference(x, norm), *weights, EPS)  # type: ignore[call-arg]


def leave_on_device(*tensors: torch.Tensor) -> Residual:
    return finish_triton(*(t.contiguous().to(DEVICE) for t in tensors))  # type: ignore[call-arg]


def finish_on_device(*tensors: torch.Tensor) -> torch.Tensor:
    return leave_on_device(*tensors, torch.ones_like(tensors[0][0, 0])).x.cpu()


def finish_as_told(*tensors: torch.Tensor) -> torch.Tensor:
    return finish_reference(*tensors, torch.ones_like(tensors[0][0, 0])).x  # type: ignore[call-arg]


both_prepare = pytest.mark.parametrize("prepare", [prepare_as_told, prepare_on_device], ids=["reference", "kernel"])
both = pytest.mark.parametrize(
    ("prepare", "finish"),
    [(prepare_as_told, finish_as_told), (prepare_on_device, finish_on_device)],
    ids=["reference", "kernel"],
)


@dataclass(frozen=True)
class Branch:
    """Inputs of one branch: `x` [2, W, H] its residual, `z` its output."""

    x: torch.Tensor
    z: torch.Tensor
    norm: torch.Tensor
    base: torch.Tensor
    projection: torch.Tensor

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.norm, self.base, self.projection

    def normalised(self, row: int) -> torch.Tensor:
        return self.norm.double() * oracles.rms(self.x[row], EPS)

    def delta(self, row: int) -> torch.Tensor:
        """FP64 [W, 2 sides, taps, groups], in the specification's order of rows."""
        taps = self.base.shape[1]
        projected = self.normalised(row) @ self.projection.double().T
        return projected.reshape(self.x.shape[1], 2, taps, -1)


def branch(
    dtype: torch.dtype = torch.float32, batch: int = 2, width: int = WIDTH, hidden: int = HIDDEN, group: int = GROUP
) -> Branch:
    x, z = normal(batch, width, hidden) * 3, normal(batch, width, hidden, seed=3)
    base, projection = normal(2, 2, hidden, seed=4), normal(4 * hidden // group, hidden, seed=5) / hidden**0.5
    return Branch(*(t.to(dtype) for t in (x, z, normal(hidden, seed=6), base, projection)))


SHAPES = [
    (2, 5, 64, 16),
    (1, 1, 16, 16),
    (3, 2, 80, 16),
    (1, 16, 48, 8),
    (9, 8, 64, 16),
    (2, 3, 352, 16),
    (1, 2, 48, 3),
]


@pytest.mark.parametrize(("batch", "width", "hidden", "group"), SHAPES)
@both_prepare
def test_prepare_normalises_and_convolves_and_keeps_the_delta_of_side_one(
    prepare, batch: int, width: int, hidden: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = branch(torch.float32, batch, width, hidden, group)
    poison_new_memory(monkeypatch)
    prepared, finish_delta = prepare(*given.arguments())
    for row in range(batch):
        n, delta = given.normalised(row), given.delta(row)
        oracles.close(prepared[row], oracles.grouped_convolution(n, given.base[0], delta[:, 0]), 1e-5)
        oracles.close(finish_delta[row], delta[:, 1], 1e-5)


@both
def test_finish_adds_the_branchs_output_under_the_delta_of_its_input(prepare, finish) -> None:
    given = branch()
    finished = finish(given.x, given.z, given.base, prepare(*given.arguments())[1])
    for row in range(2):
        delta = given.delta(row)[:, 1]
        added = oracles.grouped_convolution(given.z[row], given.base[1], delta)
        oracles.close(finished[row], given.x[row].double() + added, 1e-5)


@both
def test_column_zero_has_no_preceding_tap(prepare, finish) -> None:
    given = branch()
    given.base[:, 1] = 1e30  # the second tap would show
    given.projection.zero_()
    prepared, finish_delta = prepare(*given.arguments())
    finished = finish(torch.zeros_like(given.z), given.z, given.base, finish_delta)
    for row in range(2):
        oracles.close(prepared[row, 0], given.base[0, 0].double() * given.normalised(row)[0], 2e-6)
        oracles.close(finished[row, 0], given.base[1, 0].double() * given.z[row, 0].double(), 2e-6)


@both
def test_a_column_sees_itself_and_the_one_before_it_only(prepare, finish) -> None:
    given = branch()
    clean, finish_delta = prepare(*given.arguments())
    finished = finish(given.x, given.z, given.base, finish_delta)
    for column in range(WIDTH):
        x, z = given.x.clone(), given.z.clone()
        x[0, column], z[0, column] = POISON, POISON
        reached = [i for i in (column, column + 1) if i < WIDTH]
        for dirty, was in (
            (prepare(x, *given.arguments()[1:])[0], clean),
            (finish(given.x, z, given.base, finish_delta), finished),
        ):
            assert dirty[0].isnan().all(-1).nonzero().flatten().tolist() == reached
            kept = [i for i in range(WIDTH) if i not in reached]
            assert torch.equal(dirty[0, kept], was[0, kept])
            assert torch.equal(dirty[1], was[1]), "another row"


@both
def test_bfloat16_convolution_sums_in_fp32_and_rounds_once_before_the_residual(prepare, finish) -> None:
    given = branch(torch.bfloat16, width=8, hidden=128)
    prepared, finish_delta = prepare(*given.arguments())
    assert prepared.dtype == finish_delta.dtype == torch.bfloat16
    branches = torch.stack([oracles.grouped_convolution(given.z[b], given.base[1], finish_delta[b]) for b in range(2)])
    exact = given.x.double() + branches.float().bfloat16().double()
    oracles.rounds_like(finish(given.x, given.z, given.base, finish_delta), exact)
    with pytest.raises(AssertionError):
        oracles.rounds_like(finish(given.x, given.z, given.base, finish_delta), given.x.double() + branches)
    for row in range(2):
        delta = given.delta(row)
        oracles.close(finish_delta[row], delta[:, 1], 2.0**-6)
        oracles.close(
            prepared[row], oracles.grouped_convolution(given.normalised(row), given.base[0], delta[:, 0]), 0.04
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [64, 1040])
def test_a_branch_begins_alike_after_another_and_after_the_embedding(hidden: int, dtype: torch.dtype) -> None:
    """1,040 channels: more than one block, and not a whole number of them."""
    given = branch(dtype, hidden=hidden)
    left = leave_on_device(given.x, given.z, given.base, prepare_on_device(*given.arguments())[1], given.norm)
    entered = enter_triton(left.x, given.norm.to(DEVICE))
    told = enter_reference(left.x.cpu(), given.norm)
    for residual in (left, entered):
        assert torch.equal(residual.x.cpu(), told.x) and torch.equal(residual.scaled.cpu(), told.scaled)
        oracles.close(residual.squares.cpu().sum(-1), told.x.double().square().sum(-1), 1e-5)


def test_the_projection_is_the_same_however_its_channels_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for all of H, or many: 11 steps over 1, 4 and 11 shares."""
    given = branch(hidden=352)
    expected = prepare_as_told(*given.arguments())
    for splits in (1, 4, 11):
        tiling = Tiling(rows=16, weights=32, depth=32, splits=splits, stages=2, warps=4)
        monkeypatch.setattr(grouped_convolution, "streaming", lambda *shape, tiling=tiling: tiling)
        for actual, reference in zip(prepare_on_device(*given.arguments()), expected, strict=True):
            oracles.close(actual, reference, 1e-5)


def test_a_row_of_zeros_gives_zeros() -> None:
    given = branch()
    given.x[0] = 0.0
    prepared, finish_delta = prepare_on_device(*given.arguments())
    assert not bool(prepared[0].any()) and not bool(finish_delta[0].any())
    assert bool(prepared[1].any())


def test_the_convolution_kernels_refuse_what_does_not_fit() -> None:
    given = branch()
    delta = torch.zeros(2, WIDTH, 2, 4)
    with pytest.raises(ValueError, match=r"projection: 18 rows, must be 2 \* 2 taps"):
        prepare_on_device(given.x, given.norm, given.base, torch.zeros(18, HIDDEN))
    with pytest.raises(ValueError, match=r"norm: torch.bfloat16, must be torch.float32"):
        prepare_on_device(given.x, given.norm.bfloat16(), given.base, given.projection)
    with pytest.raises(ValueError, match="residual: shape"):
        finish_on_device(given.x[:1], given.z, given.base, delta)
    with pytest.raises(ValueError, match="finish_delta: 3 groups, must divide the 64 channels"):
        finish_on_device(given.x, given.z, given.base, delta[..., :3])
