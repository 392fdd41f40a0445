"""Every sampling control at every verified position: operators against FP64, and the joint law of three tokens.

The law is that of a target over 8 public rows whose every step is adjusted by its own history (decision 12). Rows play
whole rounds with DFlash2 proposals, ragged extents and keys used again after a rejection; a history that is counted
once a round, without the drafts before a column, must fail the same test.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from kernels.acceptance import Proposal, RowSampling, accept
from kernels.logprobs import token_logprobs
from kernels.masking import TokenMasks, pack
from kernels.penalties import RowPenalties, adjust_logits, adjust_logits_reference, adjust_logits_triton
from kernels.sampling import processed_distribution
from kernels.selector import select_path
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, poison_new_memory
from tests.kernels.masks import masks_of
from tests.kernels.test_acceptance_law import COLUMNS, ROWS, TOKENS, VOCABULARY, controls, drafts, target_logits

PROMPT = (0, 3)
"""The prompt; its last token is the first anchor, so anchors begin with PROMPT[-1]."""
ENDS = (1, 6)


@dataclass(frozen=True)
class Controls:
    """One setting of all controls, the same for every row."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[float, ...] = (0.0,) * VOCABULARY
    min_tokens: int = 0

    def adjusted(self, logits: Sequence[float], generated: Sequence[int]) -> list[float]:
        """FP64, written from decision 12: bias, repetition, presence and frequency, min_tokens."""
        out = [value + added for value, added in zip(logits, self.bias, strict=True)]
        for token in set(PROMPT) | set(generated):
            out[token] = out[token] / self.repetition if out[token] > 0 else out[token] * self.repetition
        for token in set(generated):
            out[token] -= self.presence + self.frequency * list(generated).count(token)
        if len(generated) < self.min_tokens:
            for token in ENDS:
                out[token] = -math.inf
        return out

    def law(self, logits: Sequence[float], generated: Sequence[int]) -> list[float]:
        """p of the next token: temperature, top-k, top-p, min-p, renormalise."""
        p = oracles.processed(self.adjusted(logits, generated), self.temperature, self.top_k, self.top_p)
        kept = [value if value >= self.min_p * max(p) else 0.0 for value in p]
        return [value / sum(kept) for value in kept]

    def joint(self) -> torch.Tensor:
        """The law of three tokens after the prompt, FP64 [8, 8, 8]."""
        logits = target_logits().double().tolist()
        joint = torch.zeros(VOCABULARY, VOCABULARY, VOCABULARY, dtype=torch.float64)
        for first, second, third in itertools.product(range(VOCABULARY), repeat=3):
            probability = self.law(logits[PROMPT[-1]], [])[first]
            if probability:
                probability *= self.law(logits[first], [first])[second]
            if probability:
                probability *= self.law(logits[second], [first, second])[third]
            joint[first, second, third] = probability
        return joint

    def rows(self, reproducible: bool = False) -> RowSampling:
        return replace(
            controls(),
            temperature=torch.full((ROWS,), self.temperature),
            top_k=torch.full((ROWS,), self.top_k),
            top_p=torch.full((ROWS,), self.top_p),
            min_p=torch.full((ROWS,), self.min_p) if self.min_p else None,
            reproducible=torch.full((ROWS,), True) if reproducible else None,
        )

    def penalties(self, counts: torch.Tensor) -> RowPenalties:
        rows = len(counts)
        in_prompt = torch.zeros(rows, VOCABULARY, dtype=torch.bool)
        in_prompt[:, list(PROMPT)] = True
        return RowPenalties(
            torch.full((rows,), self.repetition),
            torch.full((rows,), self.presence),
            torch.full((rows,), self.frequency),
            torch.tensor(self.bias).expand(rows, -1),
            in_prompt,
            counts,
        )


CASES = {
    "bias": Controls(bias=(0.0, 2.0, 0.0, 0.0, -3.0, 0.0, 0.0, 1.0)),
    "repetition": Controls(repetition=2.5),
    "repetition below 1": Controls(repetition=0.5),
    "presence": Controls(presence=1.5),
    "frequency": Controls(frequency=1.2),
    "negative frequency": Controls(frequency=-1.0),
    "min-p": Controls(min_p=0.2),
    "top-p": Controls(top_p=0.7),
    "min_tokens": Controls(min_tokens=2),
    "all together": Controls(0.9, 6, 0.9, 0.05, 1.4, 0.3, 0.5, (0.5,) + (0.0,) * 6 + (-0.5,), 1),
}


