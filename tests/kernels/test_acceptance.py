"""Verdicts row by row against a plain FP64 reading of the rules. Their law is tested in test_acceptance_law.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.acceptance import Proposal, RowSampling, accept, choose
from tests.kernels import oracles
from tests.kernels.oracles import ACCEPT, CORRECTION, POISON, TARGET

VOCABULARY = 24
CHOICES = 6


def sampling(temperature: list[float], top_k: int = 0, top_p: float = 1.0) -> RowSampling:
    n = len(temperature)
    return RowSampling(
        torch.tensor(temperature),
        torch.full((n,), top_k),
        torch.full((n,), top_p),
        torch.arange(n) * 7919 - 3,
        torch.arange(n) % 2,
    )


def distribution(logits: torch.Tensor, controls: RowSampling, row: int) -> list[float]:
    return oracles.processed(
        logits.tolist(), float(controls.temperature[row]), int(controls.top_k[row]), float(controls.top_p[row])
    )


def expected_verdict(
    logits: torch.Tensor, proposal: Proposal, extent: int, frontier: int, controls: RowSampling, row: int
) -> tuple[list[int], float]:
    """(licensed tokens, margin) of one row, by decisions 14 and 15."""
    seed, sub = int(controls.seeds[row]), int(controls.sub[row])
    sampled = float(controls.temperature[row]) > 0
    licensed: list[int] = []
    margin = math.inf

    def draw(weights: list[float], position: int, purpose: int) -> int:
        nonlocal margin
        token, gap = oracles.race(weights, seed, position, purpose, sub)
        margin = min(margin, gap)
        return token

    for i in range(extent + 1):
        p = distribution(logits[row, i], controls, row)
        draft = int(proposal.drafts[row, i]) if i < extent else -1
        if i == extent or proposal.law is None or not sampled:
            token = draw(p, frontier + i, TARGET)
            licensed.append(token)
            if token != draft:
                break
            continue
        assert proposal.candidates is not None
        q = [0.0] * len(p)
        for token, share in zip(proposal.candidates[row, i].tolist(), proposal.law[row, i].tolist(), strict=True):
            q[token] += share
        u = oracles.uniform(seed, frontier + i, ACCEPT, sub)
        margin = min(margin, abs(u * q[draft] - p[draft]) if u * q[draft] > 0 else math.inf)
        if u * q[draft] < p[draft]:
            licensed.append(draft)
            continue
        residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        licensed.append(draw(residual if sum(residual) > 0 else p, frontier + i, CORRECTION))
        break
    return licensed, margin


def random_proposal(batch: int, columns: int, generator: torch.Generator, law: bool) -> Proposal:
    scores = torch.rand(batch, columns, VOCABULARY, generator=generator)
    candidates = scores.argsort(-1)[..., :CHOICES].contiguous()
    q = (torch.randn(batch, columns, CHOICES, generator=generator) * 2).softmax(-1)
    rank = torch.multinomial(q.view(-1, CHOICES), 1, generator=generator).view(batch, columns, 1)
    drafts = candidates.gather(-1, rank)[..., 0]
    return Proposal(drafts, candidates, q) if law else Proposal(drafts)


def agree(logits: torch.Tensor, proposal: Proposal, share: float, generator: torch.Generator) -> torch.Tensor:
    """Logits raised at about `share` of the drafts, so that runs of every length occur."""
    raised = torch.rand(proposal.drafts.shape, generator=generator) < share
    lift = torch.zeros_like(logits)
    lift[:, : proposal.drafts.shape[1]].scatter_(-1, proposal.drafts[..., None], raised[..., None] * 8.0)
    return logits + lift


def check(
    logits: torch.Tensor,
    proposal: Proposal,
    extent: torch.Tensor,
    frontier: torch.Tensor,
    controls: RowSampling,
) -> list[int]:
    """Compares every row with the oracle, after poisoning what no rule may look at; returns accepted counts."""
    poisoned = logits.clone()
    law = None if proposal.law is None else proposal.law.clone()
    for row, live in enumerate(extent.tolist()):
        poisoned[row, live + 1 :] = POISON
        if law is not None:
            law[row, live:] = POISON
    verdict = accept(poisoned, Proposal(proposal.drafts, proposal.candidates, law), extent, frontier, controls)
    for row in range(len(extent)):
        expected, margin = expected_verdict(logits, proposal, int(extent[row]), int(frontier[row]), controls, row)
        assert margin > 1e-6, "a near tie: choose other inputs"
        accepted = int(verdict.accepted[row])
        assert accepted == len(expected) - 1
        assert verdict.licensed[row, : accepted + 1].tolist() == expected
    return verdict.accepted.tolist()


@pytest.mark.parametrize("law", [False, True])
@pytest.mark.parametrize("columns", [1, 3, 15])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7)])
def test_verdicts_of_ragged_rows_are_those_of_the_rules(law: bool, columns: int, top_k: int, top_p: float) -> None:
    batch = 24
    generator = torch.Generator().manual_seed(columns)
    proposal = random_proposal(batch, columns, generator, law)
    logits = agree(torch.randn(batch, columns + 1, VOCABULARY, generator=generator) * 2, proposal, 0.8, generator)
    extent = torch.arange(batch) % (columns + 1)
    frontier = torch.randint(0, 4000, (batch,), generator=generator)
    accepted = check(logits, proposal, extent, frontier, sampling([0.9, 0.0, 1.4] * 8, top_k, top_p))
    full = [a for a, e in zip(accepted, extent.tolist(), strict=True) if a == e > 0]
    cut = [a for a, e in zip(accepted, extent.tolist(), strict=True) if a < e]
    assert full and cut, "both endings must occur, or the inputs test little"


def test_greedy_accepts_the_matching_prefix_then_corrects_or_gives_the_bonus() -> None:
    best = torch.tensor([[3, 5, 7, 9], [3, 5, 7, 9], [3, 5, 7, 9], [3, 5, 7, 9]])
    logits = torch.nn.functional.one_hot(best, VOCABULARY).float()
    drafts = torch.tensor([[3, 5, 7], [3, 6, 7], [1, 5, 7], [3, 5, 7]])
    extent = torch.tensor([3, 3, 3, 1])
    verdict = accept(logits, Proposal(drafts), extent, torch.zeros(4, dtype=torch.int64), sampling([0.0] * 4))
    assert verdict.accepted.tolist() == [3, 1, 0, 1]
    licensed = [verdict.licensed[row, : verdict.accepted[row] + 1].tolist() for row in range(4)]
    assert licensed == [[3, 5, 7, 9], [3, 5], [3], [3, 5]]


def test_a_tied_argmax_is_the_lower_id() -> None:
    logits = torch.zeros(1, 2, VOCABULARY)
    logits[:, :, [4, 11]] = 1.0
    for draft, accepted in ((4, 1), (11, 0)):
        verdict = accept(
            logits, Proposal(torch.tensor([[draft]])), torch.tensor([1]), torch.tensor([0]), sampling([0.0])
        )
        assert verdict.accepted.tolist() == [accepted]
        assert verdict.licensed[0, 0] == 4


def test_without_a_proposal_each_row_gets_the_targets_choice() -> None:
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(6, 1, VOCABULARY, generator=generator)
    controls = sampling([0.0, 1.0, 0.5, 2.0, 0.0, 1.0])
    frontier, extent = torch.arange(6) * 100, torch.zeros(6, dtype=torch.int64)
    verdict = accept(logits, None, extent, frontier, controls)
    assert verdict.accepted.tolist() == [0] * 6
    for row in range(6):
        p = distribution(logits[row, 0], controls, row)
        token, margin = oracles.race(p, int(controls.seeds[row]), int(frontier[row]), TARGET, int(controls.sub[row]))
        assert margin > 1e-6
        assert verdict.licensed[row].tolist() == [token]


@pytest.mark.parametrize("law", [False, True])
def test_an_extent_of_zero_equals_no_proposal(law: bool) -> None:
    generator = torch.Generator().manual_seed(10)
    logits = torch.randn(8, 4, VOCABULARY, generator=generator)
    controls = sampling([0.8, 0.0] * 4, top_k=9)
    extent, frontier = torch.zeros(8, dtype=torch.int64), torch.arange(8)
    plain = accept(logits[:, :1], None, extent, frontier, controls)
    drafted = accept(logits, random_proposal(8, 3, generator, law), extent, frontier, controls)
    assert torch.equal(drafted.licensed[:, :1], plain.licensed)
    assert torch.equal(drafted.accepted, plain.accepted)


def test_with_a_one_hot_law_output_never_depends_on_what_was_proposed() -> None:
    """Whatever is accepted, the licensed tokens are a prefix of the target's own choices."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(32, 6, VOCABULARY, generator=generator) * 3
    controls = sampling([0.0, 0.6, 1.0, 1.7] * 8)
    frontier = torch.randint(0, 1000, (32,), generator=generator)
    own = choose(logits, frontier[:, None] + torch.arange(6), controls)
    lengths = set()
    for share in (0.0, 0.5, 1.0):
        proposed = own[:, :5].clone()
        wrong = torch.rand(32, 5, generator=generator) >= share
        proposed[wrong] = (proposed[wrong] + 1) % VOCABULARY
        verdict = accept(logits, Proposal(proposed), torch.full((32,), 5), frontier, controls)
        for row, accepted in enumerate(verdict.accepted.tolist()):
            assert verdict.licensed[row, : accepted + 1].tolist() == own[row, : accepted + 1].tolist()
        lengths |= set(verdict.accepted.tolist())
    assert {0, 5} < lengths


