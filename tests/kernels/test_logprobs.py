"""Log-probabilities of what the controls leave: the reference against FP64, and the kernels' cuts against it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernels.acceptance import RowSampling
from kernels.logprobs import processed_logits, processed_logits_reference, processed_logits_triton
from kernels.ordering import keys_of
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, poison_new_memory, there
from tests.kernels.test_acceptance_kernels import OF_LANES, SETTINGS, controls_of, random_logits

WIDTH = 2


def sampling_of(settings: tuple[tuple[float, int, float, float], ...]) -> RowSampling:
    temperature, top_k, top_p, min_p = controls_of(settings)
    return RowSampling(temperature, top_k, top_p, top_k * 0, top_k * 0, min_p)


def columns(settings: tuple[tuple[float, int, float, float], ...], kind: str) -> torch.Tensor:
    logits = random_logits(len(settings) * WIDTH, kind)
    return logits.view(len(settings), WIDTH, -1)


def test_a_row_has_the_logarithms_of_its_processed_distribution() -> None:
    settings = tuple(one for one in SETTINGS if one[3] == 0.0 and one[0] > 1e-3)
    logits = columns(settings, "random")
    processed = processed_logits_reference(logits, sampling_of(settings))
    for row, (temperature, top_k, top_p, _) in enumerate(settings):
        for column in range(WIDTH):
            law = oracles.processed(logits[row, column].tolist(), temperature, top_k, top_p)
            exact = torch.tensor([math.log(p) if p else -math.inf for p in law])
            assert torch.allclose(processed[row, column], exact, atol=1e-4)


def test_a_greedy_row_has_its_adjusted_logits() -> None:
    logits = columns(((0.0, 3, 0.5, 0.1),), "masked")
    for all_greedy in (False, True):
        sampling = replace(sampling_of(((0.0, 3, 0.5, 0.1),)), all_greedy=all_greedy)
        assert torch.equal(processed_logits(logits, sampling, torch.tensor([1])), logits)


@pytest.mark.parametrize("kind", ["random", "ties", "masked"])
def test_the_cuts_of_a_card_give_the_references_numbers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)
    logits, sampling = columns(OF_LANES, kind), sampling_of(OF_LANES)
    extent = torch.tensor([1, 1, 1, 0, 1])
    found = processed_logits_triton(logits.to(DEVICE), there(sampling), extent.to(DEVICE)).cpu()
    expected = processed_logits_reference(logits, sampling)
    for row, last in enumerate(extent.tolist()):
        mine, theirs = found[row, : last + 1], expected[row, : last + 1]
        assert torch.equal(mine.isinf(), theirs.isinf()) and torch.allclose(mine, theirs, atol=1e-5)


def test_keys_order_scores_as_the_kernels_do() -> None:
    scores = torch.tensor([[0.0, -0.0, 1.5, -2.0, -torch.inf, 1.5, 3e38]])
    assert keys_of(scores)[0].argsort(descending=True).tolist() == [6, 2, 5, 0, 1, 3, 4]