def forbidden(min_tokens: int, published: torch.Tensor) -> torch.Tensor:
    """Bool [R, W, V]: ends before min_tokens, W = COLUMNS + 1."""
    early = published[:, None] + torch.arange(COLUMNS + 1) < min_tokens
    mask = torch.zeros(len(published), COLUMNS + 1, VOCABULARY, dtype=torch.bool)
    for token in ENDS:
        mask[:, :, token] = early
    return mask


def play(case: Controls, kind: str, fault: str = "", one_hot: bool = False, reproducible: bool = False) -> torch.Tensor:
    """Three tokens a row, int64 [ROWS, 3]."""
    logits, sampling, source = target_logits(), case.rows(reproducible), drafts(kind)
    tokens = torch.zeros(ROWS, TOKENS + COLUMNS + 1, dtype=torch.int64)
    row = torch.arange(ROWS)
    frontier = torch.zeros(ROWS, dtype=torch.int64)
    anchors = torch.full((ROWS,), PROMPT[-1])
    counts = torch.zeros(ROWS, VOCABULARY)
    while bool((frontier < TOKENS).any()):
        extents = (row + frontier) % (COLUMNS + 1)
        hidden = torch.ones(ROWS, COLUMNS, source.codebook.shape[1])
        candidates = source.candidates[anchors]
        path, law = select_path(
            candidates,
            source.unary[anchors],
            hidden,
            source.codebook,
            source.codebook.roll(1, 0),
            anchors,
            frontier,
            sampling.temperature,
            sampling.seeds,
            sampling.sub,
            sampling.reproducible,
        )
        proposal = Proposal(path) if one_hot else Proposal(path, candidates, law)
        inputs = torch.cat((anchors[:, None], path), dim=1)
        history = torch.full_like(path, VOCABULARY) if fault == "once a round" else path
        adjusted = adjust_with(case, logits[inputs], history, counts, frontier)
        verdict = accept(adjusted, proposal, extents, frontier, sampling)
        running = frontier < TOKENS
        for i in range(COLUMNS + 1):
            count = running & (i <= verdict.accepted)
            tokens[row[count], frontier[count] + i] = verdict.licensed[count, i]
            counts[row[count], verdict.licensed[count, i]] += 1
        anchors = torch.where(running, verdict.licensed[row, verdict.accepted], anchors)
        frontier = torch.where(running, frontier + verdict.accepted + 1, frontier)
    return tokens[:, :TOKENS]


def adjust_with(
    case: Controls, logits: torch.Tensor, history: torch.Tensor, counts: torch.Tensor, frontier: torch.Tensor
) -> torch.Tensor:
    """A history of VOCABULARY (a token that does not exist) leaves a column with the committed counts alone."""
    if bool((history == VOCABULARY).any()):
        alone = [
            adjust_logits(logits[:, i : i + 1], history[:, :0], case.penalties(counts)) for i in range(COLUMNS + 1)
        ]
        return torch.cat(alone, dim=1).masked_fill(forbidden(case.min_tokens, frontier), -torch.inf)
    return adjust_logits(logits, history, case.penalties(counts), masks_of(forbidden(case.min_tokens, frontier)))


def p_value(tokens: torch.Tensor, joint: torch.Tensor) -> float:
    cell = (tokens[:, 0] * VOCABULARY + tokens[:, 1]) * VOCABULARY + tokens[:, 2]
    return oracles.chi_square(torch.bincount(cell, minlength=VOCABULARY**3), joint)


@pytest.mark.parametrize("name", CASES)
def test_three_tokens_have_exactly_the_law_of_their_controls(name: str) -> None:
    joint = CASES[name].joint()
    for kind in ("good", "bad"):
        assert p_value(play(CASES[name], kind), joint) > 1e-4, kind
    assert p_value(play(CASES[name], "good", one_hot=True), joint) > 1e-4


@pytest.mark.parametrize("name", ["frequency", "presence", "repetition", "negative frequency"])
def test_a_history_that_is_counted_once_a_round_fails_the_same_test(name: str) -> None:
    assert p_value(play(CASES[name], "good", fault="once a round"), CASES[name].joint()) < 1e-6


@pytest.mark.parametrize("name", ["min-p", "all together"])
def test_reproducible_rows_have_the_same_law_and_tokens_that_do_not_depend_on_the_drafter(name: str) -> None:
    case = CASES[name]
    good, bad = (play(case, kind, reproducible=True) for kind in ("good", "bad"))
    assert torch.equal(good, bad) and torch.equal(good, play(case, "good", one_hot=True))
    assert p_value(good, case.joint()) > 1e-4