def test_greedy_rows_of_a_dflash2_batch_follow_the_greedy_rule() -> None:
    generator = torch.Generator().manual_seed(12)
    proposal = random_proposal(12, 4, generator, law=True)
    logits = agree(torch.randn(12, 5, VOCABULARY, generator=generator), proposal, 0.7, generator)
    controls = sampling([0.0, 1.0] * 6)
    extent, frontier = torch.full((12,), 4), torch.zeros(12, dtype=torch.int64)
    mixed = accept(logits, proposal, extent, frontier, controls)
    best = logits.argmax(-1)
    for row in range(0, 12, 2):
        count = int((best[row, :4] == proposal.drafts[row]).int().cumprod(0).sum())
        assert int(mixed.accepted[row]) == count
        assert mixed.licensed[row, : count + 1].tolist() == best[row, : count + 1].tolist()


def test_a_draft_that_the_target_forbids_is_rejected_and_corrected_from_the_residual() -> None:
    """p(d) = 0 by top-k: the draft stays among the checked ones (decision 15), and what q took is not drawn twice."""
    n = 400
    logits = torch.tensor([2.0, 1.9, 1.8, -5.0]).expand(n, 2, -1).contiguous()
    controls = RowSampling(
        torch.ones(n), torch.full((n,), 3), torch.ones(n), torch.arange(n), torch.zeros(n, dtype=torch.int64)
    )
    candidates = torch.tensor([3, 0]).expand(n, 1, -1)
    proposal = Proposal(torch.full((n, 1), 3), candidates, torch.tensor([0.05, 0.95]).expand(n, 1, -1))
    verdict = accept(logits, proposal, torch.ones(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64), controls)
    assert int(verdict.accepted.sum()) == 0
    assert set(verdict.licensed[:, 0].tolist()) == {1, 2}, "token 0 has p < q, so the residual has none of it"


