"""The law of several tokens, over whole turns of rounds with drafts: exactly the target's (decisions 14 and 15).

The target is a Markov chain over 8 public rows, so that the law of three tokens is known. Each of many rows has a seed
of its own and plays rounds (propose, verify, accept) until three tokens are published; extents are ragged and differ
from round to round. Faulty rules, planted here, must fail the very same test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kernels.acceptance import Proposal, RowSampling, Verdict, accept
from kernels.selector import select_path
from tests.kernels import oracles

VOCABULARY, COLUMNS, CHOICES, RANK = 8, 3, 4, 3
TOKENS = 3
ROWS = 24_000
TEMPERATURE, TOP_K = 0.8, 5

Rule = Callable[[torch.Tensor, Proposal, torch.Tensor, torch.Tensor, RowSampling], Verdict]


@dataclass(frozen=True)
class Drafts:
    """Proposals of `select_path`, as functions of the anchor alone: `candidates` [V, K, C], `unary` [V, K, C]."""

    candidates: torch.Tensor
    unary: torch.Tensor
    codebook: torch.Tensor

    def propose(self, anchors: torch.Tensor, frontier: torch.Tensor, controls: RowSampling) -> Proposal:
        hidden = torch.ones(len(anchors), COLUMNS, RANK)
        candidates = self.candidates[anchors]
        path, law = select_path(
            candidates,
            self.unary[anchors],
            hidden,
            self.codebook,
            self.codebook.roll(1, 0),
            anchors,
            frontier,
            controls.temperature,
            controls.seeds,
            controls.sub,
        )
        return Proposal(path, candidates, law)


def target_logits() -> torch.Tensor:
    """Row v holds the logits of what follows token v. Top-k cuts three tokens of each, whose p is 0."""
    return torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(21))


def transition() -> torch.Tensor:
    table = [oracles.processed(row.tolist(), TEMPERATURE, TOP_K, 1.0) for row in target_logits()]
    return torch.tensor(table, dtype=torch.float64)


def drafts(kind: str) -> Drafts:
    generator = torch.Generator().manual_seed(22)
    logits = target_logits()
    unary = torch.randn(VOCABULARY, COLUMNS, CHOICES, generator=generator)
    codebook = torch.randn(VOCABULARY, RANK, generator=generator)
    candidates = torch.rand(VOCABULARY, COLUMNS, VOCABULARY, generator=generator).argsort(-1)[..., :CHOICES]
    if kind == "good":  # the target's best tokens with nearly its own scores, for the first column at least
        best = logits.topk(CHOICES, dim=-1)
        candidates = best.indices[:, None].expand(-1, COLUMNS, -1).contiguous()
        unary = best.values[:, None] + 0.2 * unary
        codebook = codebook * 0.1
    elif kind == "adversarial":  # mostly tokens of p = 0, and one that has some
        order = logits.argsort(-1)
        candidates = order[:, None, [0, 1, 4, 2]].expand(-1, COLUMNS, -1).contiguous()
        unary = torch.tensor([1.5, 1.0, 1.0, 0.0]) + 0.1 * unary
    elif kind == "one candidate":
        candidates, unary = candidates[..., :1].contiguous(), unary[..., :1]
    return Drafts(candidates, unary, codebook)


def controls() -> RowSampling:
    return RowSampling(
        torch.full((ROWS,), TEMPERATURE),
        torch.full((ROWS,), TOP_K),
        torch.ones(ROWS),
        torch.arange(ROWS),
        torch.zeros(ROWS, dtype=torch.int64),
    )


def play(rule: Rule, source: Drafts, one_hot: bool = False, extent: int | None = None) -> tuple[torch.Tensor, float]:
    """Three tokens a row, and the share of checked drafts that were accepted. `extent` fixes P, else it is ragged."""
    logits, sampling = target_logits(), controls()
    tokens = torch.zeros(ROWS, TOKENS + COLUMNS + 1, dtype=torch.int64)
    row = torch.arange(ROWS)
    frontier, anchors = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int64)
    checked = accepted = 0
    while bool((frontier < TOKENS).any()):
        extents = (row + frontier) % (COLUMNS + 1) if extent is None else torch.full((ROWS,), extent)
        proposal = source.propose(anchors, frontier, sampling)
        inputs = torch.cat((anchors[:, None], proposal.drafts), dim=1)
        if one_hot:
            proposal = Proposal(proposal.drafts)
        verdict = rule(logits[inputs], proposal, extents, frontier, sampling)
        checked += int(extents.sum())
        accepted += int(verdict.accepted.sum())
        running = frontier < TOKENS
        for i in range(COLUMNS + 1):
            count = running & (i <= verdict.accepted)
            tokens[row[count], frontier[count] + i] = verdict.licensed[count, i]
        anchors = torch.where(running, verdict.licensed[row, verdict.accepted], anchors)
        frontier = torch.where(running, frontier + verdict.accepted + 1, frontier)
    return tokens[:, :TOKENS], accepted / max(checked, 1)


def p_value(tokens: torch.Tensor) -> float:
    """Of the joint law of all three tokens, 512 cells, from anchor 0."""
    p = transition()
    joint = p[0][:, None, None] * p[:, :, None] * p[None, :, :]
    cell = (tokens[:, 0] * VOCABULARY + tokens[:, 1]) * VOCABULARY + tokens[:, 2]
    return oracles.chi_square(torch.bincount(cell, minlength=VOCABULARY**3), joint)


def planted(fault: str) -> Rule:
    """The rule for a retained q in FP64, with one fault ("none" for the right rule), and chance of its own."""
    generator = torch.Generator().manual_seed(23)

    def rule(
        logits: torch.Tensor,
        proposal: Proposal,
        extent: torch.Tensor,
        frontier: torch.Tensor,
        sampling: RowSampling,
    ) -> Verdict:
        assert proposal.candidates is not None and proposal.law is not None
        inputs = (logits[:, :, None, :] == target_logits()).all(-1).int().argmax(-1)  # which token's row this is
        p = transition()[inputs]
        law = proposal.law.double()
        if fault == "the q of another temperature":
            law = law.sqrt() / law.sqrt().sum(-1, keepdim=True)
        q = torch.zeros_like(p[:, :-1]).scatter_add_(-1, proposal.candidates, law)
        p_draft, q_draft = (t.gather(-1, proposal.drafts[..., None])[..., 0] for t in (p[:, :-1], q))
        u = torch.rand(q_draft.shape, generator=generator, dtype=torch.float64)
        if fault == "cut at the first draft with p = 0":
            possible = (p_draft > 0).int().cumprod(-1).sum(-1)
            extent = torch.minimum(extent, possible)
        stands = u < p_draft if fault == "q is left out" else u * q_draft < p_draft
        if fault == "p over the largest p":
            stands = u * p[:, :-1].amax(-1) < p_draft
        column = torch.arange(COLUMNS)
        accepted = (stands & (column < extent[:, None])).int().cumprod(-1).sum(-1)
        row = torch.arange(len(extent))
        weights = p[row, accepted]
        rejected = accepted < extent
        residual = (weights - torch.nn.functional.pad(q, (0, 0, 0, 1))[row, accepted]).clamp(min=0)
        if fault != "corrections from p":
            weights = torch.where((rejected & (residual.sum(-1) > 0))[:, None], residual, weights)
        licensed = torch.nn.functional.pad(proposal.drafts, (0, 1))
        licensed[row, accepted] = torch.multinomial(weights, 1, generator=generator)[:, 0]
        return Verdict(licensed, accepted)

    return rule


@pytest.mark.parametrize("kind", ["good", "bad", "adversarial", "one candidate"])
def test_three_tokens_of_dflash2_have_exactly_the_targets_law(kind: str) -> None:
    tokens, acceptance = play(accept, drafts(kind))
    assert p_value(tokens) > 1e-4
    assert acceptance > 0.3 if kind == "good" else acceptance < 0.3


def test_the_law_holds_when_every_round_checks_all_drafts() -> None:
    assert p_value(play(accept, drafts("good"), extent=COLUMNS)[0]) > 1e-4


def test_the_right_rule_with_other_chance_passes_too() -> None:
    assert p_value(play(planted("none"), drafts("bad"))[0]) > 1e-4


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("q is left out", "good"),
        ("q is left out", "bad"),
        ("p over the largest p", "good"),
        ("p over the largest p", "bad"),
        ("corrections from p", "good"),
        ("corrections from p", "bad"),
        ("cut at the first draft with p = 0", "bad"),
        ("cut at the first draft with p = 0", "adversarial"),
        ("the q of another temperature", "good"),
    ],
)
def test_a_planted_fault_fails_the_same_test(fault: str, kind: str) -> None:
    assert p_value(play(planted(fault), drafts(kind))[0]) < 1e-6


def test_one_hot_drafts_have_the_targets_law_and_change_no_token() -> None:
    """The tokens of a seed are the same with good drafts, bad ones, ragged or full extents, and none at all."""
    plain = play(accept, drafts("bad"), one_hot=True, extent=0)[0]
    assert p_value(plain) > 1e-4
    for kind in ("good", "bad", "adversarial"):
        assert torch.equal(play(accept, drafts(kind), one_hot=True)[0], plain)
    tokens, acceptance = play(accept, drafts("good"), one_hot=True, extent=COLUMNS)
    assert torch.equal(tokens, plain)
    assert acceptance > 0.05
