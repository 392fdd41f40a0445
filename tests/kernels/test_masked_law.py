"""The law under masks that depend on the history, as a grammar's do: exactly the masked target's (decision 15).

As in `test_acceptance_law`, many rows play rounds over 8 public rows until three tokens are published. What may follow
depends on the position and on the token before. A draft that a mask forbids stays in the proposal and is rejected;
cutting the proposal there, or using a mask of another column, must fail the very same test.
"""

from __future__ import annotations

import pytest
import torch

from kernels.acceptance import Proposal, accept
from kernels.masking import pack, unpack
from kernels.penalties import adjust_logits
from tests.kernels import oracles
from tests.kernels.masks import masks_of
from tests.kernels.test_acceptance_law import (
    COLUMNS,
    ROWS,
    TEMPERATURE,
    TOKENS,
    TOP_K,
    VOCABULARY,
    controls,
    drafts,
    target_logits,
)


def grammar() -> torch.Tensor:
    """bool [T, V, V]: which tokens may follow token v at a position; two to six of the eight, others at each."""
    generator = torch.Generator().manual_seed(31)
    scores = torch.rand(TOKENS + COLUMNS + 1, VOCABULARY, VOCABULARY, generator=generator)
    count = torch.randint(2, 7, (*scores.shape[:2], 1), generator=generator)
    return scores.argsort(-1).argsort(-1) < count


def masks(inputs: torch.Tensor, frontier: torch.Tensor) -> torch.Tensor:
    """bool [B, W, V] for `inputs` [B, W], anchor and drafts: columns after a forbidden draft allow everything."""
    table = grammar()
    column = torch.arange(inputs.shape[1])
    place = (frontier[:, None] + column).clamp(max=len(table) - 1)
    allowed = table[place, inputs]
    permitted = allowed[:, :-1].gather(-1, inputs[:, 1:, None])[..., 0].int().cumprod(-1).bool()
    allowed[:, 1:] |= ~permitted[..., None]
    return allowed


def play(kind: str, fault: str = "", one_hot: bool = False, extent: int | None = None) -> tuple[torch.Tensor, float]:
    """Three tokens a row, and the share of checked drafts that were accepted. `extent` fixes P, else it is ragged."""
    logits, sampling, source = target_logits(), controls(), drafts(kind)
    tokens = torch.zeros(ROWS, TOKENS + COLUMNS + 1, dtype=torch.int64)
    row = torch.arange(ROWS)
    frontier, anchors = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int64)
    checked = accepted = 0
    while bool((frontier < TOKENS).any()):
        extents = (row + frontier) % (COLUMNS + 1) if extent is None else torch.full((ROWS,), extent)
        proposal = source.propose(anchors, frontier, sampling)
        inputs = torch.cat((anchors[:, None], proposal.drafts), dim=1)
        allowed = masks(inputs, frontier)
        if fault == "cut at the first forbidden draft":
            possible = allowed[:, :-1].gather(-1, proposal.drafts[..., None])[..., 0].int().cumprod(-1).sum(-1)
            extents = torch.minimum(extents, possible)
        elif fault == "the anchor's mask for every column":
            allowed = allowed[:, :1].expand_as(allowed)
        if one_hot:
            proposal = Proposal(proposal.drafts)
        masked = adjust_logits(logits[inputs], proposal.drafts, masks=masks_of(~allowed))
        verdict = accept(masked, proposal, extents, frontier, sampling)
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
    """Of the joint law of three tokens from anchor 0, computed without the code under test."""
    table, logits = grammar(), target_logits()
    p = torch.zeros(TOKENS, VOCABULARY, VOCABULARY, dtype=torch.float64)
    for place in range(TOKENS):
        for before in range(VOCABULARY):
            permitted = table[place, before].nonzero()[:, 0]
            law = oracles.processed(logits[before, permitted].tolist(), TEMPERATURE, TOP_K, 1.0)
            p[place, before, permitted] = torch.tensor(law, dtype=torch.float64)
    joint = p[0, 0][:, None, None] * p[1][:, :, None] * p[2][None]
    cell = (tokens[:, 0] * VOCABULARY + tokens[:, 1]) * VOCABULARY + tokens[:, 2]
    counts = torch.bincount(cell, minlength=VOCABULARY**3)
    return oracles.chi_square(counts, joint)


@pytest.mark.parametrize("kind", ["good", "bad", "adversarial", "one candidate"])
def test_three_tokens_of_dflash2_have_exactly_the_masked_targets_law(kind: str) -> None:
    tokens, acceptance = play(kind)
    assert p_value(tokens) > 1e-4
    assert acceptance > 0


def test_the_law_holds_under_masks_when_every_round_checks_all_drafts() -> None:
    assert p_value(play("good", extent=COLUMNS)[0]) > 1e-4


@pytest.mark.parametrize("fault", ["cut at the first forbidden draft", "the anchor's mask for every column"])
@pytest.mark.parametrize("kind", ["good", "bad"])
def test_a_fault_in_the_use_of_masks_fails_the_same_test(fault: str, kind: str) -> None:
    assert p_value(play(kind, fault)[0]) < 1e-6


def test_one_hot_drafts_have_the_masked_law_and_change_no_token() -> None:
    plain = play("bad", one_hot=True, extent=0)[0]
    assert p_value(plain) > 1e-4
    for kind in ("good", "adversarial"):
        assert torch.equal(play(kind, one_hot=True)[0], plain)


def test_bits_become_bools() -> None:
    flags = torch.rand(2, 3, 24, generator=torch.Generator().manual_seed(32)) < 0.5
    packed = (flags.view(2, 3, 3, 8).int() << torch.arange(8)).sum(-1).to(torch.uint8)
    assert torch.equal(unpack(packed, 21), flags[..., :21])
    assert torch.equal(pack(flags), packed) and torch.equal(unpack(pack(flags[..., :21]), 21), flags[..., :21])
