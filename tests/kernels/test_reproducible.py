"""What reproducible DFlash2 rows accept: what theory says of two races with one noise, and never more than 1 - TV."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from bench.reproducible import common_mass, race_acceptance
from kernels.acceptance import Proposal, RowSampling, accept
from kernels.selector import select_path
from tests.kernels import oracles

ROWS, VOCABULARY, CANDIDATES = 20_000, 12, 4
TEMPERATURE = 0.9


def scores(kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(target's logits [V], candidates [C], their scores [C])."""
    generator = torch.Generator().manual_seed(51)
    logits = 1.5 * torch.randn(VOCABULARY, generator=generator)
    draft = logits + 0.8 * torch.randn(VOCABULARY, generator=generator)
    unary, candidates = draft.topk(CANDIDATES)
    if kind == "exact":  # nothing but the candidates can come, with the draft's own probabilities
        logits = torch.full_like(logits, -math.inf)
        logits[candidates] = unary
    elif kind == "foreign":
        unary = unary.flip(0)
    return logits, candidates, unary


def laws(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q, FP64 [V] each."""
    logits, candidates, unary = scores(kind)
    q = torch.zeros(VOCABULARY, dtype=torch.float64)
    q[candidates] = (unary.double() / TEMPERATURE).softmax(-1)
    return torch.tensor(oracles.processed(logits.tolist(), TEMPERATURE, 0, 1.0), dtype=torch.float64), q


@functools.cache
def accepted_share(kind: str, reproducible: bool) -> float:
    """Of one draft a row, each row with a seed of its own."""
    logits, candidates, unary = scores(kind)
    ones = torch.ones(ROWS, dtype=torch.int64)
    flags = torch.full((ROWS,), reproducible)
    rows = RowSampling(
        torch.full((ROWS,), TEMPERATURE), ones * 0, torch.ones(ROWS), ones.cumsum(0), ones * 0, reproducible=flags
    )
    candidates = candidates.expand(ROWS, 1, -1)
    codebook = torch.zeros(VOCABULARY, 1)
    drafts, law = select_path(
        candidates,
        unary.expand(ROWS, 1, -1),
        torch.zeros(ROWS, 1, 1),
        codebook,
        codebook,
        ones,
        ones,
        rows.temperature,
        rows.seeds,
        rows.sub,
        rows.reproducible,
    )
    verdict = accept(logits.expand(ROWS, 2, -1), Proposal(drafts, candidates, law), ones, ones, rows)
    return float(verdict.accepted.double().mean())


def error(share: float) -> float:
    """Four standard deviations of a share of ROWS."""
    return 4 * math.sqrt(share * (1 - share) / ROWS) + 1e-9


@pytest.mark.parametrize("kind", ["near", "foreign", "exact"])
def test_reproducible_rows_accept_what_two_races_with_one_noise_have_in_common(kind: str) -> None:
    p, q = laws(kind)
    theory = race_acceptance(p, q)
    assert abs(accepted_share(kind, True) - theory) <= error(theory)


@pytest.mark.parametrize("kind", ["near", "foreign", "exact"])
def test_normal_rows_accept_the_best_possible_share(kind: str) -> None:
    best = float(common_mass(*laws(kind)))
    assert abs(accepted_share(kind, False) - best) <= error(best)


def test_the_cost_of_reproducibility_lies_within_its_bounds() -> None:
    for kind in ("near", "foreign"):
        p, q = laws(kind)
        best = float(common_mass(p, q))
        race = race_acceptance(p, q)
        assert best / (2 - best) < race < best < 1  # (1 - TV) / (1 + TV) and 1 - TV
    p, q = laws("exact")
    assert race_acceptance(p, q) == pytest.approx(1.0) and accepted_share("exact", True) == 1.0
