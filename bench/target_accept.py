"""The target's accept on a card, for `bench/target_kernels.py`: controls, masks and verdict from raw logits.

All controls are on for every lane, and a mask that forbids half of the vocabulary; the public rows of Qwen3.5.

    27B       DFlash: every column races; top-k 40, top-p 0.95, min-p 0.02, as served models are asked
    27B-wide  DFlash, top-p 0.95 alone of a flat distribution: ten thousands of tokens are kept
    27B-law   DFlash2: q of 16 candidates a column

The error is that of p against FP64, or the share of lanes whose tokens are not the torch reference's if that is
larger. The peer is the obvious torch: the same controls, then sort, softmax, running sums and `torch.multinomial`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from bench.gpu import norm_error, sets
from bench.target_works import DEVICE, Peer, Work
from kernels.acceptance import Proposal, RowSampling, Verdict, accept, accept_reference
from kernels.cut_search import BEST, STEEP
from kernels.cuts import RowControls, find_cuts
from kernels.masking import TokenMasks
from kernels.ordering import top_rows
from kernels.penalties import RowPenalties, adjust_logits, adjust_logits_reference
from kernels.sampling import weights_of

PUBLIC, VOCABULARY, CHOICES = 248_077, 248_320, 16
WIDTH = 8
BATCHES = (1, 8, 16, 64)
"""8, 64, 128 and 512 rows."""


@dataclass(frozen=True)
class Scene:
    logits: torch.Tensor
    proposal: Proposal
    extent: torch.Tensor
    frontier: torch.Tensor
    sampling: RowSampling
    penalties: RowPenalties
    masks: TokenMasks

    def adjusted(self) -> torch.Tensor:
        return adjust_logits(self.logits, self.proposal.drafts, self.penalties, self.masks)

    def verdict(self) -> Verdict:
        return accept(self.adjusted(), self.proposal, self.extent, self.frontier, self.sampling)

    def obvious(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The one-hot rule as one would write it: torch's noise, so that only the law is the same."""
        drafts, rows = self.proposal.drafts, self.sampling
        logits = adjust_logits_reference(self.logits, drafts, self.penalties, self.masks)
        scaled, order = (logits / rows.temperature[:, None, None]).sort(-1, descending=True)
        rank = torch.arange(scaled.shape[-1], device=DEVICE)
        keep = torch.where(rows.top_k > 0, rows.top_k, scaled.shape[-1])[:, None, None]
        p = scaled.masked_fill(rank >= keep, -torch.inf).softmax(-1)
        p = p.masked_fill(p.cumsum(-1) - p >= rows.top_p[:, None, None], 0.0)
        assert rows.min_p is not None
        p = p.masked_fill(p < rows.min_p[:, None, None] * p[..., :1], 0.0)
        drawn = torch.multinomial(p.flatten(0, 1), 1).view(*p.shape[:2], 1)
        tokens = order.gather(-1, drawn)[..., 0]
        return tokens, (tokens[:, :-1] == drafts).int().cumprod(-1).sum(-1)


