"""Verification's verdict: how many drafts of each row stand, and what comes after them.

Column i of the target predicts the token at F + i + 1; draft d_(i+1) is checked against it. P = extent[b] drafts are
checked. Licensed tokens are y = [d_1 .. d_A, correction or bonus], A + 1 of them.

    one-hot q (no drafter, DFlash, greedy rows, and DFlash2 rows that are `reproducible`)
        y_i = the target's choice under position F + i: argmax, or the `target` race over p_i
        A   = length of the prefix with d_(i+1) == y_i, so that output never depends on what was proposed
    retained q (DFlash2 at T > 0)
        accept d while u q(d) < p(d), u the `accept` uniform under F + i
        on rejection the `correction` race over max(p - q, 0), or over p where that sums to 0
        after P acceptances the `target` race over p_P

Source: specification (verification, correction); decisions 13-15.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.acceptance_kernels import verdicts
from kernels.cuts import RowControls
from kernels.ordering import argmax_rows
from kernels.race import race
from kernels.randomness import ACCEPT, CORRECTION, TARGET, uniform
from kernels.sampling import processed_distribution


@dataclass(frozen=True)
class RowSampling:
    """Per-row controls, one entry a row: `temperature`, `top_p` FP32 [B]; `top_k`, `seeds`, `sub` int64 [B]; `min_p`
    FP32 [B]; `reproducible` bool [B]: q is treated as one-hot, since the draft was drawn with the target's own noise.
    None for one of these two: no row has it. `all_greedy`: no row has a temperature, which is then not asked of the
    card again."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seeds: torch.Tensor
    sub: torch.Tensor
    min_p: torch.Tensor | None = None
    reproducible: torch.Tensor | None = None
    all_greedy: bool = False

    def rows(self, selected: torch.Tensor | slice) -> RowSampling:
        """The rows selected by bool [B], or some that follow each other."""
        return RowSampling(
            self.temperature[selected],
            self.top_k[selected],
            self.top_p[selected],
            self.seeds[selected],
            self.sub[selected],
            None if self.min_p is None else self.min_p[selected],
            None if self.reproducible is None else self.reproducible[selected],
            self.all_greedy,
        )


@dataclass(frozen=True)
class Proposal:
    """K drafts a row: `drafts` int64 [B, K]. DFlash2 also keeps `candidates` int64 [B, K, C] and `law` FP32 [B, K, C],
    the q that each draft was drawn from; without them q is one-hot."""

    drafts: torch.Tensor
    candidates: torch.Tensor | None = None
    law: torch.Tensor | None = None

    def rows(self, selected: slice) -> Proposal:
        candidates, law = (None if x is None else x[selected] for x in (self.candidates, self.law))
        return Proposal(self.drafts[selected], candidates, law)


@dataclass(frozen=True)
class Verdict:
    """`licensed` int64 [B, W]: the first accepted[b] + 1 entries of row b count; `accepted` int64 [B]."""

    licensed: torch.Tensor
    accepted: torch.Tensor