# ------------------------------------------------------------------------------------------------ operators


def test_adjusted_logits_equal_the_definition_at_every_column() -> None:
    case = replace(CASES["all together"], min_tokens=0)
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(5, COLUMNS + 1, VOCABULARY, generator=generator)
    path = torch.randint(0, VOCABULARY, (5, COLUMNS), generator=generator)
    before = [[], [2], [2, 2, 5], [7, 0, 0], [1, 2, 3, 4]]
    counts = torch.stack([torch.bincount(torch.tensor(g, dtype=torch.int64), minlength=VOCABULARY) for g in before])
    adjusted = adjust_logits(logits, path, case.penalties(counts.float()))
    for row, generated in enumerate(before):
        for column in range(COLUMNS + 1):
            history = [*generated, *path[row, :column].tolist()]
            expected = torch.tensor(case.adjusted(logits[row, column].tolist(), history))
            oracles.close(adjusted[row, column], expected, 1e-5)


@pytest.mark.parametrize("which", ["penalties", "masks", "both"])
def test_the_kernel_adjusts_to_the_references_bits(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over rows at a stride, several programs wide; every other lane has a mask."""
    poison_new_memory(monkeypatch)
    generator = torch.Generator().manual_seed(5)
    batch, width, vocabulary = 3, 3, 2100
    logits = 3 * torch.randn(batch, width, vocabulary + 4, generator=generator)
    path = torch.randint(0, 9, (batch, width - 1), generator=generator)
    penalties = RowPenalties(
        torch.tensor([1.0, 1.3, 0.7]),
        torch.tensor([0.0, 0.4, -0.3]),
        torch.tensor([0.0, 0.5, 0.2]),
        torch.randn(batch, vocabulary, generator=generator),
        torch.rand(batch, vocabulary, generator=generator) < 0.3,
        torch.randint(0, 3, (batch, vocabulary), generator=generator).float(),
    )
    allowed = torch.rand(2, width, vocabulary, generator=generator) < 0.5
    controls = (
        penalties if which != "masks" else None,
        TokenMasks(pack(allowed), torch.tensor([1, -1, 0])) if which != "penalties" else None,
    )
    on_device = (
        None if facts is None else type(facts)(*(value.to(DEVICE) for value in vars(facts).values()))
        for facts in controls
    )
    expected = adjust_logits_reference(logits[..., :vocabulary], path, *controls)
    got = adjust_logits_triton(logits.to(DEVICE)[..., :vocabulary], path.to(DEVICE), *on_device)  # type: ignore[arg-type]
    assert torch.equal(got.cpu(), expected)


def test_neutral_controls_change_no_bit() -> None:
    logits = torch.randn(2, COLUMNS + 1, VOCABULARY, generator=torch.Generator().manual_seed(4))
    path = torch.tensor([[1, 1, 2], [3, 4, 5]])
    counts = torch.ones(2, VOCABULARY)
    assert torch.equal(adjust_logits(logits, path, Controls().penalties(counts)), logits)
    assert adjust_logits(logits, path) is logits


def test_min_p_keeps_tokens_of_at_least_that_share_of_the_best_after_top_p() -> None:
    p = torch.tensor([[0.4, 0.3, 0.16, 0.1, 0.04]])
    one = torch.ones(1)

    def kept(top_p: float, min_p: float) -> list[int]:
        got = processed_distribution(p.log(), one, torch.zeros(1).long(), one * top_p, one * min_p)
        oracles.close(got.sum(-1), torch.ones(1), 1e-6)
        return got[0].nonzero().flatten().tolist()

    assert kept(1.0, 0.3) == [0, 1, 2]
    assert kept(1.0, 0.9) == [0]
    assert kept(0.75, 0.3) == [0, 1, 2] and kept(0.65, 0.3) == [0, 1]
    assert kept(1.0, 0.0) == [0, 1, 2, 3, 4] and kept(1.0, 1.0) == [0]


def test_logprobs_are_the_log_softmax_and_alternatives_come_best_first_with_ties_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [0.0, 0.0, 0.0, 0.0]])
    own, ids, best = token_logprobs(logits, torch.tensor([0, 3]), 3)
    exact = logits.double().log_softmax(-1)
    oracles.close(own, exact[[0, 1], [0, 3]], 1e-6)
    assert ids.tolist() == [[1, 2, 0], [0, 1, 2]]
    oracles.close(best, exact.gather(-1, ids), 1e-6)
    assert token_logprobs(logits, torch.tensor([0, 3]), 0)[1].shape == (2, 0)
