"""DFlash2's conditional path: a left-to-right walk over the shortlist of each mask column.

    E_i[c]  = u_i[c] + sum_r W_pred[previous, r] g_i[r] W_succ[C_i[c], r]      previous = anchor for i = 0, else d_i
    T <= 0: j_i = lowest rank of the maximum, q_i = one-hot
    T >  0: q_i = softmax(E_i / T), j_i drawn from q_i by inverse CDF with the `proposal` uniform under position F + i
    d_(i+1) = C_i[j_i]
    reproducible rows draw j_i by the race over q_i with the `target` noise under F + i: the same that decides over p_i,
    so that a draft is right wherever q and p agree, and nothing but p decides what is generated

On a card what would be picked after each candidate of the column before is found for all of them at once, since a draw
depends on its column and its law alone; then one program a request follows the picks, one exchange between lanes a
step.

It is a walk that conditions on the token actually picked, not a search for the best path. q is FP32 and is exactly the
distribution that acceptance needs. No other sampling control applies.

Source: specification (selector, temperature rule, RNG key); decisions 9 and 13.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch_checks import require, require_contiguous
from kernels.overlap import let_next_start, overlaps, wait_for_earlier
from kernels.randomness import PROPOSAL, TARGET, exponential, exponential_at, uniform, uniform_at

_ORIGINS = 2
"""Candidates whose picks one program finds: they share the rows of the column's candidates."""