def choose(logits: torch.Tensor, positions: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
    """The target's own choice: `logits` FP32 [B, W, V] over public rows, `positions` int64 [B, W] of the predicting
    columns -> int64 [B, W]. Argmax for greedy rows, the `target` race over p for the others."""
    if sampling.all_greedy:
        return _best(logits)
    return (
        choose_triton(logits, positions, sampling) if logits.is_cuda else choose_reference(logits, positions, sampling)
    )


def accept(
    logits: torch.Tensor,
    proposal: Proposal | None,
    extent: torch.Tensor,
    frontier: torch.Tensor,
    sampling: RowSampling,
) -> Verdict:
    """`logits` FP32 [B, W, V] of the verified columns over public rows, W >= max(extent) + 1; `extent`, `frontier`
    int64 [B] -> what is licensed. Without a proposal every extent is 0. On a card nothing waits for it."""
    if sampling.all_greedy:
        chosen = _best(logits)
        if proposal is None:
            return Verdict(chosen[:, :1], torch.zeros_like(extent))
        width = logits.shape[1]
        return Verdict(chosen, _prefix(chosen[:, : width - 1] == proposal.drafts[:, : width - 1], extent))
    run = accept_triton if logits.is_cuda else accept_reference
    return run(logits, proposal, extent, frontier, sampling)


def _best(logits: torch.Tensor) -> torch.Tensor:
    """Argmax of `logits` FP32 [B, W, V], int64 [B, W]."""
    if logits.is_cuda:
        return argmax_rows(logits.flatten(0, 1)).view(logits.shape[:2])
    return logits.argmax(-1)


# ------------------------------------------------------------------------------------------------ on a card


def choose_triton(logits: torch.Tensor, positions: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
    """Every column as a lane of its own."""
    width = logits.shape[1]
    sampling = RowSampling(
        sampling.temperature.repeat_interleave(width),
        sampling.top_k.repeat_interleave(width),
        sampling.top_p.repeat_interleave(width),
        sampling.seeds.repeat_interleave(width),
        sampling.sub.repeat_interleave(width),
        None if sampling.min_p is None else sampling.min_p.repeat_interleave(width),
    )
    rows = logits.flatten(0, 1)[:, None]
    frontier = positions.flatten()
    return accept_triton(rows, None, torch.zeros_like(frontier), frontier, sampling).licensed.view(positions.shape)


def accept_triton(
    logits: torch.Tensor,
    proposal: Proposal | None,
    extent: torch.Tensor,
    frontier: torch.Tensor,
    sampling: RowSampling,
) -> Verdict:
    """Raises ValueError naming a tensor that does not fit."""
    if proposal is None:
        logits = logits[:, :1]
    positions = frontier[:, None] + torch.arange(logits.shape[1], device=logits.device)
    controls = RowControls(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, extent)
    drafts, candidates, law = (None,) * 3 if proposal is None else (proposal.drafts, proposal.candidates, proposal.law)
    noise = sampling.seeds, sampling.sub
    return Verdict(*verdicts(logits, controls, sampling.reproducible, *noise, positions, drafts, candidates, law))


# ------------------------------------------------------------------------------------------------ reference


def choose_reference(logits: torch.Tensor, positions: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
    _batch, width, vocabulary = logits.shape
    chosen = logits.argmax(-1)
    sampled = sampling.temperature > 0
    if bool(sampled.any()):
        p = _processed(logits[sampled], sampling, sampled)
        drawn = race(
            p.view(-1, vocabulary),
            sampling.seeds[sampled].repeat_interleave(width),
            positions[sampled].reshape(-1),
            TARGET,
            sampling.sub[sampled].repeat_interleave(width),
        )
        chosen[sampled] = drawn.view(-1, width)
    return chosen


def accept_reference(
    logits: torch.Tensor,
    proposal: Proposal | None,
    extent: torch.Tensor,
    frontier: torch.Tensor,
    sampling: RowSampling,
) -> Verdict:
    width = logits.shape[1]
    positions = frontier[:, None] + torch.arange(width, device=logits.device)
    if proposal is None:
        return Verdict(choose_reference(logits, positions, sampling)[:, :1], torch.zeros_like(extent))
    if proposal.law is None:
        chosen = choose_reference(logits, positions, sampling)
        return Verdict(chosen, _prefix(chosen[:, : width - 1] == proposal.drafts[:, : width - 1], extent))
    retained = sampling.temperature > 0
    if sampling.reproducible is not None:
        retained = retained & ~sampling.reproducible
    licensed = torch.zeros_like(positions)
    accepted = torch.zeros_like(extent)
    if not bool(retained.all()):
        rows = ~retained
        chosen = choose_reference(logits[rows], positions[rows], sampling.rows(rows))
        licensed[rows] = chosen
        accepted[rows] = _prefix(chosen[:, : width - 1] == proposal.drafts[rows, : width - 1], extent[rows])
    if bool(retained.any()):
        verdict = _accept_retained(logits, proposal, extent, positions, sampling, retained)
        licensed[retained], accepted[retained] = verdict.licensed, verdict.accepted
    return Verdict(licensed, accepted)


def _accept_retained(
    logits: torch.Tensor,
    proposal: Proposal,
    extent: torch.Tensor,
    positions: torch.Tensor,
    sampling: RowSampling,
    rows: torch.Tensor,
) -> Verdict:
    """The rule for a retained q, for the rows selected by bool `rows` [B]."""
    assert proposal.candidates is not None and proposal.law is not None
    width = logits.shape[1]
    columns = width - 1
    p = _processed(logits[rows], sampling, rows)
    drafts = proposal.drafts[rows, :columns]
    candidates, law = proposal.candidates[rows, :columns], proposal.law[rows, :columns]
    seeds, sub = sampling.seeds[rows], sampling.sub[rows]
    positions, extent = positions[rows], extent[rows]

    q = torch.zeros_like(p[:, :columns]).scatter_add_(-1, candidates, law)
    p_draft = p[:, :columns].gather(-1, drafts[..., None])[..., 0]
    q_draft = q.gather(-1, drafts[..., None])[..., 0]
    u = uniform(seeds[:, None], positions[:, :columns], ACCEPT, sub[:, None])
    accepted = _prefix(u * q_draft < p_draft, extent)

    row = torch.arange(accepted.shape[0], device=p.device)
    last = positions[row, accepted]
    p_last = p[row, accepted]
    q_last = torch.nn.functional.pad(q, (0, 0, 0, 1))[row, accepted]
    residual = (p_last - q_last).clamp(min=0.0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_last)
    correction = race(residual, seeds, last, CORRECTION, sub)
    bonus = race(p_last, seeds, last, TARGET, sub)
    licensed = torch.nn.functional.pad(drafts, (0, 1))
    licensed[row, accepted] = torch.where(accepted < extent, correction, bonus)
    return Verdict(licensed, accepted)


def _processed(logits: torch.Tensor, sampling: RowSampling, rows: torch.Tensor) -> torch.Tensor:
    """p of every column: `logits` [R, W, V] of the rows selected by bool `rows` [B] -> FP32 [R, W, V]."""
    width, vocabulary = logits.shape[1:]
    p = processed_distribution(
        logits.reshape(-1, vocabulary),
        sampling.temperature[rows].repeat_interleave(width),
        sampling.top_k[rows].repeat_interleave(width),
        sampling.top_p[rows].repeat_interleave(width),
        None if sampling.min_p is None else sampling.min_p[rows].repeat_interleave(width),
    )
    return p.view(-1, width, vocabulary)


def _prefix(agrees: torch.Tensor, extent: torch.Tensor) -> torch.Tensor:
    """Length of each row's leading run of True within its extent: bool [B, K], int64 [B] -> int64 [B]."""
    column = torch.arange(agrees.shape[1], device=agrees.device)
    return (agrees & (column < extent[:, None])).to(torch.int64).cumprod(-1).sum(-1)