def test_equal_p_and_q_accept_everything() -> None:
    n = 200
    generator = torch.Generator().manual_seed(13)
    logits = torch.randn(n, 2, CHOICES, generator=generator)
    law = logits[:, :1].softmax(-1)
    drafts = torch.multinomial(law[:, 0], 1, generator=generator)
    controls = RowSampling(
        torch.ones(n), torch.zeros(n, dtype=torch.int64), torch.ones(n), torch.arange(n), torch.zeros(n).long()
    )
    candidates = torch.arange(CHOICES).expand(n, 1, -1)
    verdict = accept(logits, Proposal(drafts, candidates, law), torch.ones(n).long(), torch.zeros(n).long(), controls)
    assert int(verdict.accepted.sum()) == n


def test_a_rejection_without_residual_is_corrected_from_p() -> None:
    """q above p everywhere (in practice by rounding, here plainly): max(p - q, 0) sums to 0."""
    n = 20_000
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    controls = RowSampling(
        torch.ones(n), torch.zeros(n).long(), torch.ones(n), torch.arange(n), torch.zeros(n, dtype=torch.int64)
    )
    proposal = Proposal(torch.full((n, 1), 1), torch.arange(4).expand(n, 1, -1), (2 * p).expand(n, 1, -1))
    verdict = accept(p.log().expand(n, 2, -1), proposal, torch.ones(n).long(), torch.zeros(n).long(), controls)
    rejected = verdict.accepted == 0
    assert abs(float(rejected.double().mean()) - 0.5) < 0.02
    assert oracles.chi_square(torch.bincount(verdict.licensed[rejected, 0], minlength=4), p) > 1e-4


class _Waits(TorchDispatchMode):
    """Names every operation that would make the host wait for the card."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        indices = args[1] if function in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default) else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        if by_mask or function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("law", [False, True])
def test_rows_known_to_be_greedy_get_the_same_verdict_without_waiting_for_the_card(law: bool) -> None:
    generator = torch.Generator().manual_seed(31)
    proposal = random_proposal(4, 3, generator, law)
    logits = agree(torch.randn(4, 4, VOCABULARY, generator=generator), proposal, 0.7, generator)
    extent, frontier = torch.tensor([3, 0, 2, 3]), torch.arange(4)
    unknown = sampling([0.0] * 4)
    with _Waits() as waits:
        verdict = accept(logits, proposal, extent, frontier, replace(unknown, all_greedy=True))
    assert waits.seen == []
    with _Waits() as waits:
        expected = accept(logits, proposal, extent, frontier, unknown)
    assert waits.seen, "this test could not fail"
    assert torch.equal(verdict.accepted, expected.accepted) and torch.equal(verdict.licensed, expected.licensed)