def select_path_reference(
    candidates: torch.Tensor,
    unary: torch.Tensor,
    hidden: torch.Tensor,
    predecessor: torch.Tensor,
    successor: torch.Tensor,
    anchors: torch.Tensor,
    frontier: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    sub: torch.Tensor,
    reproducible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    greedy = temperature <= 0
    divisor = torch.where(greedy, 1.0, temperature)[:, None]
    columns = torch.arange(candidates.shape[1], device=candidates.device)
    u = uniform(seeds[:, None], frontier[:, None] + columns, PROPOSAL, sub[:, None])
    previous = anchors
    drafts: list[torch.Tensor] = []
    laws: list[torch.Tensor] = []
    for i in range(candidates.shape[1]):
        query = predecessor[previous].float() * hidden[:, i].float()
        edges = unary[:, i] + (successor[candidates[:, i]].float() * query[:, None, :]).sum(-1)
        # the maximum is taken off first, so that a tiny temperature overflows to no mass and not to NaN
        law = ((edges - edges.max(-1, keepdim=True).values) / divisor).softmax(-1)
        best = torch.nn.functional.one_hot(edges.argmax(-1), edges.shape[-1]).to(law.dtype)
        law = torch.where(greedy[:, None], best, law)
        rank = draw_rank(law, u[:, i])
        if reproducible is not None:
            noise = exponential(seeds[:, None], (frontier + i)[:, None], TARGET, sub[:, None], candidates[:, i])
            raced = torch.where(law > 0, noise / law, torch.inf).argmin(-1)
            rank = torch.where(reproducible, raced, rank)
        previous = candidates[:, i].gather(-1, rank[:, None])[:, 0]
        drafts.append(previous)
        laws.append(law)
    return torch.stack(drafts, dim=1), torch.stack(laws, dim=1)


def draw_rank(law: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Inverse CDF: the first rank whose cumulative probability exceeds u times the total. `law` FP32 [B, C], `u` FP32
    [B] in [0, 1) -> int64 [B]. A rank of probability 0 is never drawn."""
    cumulative = law.cumsum(-1)
    below = (cumulative <= u[:, None] * cumulative[:, -1:]).sum(-1)
    last_possible = (law > 0).to(torch.int64) * torch.arange(law.shape[-1], device=law.device)
    return torch.minimum(below, last_possible.max(-1).values)


# ------------------------------------------------------------------------------------------------ kernel


@triton.jit
def _drawn_rank(law, u, c, C: tl.constexpr):
    """`draw_rank` of laws [P, C] with one u. Only a possible rank can be the first above: a sum taken in another order
    may grow where nothing was added."""
    cumulative = tl.cumsum(law, 1)
    total = tl.sum(tl.where(c[None, :] == C - 1, cumulative, 0.0), 1)[:, None]
    above = tl.min(tl.where((cumulative > u * total) & (law > 0), c[None, :], C), 1)
    return tl.where(above < C, above, tl.max(tl.where(law > 0, c[None, :], 0), 1))


@triton.jit
def _lowest_rank(values, c, C: tl.constexpr):
    """The lowest rank of the least of each `values` [P, C]."""
    return tl.min(tl.where(values == tl.min(values, 1)[:, None], c[None, :], C - 1), 1)


@triton.jit
def _pick_kernel(
    candidates_ptr,
    unary_ptr,
    hidden_ptr,
    predecessor_ptr,
    successor_ptr,
    anchors_ptr,
    frontier_ptr,
    temperature_ptr,
    seeds_ptr,
    sub_ptr,
    reproducible_ptr,
    laws_ptr,
    picks_ptr,
    rank,
    CHOICES: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    ORIGINS: tl.constexpr,
    RACES: tl.constexpr,
    PROPOSAL: tl.constexpr,
    TARGET: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (ORIGINS candidates p of column i - 1, column i, b): what is picked, and from which law, if the path
    comes from p. Column 0 comes from the anchor, whatever p."""
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    i, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = row * tl.num_programs(1) + i
    origin = tl.program_id(0) * ORIGINS + tl.arange(0, ORIGINS)
    c, r = tl.arange(0, C), tl.arange(0, R)
    exists, real, inside = origin < CHOICES, c < CHOICES, r < rank
    tokens = tl.load(candidates_ptr + at * CHOICES + c, mask=real, other=0)
    anchor = tl.load(anchors_ptr + row)
    previous = tl.load(candidates_ptr + (at - 1) * CHOICES + origin, mask=exists & (i > 0), other=0)
    previous = tl.where(i > 0, previous, anchor)
    unary = tl.load(unary_ptr + at * CHOICES + c, mask=real, other=-float("inf"))
    hidden = tl.load(hidden_ptr + at * rank + r, mask=inside, other=0.0).to(tl.float32)
    after = tl.load(successor_ptr + tokens[:, None] * rank + r[None, :], mask=inside[None, :], other=0.0)
    before = tl.load(predecessor_ptr + previous[:, None] * rank + r[None, :], mask=inside[None, :], other=0.0)
    query = before.to(tl.float32) * hidden[None, :]
    edges = unary[None, :] + tl.sum(after.to(tl.float32)[None, :, :] * query[:, None, :], 2)

    temperature = tl.load(temperature_ptr + row)
    greedy = temperature <= 0
    # the maximum is taken off first, so that a tiny temperature overflows to no mass and not to NaN
    scaled = tl.div_rn(edges - tl.max(edges, 1)[:, None], tl.where(greedy, 1.0, temperature) + edges * 0.0)
    mass = tl.where(real[None, :] & (edges > -float("inf")), tl.exp(scaled), 0.0)
    law = tl.where(
        greedy, (c[None, :] == _lowest_rank(-edges, c, C)[:, None]).to(tl.float32), mass / tl.sum(mass, 1)[:, None]
    )
    seed, sub, position = tl.load(seeds_ptr + row), tl.load(sub_ptr + row), tl.load(frontier_ptr + row) + i
    pick = _drawn_rank(law, uniform_at(seed, position, PROPOSAL, sub), c, C)
    if RACES:
        shape = tokens * 0
        noise = exponential_at(shape + seed, shape + position, TARGET, shape + sub, tokens)
        time = tl.where(law > 0, noise[None, :] / tl.where(law > 0, law, 1.0), float("inf"))
        pick = tl.where(tl.load(reproducible_ptr + row) != 0, _lowest_rank(time, c, C), pick)
    tl.store(picks_ptr + at * CHOICES + origin, pick, mask=exists)
    to = laws_ptr + (at * CHOICES + origin[:, None]) * CHOICES + c[None, :]
    tl.store(to, law, mask=exists[:, None] & real[None, :])


@triton.jit
def _walk_kernel(
    candidates_ptr,
    laws_ptr,
    picks_ptr,
    drafts_ptr,
    law_ptr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
    C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program b: follows the picks through the columns, then takes the tokens and laws along the path."""
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column, c = tl.arange(0, COLUMN_BLOCK), tl.arange(0, C)
    exists = column < COLUMNS
    at = row * COLUMNS + column
    previous = column * 0
    ranks = column * 0
    # in all lanes the same: a step is then one exchange between lanes
    picked = c * 0
    for i in tl.static_range(COLUMNS):
        picks = tl.load(picks_ptr + (row * COLUMNS + i) * CHOICES + c, mask=c < CHOICES, other=0)
        previous = tl.where(column == i, tl.max(picked, 0), previous)
        picked = tl.gather(picks, picked, 0)
        ranks = tl.where(column == i, tl.max(picked, 0), ranks)
    tokens = tl.load(candidates_ptr + at * CHOICES + ranks, mask=exists, other=0)
    tl.store(drafts_ptr + at, tokens, mask=exists)
    chosen = exists[:, None] & (c[None, :] < CHOICES)
    laws = tl.load(laws_ptr + (at * CHOICES + previous)[:, None] * CHOICES + c[None, :], mask=chosen, other=0.0)
    tl.store(law_ptr + at[:, None] * CHOICES + c[None, :], laws, mask=chosen)


def select_path_triton(
    candidates: torch.Tensor,
    unary: torch.Tensor,
    hidden: torch.Tensor,
    predecessor: torch.Tensor,
    successor: torch.Tensor,
    anchors: torch.Tensor,
    frontier: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    sub: torch.Tensor,
    reproducible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, columns, choices = candidates.shape
    vocabulary, rank = predecessor.shape
    require_contiguous("candidates", candidates, (batch, columns, choices), torch.int64)
    require_contiguous("unary", unary, (batch, columns, choices), torch.float32)
    require_contiguous("hidden", hidden, (batch, columns, rank), torch.float32, torch.bfloat16)
    for name, codebook in (("predecessor", predecessor), ("successor", successor)):
        require_contiguous(name, codebook, (vocabulary, rank), torch.float32, torch.bfloat16)
    for name, scalars in (("anchors", anchors), ("frontier", frontier), ("seeds", seeds), ("sub", sub)):
        require_contiguous(name, scalars, (batch,), torch.int64)
    require_contiguous("temperature", temperature, (batch,), torch.float32)
    if reproducible is not None:
        require("reproducible", reproducible, (batch,), torch.bool)
    drafts = torch.empty(batch, columns, dtype=torch.int64, device=candidates.device)
    law = torch.empty(batch, columns, choices, dtype=torch.float32, device=candidates.device)
    if not drafts.numel():
        return drafts, law
    padded = triton.next_power_of_2(max(choices, 16))
    laws = torch.empty(batch, columns, choices, choices, dtype=torch.float32, device=candidates.device)
    picks = torch.empty(batch, columns, choices, dtype=torch.int32, device=candidates.device)
    overlapping = overlaps(candidates)
    _pick_kernel[(triton.cdiv(choices, _ORIGINS), columns, batch)](
        candidates,
        unary,
        hidden,
        predecessor,
        successor,
        anchors,
        frontier,
        temperature,
        seeds,
        sub,
        temperature if reproducible is None else reproducible,
        laws,
        picks,
        rank,
        CHOICES=choices,
        C=padded,
        R=triton.next_power_of_2(max(rank, 16)),
        ORIGINS=_ORIGINS,
        RACES=reproducible is not None,
        PROPOSAL=PROPOSAL,
        TARGET=TARGET,
        OVERLAPS=overlapping,
        num_warps=2,
        launch_pdl=overlapping,
    )
    _walk_kernel[(batch,)](
        candidates,
        laws,
        picks,
        drafts,
        law,
        COLUMNS=columns,
        COLUMN_BLOCK=triton.next_power_of_2(columns),
        CHOICES=choices,
        C=padded,
        OVERLAPS=overlapping,
        num_warps=1,
        launch_pdl=overlapping,
    )
    return drafts, law


# ------------------------------------------------------------------------------------------------ public


def select_path(
    candidates: torch.Tensor,
    unary: torch.Tensor,
    hidden: torch.Tensor,
    predecessor: torch.Tensor,
    successor: torch.Tensor,
    anchors: torch.Tensor,
    frontier: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    sub: torch.Tensor,
    reproducible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`candidates` int64 [B, K, C], `unary` FP32 [B, K, C], projected `hidden` [B, K, R], codebooks [V, R], `anchors`,
    `frontier`, `seeds`, `sub` int64 [B], `temperature` FP32 [B], `reproducible` bool [B] -> drafts int64 [B, K], q FP32
    [B, K, C]."""
    select = select_path_triton if candidates.is_cuda else select_path_reference
    return select(
        candidates,
        unary,
        hidden,
        predecessor,
        successor,
        anchors,
        frontier,
        temperature,
        seeds,
        sub,
        reproducible,
    )
