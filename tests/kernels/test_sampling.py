"""The processed distribution against a plain FP64 sort, row by row."""

from __future__ import annotations

import pytest
import torch

from kernels.sampling import processed_distribution
from tests.kernels import oracles


def process(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    n = logits.shape[0]
    p = processed_distribution(logits, torch.full((n,), temperature), torch.full((n,), top_k), torch.full((n,), top_p))
    assert p.dtype == torch.float32
    return p


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 4.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 1000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.93, 1.0])
def test_temperature_top_k_and_top_p_apply_in_this_order(temperature: float, top_k: int, top_p: float) -> None:
    logits = random_logits(6, 64)
    got = process(logits, temperature, top_k, top_p)
    expected = torch.tensor([oracles.processed(row.tolist(), temperature, top_k, top_p) for row in logits])
    visible = expected > 1e-5  # below, FP32 sums cannot say on which side of top_p a token lies
    assert torch.equal((got > 0) & visible, visible)
    assert float(got[expected == 0].sum()) == 0.0
    oracles.close(got, expected, 1e-5)
    oracles.close(got.sum(-1), torch.ones(6), 1e-6)


def test_rows_with_their_own_controls_share_a_batch() -> None:
    logits = random_logits(6, 50, seed=1)
    temperature = torch.tensor([0.0, 0.8, 1.0, -1.0, 2.0, 1e-3])
    top_k = torch.tensor([0, 0, 3, 7, 60, 0])
    top_p = torch.tensor([0.5, 1.0, 0.9, 1.0, 0.4, 0.9])
    got = processed_distribution(logits, temperature, top_k, top_p)
    for row in range(6):
        controls = float(temperature[row]), int(top_k[row]), float(top_p[row])
        expected = torch.tensor(oracles.processed(logits[row].tolist(), *controls))
        oracles.close(got[row], expected, 1e-5)
        alone = processed_distribution(
            logits[row : row + 1], temperature[row : row + 1], top_k[row : row + 1], top_p[row : row + 1]
        )
        oracles.close(got[row], alone[0], 1e-6)
    for greedy in (0, 3):
        assert got[greedy].max() == 1.0 and got[greedy].argmax() == logits[greedy].argmax()


def test_ties_at_the_boundary_of_top_k_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    kept = process(logits, 1.0, 4, 1.0)[0].nonzero().flatten().tolist()
    assert kept == [0, 1, 2, 3]
    assert process(logits, 0.0, 0, 1.0).argmax() == 1


def test_ties_at_the_boundary_of_top_p_go_to_the_lower_id() -> None:
    # four equal tokens of mass 1/4: 0.5 is reached by exactly two of them
    kept = process(torch.zeros(1, 4), 1.0, 0, 0.5)[0]
    assert kept.tolist() == [0.5, 0.5, 0.0, 0.0]
    assert process(torch.zeros(1, 4), 1.0, 0, 0.51)[0].nonzero().numel() == 3


def test_top_p_counts_the_mass_that_top_k_kept() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # of the kept 0.4 + 0.3 the first token has 57 %: 0.55 keeps one token, of the whole mass it would keep two
    assert process(logits, 1.0, 2, 0.55)[0].nonzero().numel() == 1
    assert process(logits, 1.0, 0, 0.55)[0].nonzero().numel() == 2


def test_the_best_token_survives_any_top_p() -> None:
    for top_p in (0.0, 1e-9):
        p = process(random_logits(4, 30, seed=2), 1.0, 0, top_p)
        assert bool((p.max(-1).values == 1.0).all())


@pytest.mark.parametrize("vocabulary", [1, 7])
def test_a_top_k_beyond_the_vocabulary_keeps_all(vocabulary: int) -> None:
    logits = random_logits(2, vocabulary, seed=3)
    oracles.close(process(logits, 1.3, 10**9, 1.0), (logits.double() / 1.3).softmax(-1), 1e-6)


def test_masked_tokens_have_no_mass_and_the_rest_sums_to_one() -> None:
    logits = random_logits(3, 40, seed=4)
    logits[:, ::2] = -float("inf")
    p = process(logits, 1.0, 30, 0.99)
    assert float(p[:, ::2].sum()) == 0.0
    oracles.close(p.sum(-1), torch.ones(3), 1e-6)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float) -> None:
    logits = random_logits(4, 30, seed=6)
    assert torch.equal(process(logits, temperature, 0, 1.0), process(logits, 0.0, 0, 1.0))


@pytest.mark.parametrize("vocabulary", [64, 8192, 100_000])
def test_a_top_p_of_one_keeps_every_token(vocabulary: int) -> None:
    """A running FP32 sum reaches the whole mass before the tail: that must not cut it."""
    logits = random_logits(4, vocabulary, seed=5)
    assert not bool(((process(logits, 1.0, 0, 1.0) == 0) & (logits.double().softmax(-1) > 1e-30)).any())