def scene(model: str, batch: int, seed: int) -> Scene:
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=DEVICE, generator=generator)

    def filled(value: float) -> torch.Tensor:
        return torch.full((batch,), value, device=DEVICE)

    wide = model == "27B-wide"
    logits = normal(batch, WIDTH, VOCABULARY).mul_(1.0 if wide else 2.5)[..., :PUBLIC]
    # what a model says: some tokens far above the others, mostly at the first columns' drafts
    likely = torch.randint(0, PUBLIC, (batch, WIDTH, CHOICES), device=DEVICE, generator=generator)
    if not wide:
        logits.scatter_add_(-1, likely, 14 + 2 * normal(batch, WIDTH, CHOICES))
    candidates = likely[:, : WIDTH - 1].contiguous()
    scores = logits[:, : WIDTH - 1].gather(-1, candidates)
    law = scores.softmax(-1)
    drafts = candidates.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
    counts = (uniform(batch, PUBLIC) < 1e-3).float()
    penalties = RowPenalties(
        filled(1.1),
        filled(0.2),
        filled(0.1),
        (uniform(batch, PUBLIC) < 1e-3) * normal(batch, PUBLIC),
        uniform(batch, PUBLIC) < 1e-2,
        counts,
    )
    allowed = torch.randint(0, 256, (batch, WIDTH, VOCABULARY // 8), device=DEVICE, generator=generator).byte()
    ids = torch.arange(batch, device=DEVICE)
    return Scene(
        logits,
        Proposal(drafts, candidates, law) if model == "27B-law" else Proposal(drafts),
        torch.full_like(ids, WIDTH - 1),
        ids * 1000 + seed,
        RowSampling(
            filled(1.0 if wide else 0.8),
            torch.full_like(ids, 0 if wide else 40),
            filled(0.95),
            ids * 7919 + seed,
            ids * 0,
            filled(0.0 if wide else 0.02),
        ),
        penalties,
        TokenMasks(allowed, ids),
    )


def probabilities(at: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """p of all rows by the kernels' cuts, FP32 [R, V], and that of FP64, each row in its own order."""
    rows, logits = at.sampling, at.adjusted()
    cuts = find_cuts(logits, RowControls(rows.temperature, rows.top_k, rows.top_p, rows.min_p, at.extent))
    ours, exact = [], []
    for row, values in enumerate(logits.flatten(0, 1)):
        lane = row // WIDTH
        bits = (values + 0.0).view(torch.int32)
        ordinal = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
        keys = ordinal * (1 << 32) + (0xFFFFFFFF - torch.arange(len(values), device=DEVICE))
        weight = weights_of(values[None], *(cuts.state[row : row + 1, field.value] for field in (BEST, STEEP)))[0]
        assert rows.min_p is not None
        kept = (keys >= cuts.cut[row]) & (weight >= rows.min_p[lane])
        ours.append(torch.where(kept, weight / cuts.total[row], 0.0))

        raw = at.logits.flatten(0, 1)[row].double()
        history, penalties = at.penalties.counts[lane].double(), at.penalties
        for draft in at.proposal.drafts[lane, : row % WIDTH]:
            history = history.index_add(0, draft[None], torch.ones(1, dtype=torch.float64, device=DEVICE))
        z = raw + penalties.bias[lane]
        repetition = penalties.repetition[lane].double()
        z = torch.where(
            penalties.in_prompt[lane] | (history > 0), torch.where(z > 0, z / repetition, z * repetition), z
        )
        z = z - penalties.presence[lane].double() * (history > 0) - penalties.frequency[lane].double() * history
        z = z.masked_fill(values == -torch.inf, -torch.inf)
        best, order = z.sort(descending=True, stable=True)
        p = ((best - best[0]) / rows.temperature[lane].double()).exp()
        rank, k = torch.arange(len(p), device=DEVICE), rows.top_k[lane]
        p = p.masked_fill((k > 0) & (rank >= k), 0.0)
        p = p.masked_fill(p.cumsum(0) - p >= rows.top_p[lane].double() * p.sum(), 0.0)
        p = p.masked_fill(p < rows.min_p[lane].double(), 0.0)
        exact.append(torch.zeros_like(p).scatter_(0, order, p / p.sum()).float())
    return torch.stack(ours), torch.stack(exact)


def error(at: Scene) -> float:
    """Of the first eight lanes: others differ in their numbers alone."""
    lanes = slice(0, 8)
    at = Scene(
        at.logits[lanes],
        Proposal(*(None if x is None else x[lanes] for x in vars(at.proposal).values())),  # type: ignore[arg-type]
        at.extent[lanes],
        at.frontier[lanes],
        replace(at.sampling, **{n: x[lanes] for n, x in vars(at.sampling).items() if isinstance(x, torch.Tensor)}),
        RowPenalties(*(x[lanes] for x in vars(at.penalties).values())),
        TokenMasks(at.masks.allowed[lanes], at.masks.of_lane[lanes]),
    )
    ours = at.verdict()
    theirs = accept_reference(at.adjusted(), at.proposal, at.extent, at.frontier, at.sampling)
    live = torch.arange(WIDTH, device=DEVICE) <= theirs.accepted[:, None]
    differs = (ours.accepted != theirs.accepted) | ((ours.licensed != theirs.licensed) & live).any(-1)
    assert bool((top_rows(at.adjusted()[0], 1)[0] > -torch.inf).all())
    return max(norm_error(*probabilities(at)), float(differs.double().mean()))


def works() -> Iterator[Work]:
    for model in ("27B", "27B-wide", "27B-law"):
        for batch in BATCHES:
            size = batch * (WIDTH * PUBLIC * 4 + PUBLIC * 9 + WIDTH * VOCABULARY // 8)
            scenes = [scene(model, batch, seed) for seed in range(sets(size))]
            peer = Peer("torch sort, cumsum, multinomial", [scenes[0].obvious]) if model != "27B-law" else None
            yield Work(
                *("accept", model, batch, WIDTH, 0),
                [at.verdict for at in scenes],
                size,
                lambda at=scenes[0]: error(at),
                peer,
            )
            torch.cuda.empty_cache()
