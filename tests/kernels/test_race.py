"""Races: the right law, the oracle's winners, and a kernel that agrees with the reference on any vocabulary."""

from __future__ import annotations

import pytest
import torch

from kernels.race import TOKENS_PER_PROGRAM, race, race_reference, race_triton
from kernels.randomness import CORRECTION, TARGET
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, poison_new_memory


def on_device(
    weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, purpose: int, sub: torch.Tensor
) -> torch.Tensor:
    """The kernel, on the card where there is one."""
    return race_triton(weights.to(DEVICE), seeds.to(DEVICE), positions.to(DEVICE), purpose, sub.to(DEVICE)).cpu()


def test_a_draw_does_not_depend_on_batch_rows_or_neighbours() -> None:
    weights = torch.rand(6, 50, generator=torch.Generator().manual_seed(1))
    seeds, positions, sub = torch.tensor(((4, 4, 9, 9, 1, 4), (10, 11, 10, 99, 0, 10), (0, 0, 0, 1, 0, 1)))
    together = race(weights, seeds, positions, TARGET, sub)
    shuffle = torch.tensor([5, 3, 0, 4, 1, 2])
    again = race(weights[shuffle], seeds[shuffle], positions[shuffle], TARGET, sub[shuffle])
    assert torch.equal(together[shuffle], again)
    for row in range(6):
        one = slice(row, row + 1)
        assert torch.equal(race(weights[one], seeds[one], positions[one], TARGET, sub[one]), together[one])


def test_a_race_is_won_by_the_least_noise_over_weight() -> None:
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(40, 30, generator=generator) ** 8
    weights[torch.rand(40, 30, generator=generator) < 0.4] = 0.0
    weights[:, 7] += 1e-3
    seeds = torch.randint(-(2**62), 2**62, (40,), generator=generator)
    positions, sub = torch.arange(40) * 17, torch.arange(40) % 3
    got = race(weights, seeds, positions, CORRECTION, sub).tolist()
    for row in range(40):
        w = weights[row].double().tolist()
        winner, margin = oracles.race(w, int(seeds[row]), int(positions[row]), CORRECTION, int(sub[row]))
        assert margin > 1e-5, "a near tie: choose other inputs"
        assert got[row] == winner


@pytest.mark.parametrize("purpose", [TARGET, CORRECTION])
def test_winners_follow_the_weights_and_zero_weights_never_win(purpose: int) -> None:
    n = 30_000
    weights = torch.tensor([0.0, 5.0, 1.0, 0.0, 0.25, 3.0, 1e-30, 0.75, 0.0])
    expanded = weights.expand(n, -1)
    zero = torch.zeros(1, dtype=torch.int64).expand(n)
    for seeds, positions in ((torch.arange(n), zero), (zero, torch.arange(n))):
        winners = race(expanded, seeds, positions, purpose, zero)
        assert oracles.chi_square(torch.bincount(winners, minlength=9), weights) > 1e-4


def test_the_law_of_a_race_would_not_pass_for_another_one() -> None:
    """The test above can fail: a tenth of one weight moved to another is seen."""
    n = 30_000
    zero = torch.zeros(1, dtype=torch.int64).expand(n)
    winners = race(torch.tensor([5.0, 3.0, 2.0]).expand(n, -1), torch.arange(n), zero, TARGET, zero)
    assert oracles.chi_square(torch.bincount(winners, minlength=3), torch.tensor([5.3, 2.7, 2.0])) < 1e-6


def test_scaling_all_weights_changes_no_winner() -> None:
    weights = torch.rand(200, 20, generator=torch.Generator().manual_seed(3))
    seeds, zero = torch.arange(200), torch.zeros(1, dtype=torch.int64).expand(200)
    plain = race(weights, seeds, zero, TARGET, zero)
    assert torch.equal(race(weights * 2.0**-20, seeds, zero, TARGET, zero), plain)


def test_zero_weights_never_win_a_race_of_tiny_weights() -> None:
    zeros = torch.zeros(1000, dtype=torch.int64)
    winners = race(torch.tensor([0.0, 1e-40, 0.0]).expand(1000, -1), torch.arange(1000), zeros, TARGET, zeros)
    assert set(winners.tolist()) == {1}


# ------------------------------------------------------------------------------------------------ kernel


@pytest.mark.parametrize("vocabulary", [1, 3, TOKENS_PER_PROGRAM, TOKENS_PER_PROGRAM + 1, 2 * TOKENS_PER_PROGRAM + 50])
@pytest.mark.parametrize("share", [1.0, 0.002])
def test_the_kernel_crowns_the_references_winners(
    vocabulary: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    weights = torch.rand(7, vocabulary, generator=generator) ** 8 + 1e-9
    weights[torch.rand(7, vocabulary, generator=generator) > share] = 0.0
    weights[:, vocabulary // 2] = 0.3
    wider = torch.full((7, vocabulary + 5), oracles.POISON)
    wider[:, :vocabulary] = weights
    seeds = torch.randint(-(2**62), 2**62, (7,), generator=generator)
    positions, sub = torch.arange(7) * 17, torch.arange(7) % 3
    expected = race_reference(weights, seeds, positions, CORRECTION, sub)
    poison_new_memory(monkeypatch)
    assert torch.equal(on_device(wider[:, :vocabulary], seeds, positions, CORRECTION, sub), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_in_the_kernel_weights_of_zero_never_win() -> None:
    zeros, weights = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3 * TOKENS_PER_PROGRAM)
    weights[0, 2000] = 1e-40
    winners = on_device(weights, zeros, zeros, TARGET, zeros).tolist()
    assert winners == [2000, 0]  # a row without runners has no winner; what it gives is an id


def test_what_a_race_does_not_take_is_refused_by_name() -> None:
    zeros = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"weights: torch\.float64, must be torch\.float32"):
        race_triton(torch.ones(2, 3, dtype=torch.float64), zeros, zeros, TARGET, zeros)
    with pytest.raises(ValueError, match=r"sub: torch\.int32, must be torch\.int64"):
        race_triton(torch.ones(2, 3), zeros, zeros, TARGET, zeros.int())
