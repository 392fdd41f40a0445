"""Verdicts of the kernels against the reference, row by row: the same cuts, the same tokens, whatever surrounds a row.

Chance is keyed and masses are whole numbers, so that equality is the test; the reference's law and its rules have tests
of their own (`test_acceptance.py`, `test_acceptance_law.py`, `test_controls.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kernels import cut_close, cut_search, cuts, logit_rows
from kernels.acceptance import Proposal, RowSampling, accept_reference, accept_triton, choose_reference, choose_triton
from kernels.cuts import RowControls, find_cuts
from kernels.logit_rows import CHUNK
from kernels.ordering import top_rows
from kernels.sampling import processed_distribution, weights_of
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, poison_new_memory, there
from tests.kernels.oracles import POISON

VOCABULARY, CHOICES = 500, 6

# temperature, top-k, top-p, min-p
SETTINGS = (
    (1.0, 0, 1.0, 0.0),
    (0.7, 20, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.8, 40, 0.95, 0.02),
    (2.0, 300, 0.99, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.0, 3, 0.5, 0.0),
    (1e-30, 5, 0.5, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1e4, 450, 0.999, 0.3),
    (1.3, 10**9, 0.4, 0.0),
)


KINDS = {
    "random": range(len(SETTINGS)),
    "ties": (1, 2, 3),
    "equal": (1, 2, 3),
    "masked": (0, 4, 5),
    "far apart": (2, 7, 10),
}
"""The settings that each kind of logits is cut by: ties at every cut, more of top-k than a mask leaves, extreme T."""

OF_LANES = ((1.0, 0, 1.0, 0.0), (0.8, 40, 0.95, 0.02), (0.0, 3, 0.5, 0.0), (2.0, 0, 1.0, 0.0), (1.3, 0, 1.0, 0.1))
"""What a verdict asks of its cuts: most rows need no search, which the interpreter is slow at."""


def controls_of(rows: Sequence[tuple[float, int, float, float]]) -> tuple[torch.Tensor, ...]:
    """Temperature, top-k, top-p and min-p of rows."""
    table = torch.tensor(rows, dtype=torch.float64)
    return table[:, 0].float(), table[:, 1].long(), table[:, 2].float(), table[:, 3].float()


def random_logits(rows: int, kind: str, vocabulary: int = VOCABULARY) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    if kind == "ties":
        logits = logits.round()
    elif kind == "equal":
        logits = torch.zeros_like(logits)
    elif kind == "masked":
        logits[torch.rand(logits.shape, generator=generator) < 0.9] = -torch.inf
        logits[:, 3] = 0.25
    elif kind == "far apart":
        logits = logits * 1e3
    return logits


def kept(logits: torch.Tensor, *controls: torch.Tensor) -> torch.Tensor:
    """p by the kernels' cuts, FP32 [R, V]; rows that are greedy are zero."""
    temperature, top_k, top_p, min_p = controls
    on_device = (x.to(DEVICE) for x in (temperature, top_k, top_p, min_p, torch.zeros_like(top_k)))
    found = find_cuts(logits.to(DEVICE)[:, None], RowControls(*on_device))
    cut, total, state = found.cut.cpu(), found.total.cpu(), found.state.cpu()
    ordinals = (logits + 0.0).view(torch.int32)
    ordinals = torch.where(ordinals < 0, ordinals ^ 0x7FFFFFFF, ordinals).long()
    keys = ordinals * (1 << 32) + (0xFFFFFFFF - torch.arange(logits.shape[1]))
    weights = weights_of(logits, state[:, 0], state[:, 1])
    chosen = (keys >= cut[:, None]) & (weights >= min_p[:, None]) & (temperature > 0)[:, None]
    return torch.where(chosen, weights / total[:, None], 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_row_keeps_and_its_probabilities_are_the_references_bit_for_bit(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_new_memory(monkeypatch)
    controls = controls_of([SETTINGS[index] for index in KINDS[kind]])
    logits = random_logits(len(KINDS[kind]), kind)
    expected = processed_distribution(logits, *controls)
    assert torch.equal(kept(logits, *controls), torch.where((controls[0] > 0)[:, None], expected, 0.0))


@pytest.mark.parametrize("kind, rounds", [("random", 3), ("ties", 1)])
def test_brackets_that_stay_wide_are_looked_through_in_the_row(
    kind: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two keys are held apart instead of thousands, so that most rows narrow in all rounds and still have more."""
    if DEVICE == "cuda":
        pytest.skip("a compiled kernel keeps its constants")
    two = type(cut_search.HELD)(2)
    monkeypatch.setattr(cut_search, "HELD", two)
    monkeypatch.setattr(cut_close, "HELD", two)
    monkeypatch.setattr(cuts, "ROUNDS", rounds)
    controls = controls_of(SETTINGS[1:5])
    logits = random_logits(4, kind)
    assert torch.equal(kept(logits, *controls), processed_distribution(logits, *controls))


def test_a_row_of_several_chunks_and_a_ragged_end_is_kept_as_one() -> None:
    controls = controls_of(SETTINGS[1:5])
    logits = random_logits(4, "random", 2 * CHUNK + 77) - 30  # zeros behind the end would be the best
    logits[:, -1] = logits.max() + 1
    assert torch.equal(kept(logits, *controls), processed_distribution(logits, *controls))


@pytest.mark.parametrize("kind", ["ties", "masked"])
def test_a_program_that_takes_several_chunks_finds_the_same_cuts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k of fewer tokens than there are chunks, of as many and of more; where a mask leaves a chunk nothing, too."""
    monkeypatch.setattr(logit_rows, "_PROGRAMS", 9)
    logits = random_logits(4, kind, 4 * CHUNK + 77)
    logits[1, CHUNK : 3 * CHUNK] = -torch.inf
    assert logit_rows.span_of(4, 5) == 2
    controls = controls_of([(0.8, 3, 0.95, 0.02), (1.0, 5, 1.0, 0.0), (1.0, 6, 0.9, 0.0), (1.3, 1, 0.4, 0.0)])
    assert torch.equal(kept(logits, *controls), processed_distribution(logits, *controls))


def test_probabilities_are_those_of_fp64() -> None:
    temperature, top_k, top_p, _ = controls_of(SETTINGS[:5])
    logits = random_logits(5, "random")
    got = kept(logits, temperature, top_k, top_p, torch.zeros(5))
    for row in range(5):
        law = oracles.processed(logits[row].tolist(), float(temperature[row]), int(top_k[row]), float(top_p[row]))
        oracles.close(got[row], torch.tensor(law), 1e-6)


# ------------------------------------------------------------------------------------------------ verdicts

Scene = tuple[torch.Tensor, Proposal, torch.Tensor, torch.Tensor, RowSampling]


def lanes(count: int) -> RowSampling:
    temperature, top_k, top_p, min_p = controls_of([OF_LANES[lane % len(OF_LANES)] for lane in range(count)])
    ids = torch.arange(count)
    return RowSampling(temperature, top_k, top_p, ids * 7919 - 3, ids % 2, min_p, ids % 4 == 3)


def scene(batch: int, columns: int, law: bool) -> tuple[torch.Tensor, Proposal, torch.Tensor, torch.Tensor]:
    """Logits, drafts of which about two thirds are likely, ragged extents, frontiers; what nobody reads is poisoned."""
    generator = torch.Generator().manual_seed(7)
    logits = 2 * torch.randn(batch, columns + 1, VOCABULARY, generator=generator)
    candidates = torch.rand(batch, columns, VOCABULARY, generator=generator).argsort(-1)[..., :CHOICES].contiguous()
    candidates[:, :, -1] = candidates[:, :, 0]  # a candidate twice counts twice
    share = (2 * torch.randn(batch, columns, CHOICES, generator=generator)).softmax(-1)
    rank = torch.multinomial(share.view(-1, CHOICES), 1, generator=generator).view(batch, columns, 1)
    drafts = candidates.gather(-1, rank)[..., 0]
    raised = (torch.rand(drafts.shape, generator=generator) < 0.7) * 9.0
    logits[:, :columns].scatter_add_(-1, drafts[..., None], raised[..., None])
    extent = torch.arange(batch) % (columns + 1)
    dead = torch.arange(columns + 1) > extent[:, None]
    logits[dead] = POISON
    share[dead[:, 1:]] = POISON
    frontier = torch.randint(0, 1 << 33, (batch,), generator=generator)
    return logits, Proposal(drafts, candidates, share) if law else Proposal(drafts), extent, frontier


def run(
    logits: torch.Tensor, proposal: Proposal | None, extent: torch.Tensor, frontier: torch.Tensor, rows: RowSampling
) -> list[list[int]]:
    """Licensed tokens of each lane by the kernels."""
    if proposal is not None:
        proposal = there(proposal)
    verdict = accept_triton(logits.to(DEVICE), proposal, extent.to(DEVICE), frontier.to(DEVICE), there(rows))
    return licensed(verdict.licensed, verdict.accepted)


def licensed(tokens: torch.Tensor, accepted: torch.Tensor) -> list[list[int]]:
    return [row[: count + 1] for row, count in zip(tokens.tolist(), accepted.tolist(), strict=True)]


def reference(*arguments: object) -> list[list[int]]:
    verdict = accept_reference(*arguments)  # type: ignore[arg-type]
    return licensed(verdict.licensed, verdict.accepted)


@pytest.mark.parametrize("law", [False, True])
def test_verdicts_are_the_references(law: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)
    batch, columns = 11, 2
    logits, proposal, extent, frontier = scene(batch, columns, law)
    expected = reference(logits, proposal, extent, frontier, lanes(batch))
    assert run(logits, proposal, extent, frontier, lanes(batch)) == expected
    lengths = [len(tokens) - 1 for tokens in expected]
    assert any(0 < a == e for a, e in zip(lengths, extent.tolist(), strict=True)), "the inputs test little"
    assert any(a < e for a, e in zip(lengths, extent.tolist(), strict=True)), "the inputs test little"


def test_a_lane_gets_its_tokens_whatever_its_number_and_its_neighbours() -> None:
    logits, proposal, extent, frontier = scene(8, 2, True)
    rows = lanes(8)
    together = run(logits, proposal, extent, frontier, rows)
    assert proposal.candidates is not None and proposal.law is not None
    for lane in (3, 5):
        one = torch.arange(8) == lane
        alone = Proposal(proposal.drafts[one], proposal.candidates[one], proposal.law[one])
        assert run(logits[one], alone, extent[one], frontier[one], rows.rows(one)) == [together[lane]]


def test_without_a_proposal_each_lane_gets_the_targets_choice_of_rows_at_any_stride() -> None:
    logits, _, _, frontier = scene(7, 0, False)
    wide = torch.full((7, 1, VOCABULARY + 12), POISON)
    wide[..., :VOCABULARY] = logits
    zero = torch.zeros(7, dtype=torch.int64)
    expected = reference(logits, None, zero, frontier, lanes(7))
    assert run(wide.to(DEVICE)[..., :VOCABULARY], None, zero, frontier, lanes(7)) == expected


def test_choices_of_several_columns_are_the_references() -> None:
    logits = random_logits(8, "random").view(4, 2, -1)
    positions = torch.arange(8).view(4, 2) * 1000
    rows = lanes(4)
    got = choose_triton(logits.to(DEVICE), positions.to(DEVICE), there(rows)).cpu()
    assert torch.equal(got, choose_reference(logits, positions, rows))


def rejections(count: int, p: Sequence[float], candidates: Sequence[int], q: Sequence[float]) -> Scene:
    """Lanes of one draft, token 1, whose `candidates` have `q` under p: their chance alone differs."""
    ones = torch.ones(count)
    rows = RowSampling(ones, (0 * ones).long(), ones, torch.arange(count), (0 * ones).long())
    law = torch.tensor(q).repeat(count, 1, 1)
    proposal = Proposal(torch.full((count, 1), 1), torch.tensor(candidates).repeat(count, 1, 1), law)
    return torch.tensor(p).log().repeat(count, 2, 1), proposal, ones.long(), torch.zeros(count).long(), rows


def test_a_rejection_is_corrected_from_what_the_whole_of_q_leaves_of_p() -> None:
    """Tokens 1 and 2 stand twice among the candidates, and only both of their shares together are above p."""
    scene = rejections(16, [0.125] * 8, [1, 2, 1, 2, 3], [0.5, 0.1, 0.1, 0.1, 0.2])
    expected = reference(*scene)
    rejected = [tokens[0] for tokens in expected if len(tokens) == 1]
    assert 8 < len(rejected) < 16 and set(rejected) <= {0, 4, 5, 6, 7}
    assert run(*scene) == expected


def test_a_rejection_without_residual_is_corrected_from_p() -> None:
    """q above p everywhere: max(p - q, 0) sums to 0."""
    scene = rejections(8, [0.1, 0.2, 0.3, 0.4], [0, 1, 2, 3], [0.9, 1.8, 2.7, 3.6])
    expected = reference(*scene)
    assert len({tuple(tokens) for tokens in expected}) > 1
    assert run(*scene) == expected


def test_a_race_over_several_chunks_of_a_program_has_the_same_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_rows, "_PROGRAMS", 4)
    monkeypatch.setitem(globals(), "VOCABULARY", 2 * CHUNK + 77)
    assert logit_rows.span_of(4, 3) == 3
    scene_ = *scene(2, 1, True), lanes(2)
    assert run(*scene_) == reference(*scene_)


def test_a_mask_that_leaves_one_token_gives_that_token() -> None:
    logits = torch.full((2, 1, VOCABULARY), -torch.inf)
    logits[:, :, 77] = -5.0
    rows = replace(lanes(2), temperature=torch.tensor([1.0, 0.5]), top_p=torch.tensor([0.5, 1.0]))
    assert run(logits, None, torch.zeros(2).long(), torch.zeros(2).long(), rows) == [[77], [77]]


def test_logits_that_do_not_fit_are_refused_by_name() -> None:
    rows = there(lanes(1))
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="logits"):
        accept_triton(torch.zeros(1, 1, 8, dtype=torch.float64, device=DEVICE), None, zero, zero, rows)


@pytest.mark.gpu
def test_nothing_waits_for_the_card() -> None:
    scene_ = scene(13, 3, True)
    logits, proposal, extent, frontier = scene_
    arguments = logits.cuda(), there(proposal), extent.cuda(), frontier.cuda(), there(lanes(13))
    accept_triton(*arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        verdict = accept_triton(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert licensed(verdict.licensed, verdict.accepted) == reference(*scene_, lanes(13))


def test_the_order_of_keys_is_the_order_of_top_rows() -> None:
    """What `kept` of this file takes for granted."""
    logits = random_logits(3, "ties")
    controls = torch.ones(3), torch.tensor([1, 7, 40]), torch.ones(3), torch.zeros(3)
    got = kept(logits, *controls)
    for row, k in enumerate((1, 7, 40)):
        ids = top_rows(logits[row : row + 1], k)[1][0]
        assert set(got[row].nonzero()[:, 0].tolist()) == set(ids.tolist())
