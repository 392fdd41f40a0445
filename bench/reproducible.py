"""What `reproducible` costs DFlash2 in acceptance, beside the normal rule, which reaches the best possible: 1 - TV.

    python -m bench.reproducible [--output FILE]

A reproducible draft is drawn by the race over q with the noise that decides over p: d = argmin E_v / q_v, the target's
y = argmin E_v / p_v, and d stands iff d = y. Token v wins both races iff E_w > E_v max(p_w / p_v, q_w / q_v) for every
other w. The E are independent and exponential, so that

    P(d = y) = sum over v of the integral of e^-t prod_(w != v) e^(-t max(p_w / p_v, q_w / q_v)) dt
             = sum_v 1 / sum_w max(p_w / p_v, q_w / q_v)            v with p_v > 0 and q_v > 0

It lies between (1 - TV) / (1 + TV) and 1 - TV, and is 1 where p = q. Two parts: random laws through the operators, and
the golden prompts of the demo model through the engine, over all columns that a round got to (those whose drafts before
were all accepted). Columns of a file's rows:

    normal, reproducible                    share of the checked drafts that were accepted
    normal_theory, reproducible_theory      mean of 1 - TV, and of the sum above, over the columns of that run
    best                                    mean of 1 - TV over the columns of the reproducible run
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from deployment.engine import round as rounds
from deployment.engine.commands import Sampling, Submit
from deployment.engine.engine import Engine
from deployment.engine.events import Event, Finished
from deployment.engine.loading import Models, load_models
from deployment.engine.options import EngineOptions
from kernels.acceptance import Proposal, RowSampling, Verdict, accept
from kernels.sampling import processed_distribution
from kernels.selector import select_path
from model import DEMO

TEMPERATURES = (0.3, 0.6, 1.0, 1.4)
VOCABULARY, CANDIDATES, LAWS, DRAWS = 64, 16, 200, 200
DRAFT_NOISE = 0.7
"""Spread of what a draft's scores differ by from the target's, whose own spread is 2."""
PROMPTS, TOKENS = 12, 96


def common_mass(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """1 - TV: the acceptance of the best rule. `p`, `q` [..., V] -> [...]."""
    return torch.minimum(p, q).sum(-1)


def race_acceptance(p: torch.Tensor, q: torch.Tensor) -> float:
    """The probability that two races with the same noise have one winner (see above). `p`, `q` [V]."""
    p, q = p.double(), q.double()
    both = ((p > 0) & (q > 0)).nonzero()
    return float((1 / torch.maximum(p / p[both], q / q[both]).sum(-1)).sum())


def dense(proposal: Proposal, vocabulary: int) -> torch.Tensor:
    """q over the vocabulary: FP32 [B, K, V]."""
    assert proposal.candidates is not None and proposal.law is not None
    q = proposal.law.new_zeros(*proposal.law.shape[:2], vocabulary)
    return q.scatter_add_(-1, proposal.candidates, proposal.law)


def processed(logits: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """p of every column: FP32 [B, W, V] -> the same."""
    width, vocabulary = logits.shape[1:]
    controls = (row.repeat_interleave(width) for row in (rows.temperature, rows.top_k, rows.top_p))
    return processed_distribution(logits.reshape(-1, vocabulary), *controls).view_as(logits)


class Columns:
    """The columns that rounds got to: how many drafts stood, and what the two rules could reach there."""

    def __init__(self) -> None:
        self.checked = self.accepted = 0
        self._best: list[torch.Tensor] = []
        self._race: list[float] = []

    def add(self, p: torch.Tensor, q: torch.Tensor, extent: torch.Tensor, accepted: torch.Tensor) -> None:
        """`p` [B, >= K', V], `q` [B, K', V] of a round; `extent`, `accepted` int64 [B]."""
        column = torch.arange(q.shape[1])
        reached = (column < extent[:, None]) & (column <= accepted[:, None])
        p, q = p[:, : q.shape[1]][reached], q[reached]
        self.checked += len(q)
        self.accepted += int(accepted.sum())
        self._best.append(common_mass(p, q))
        self._race += [race_acceptance(*pair) for pair in zip(p, q, strict=True)]

    @property
    def share(self) -> float:
        return self.accepted / self.checked

    @property
    def best(self) -> float:
        return float(torch.cat(self._best).double().mean())

    @property
    def race(self) -> float:
        return statistics.mean(self._race)


def row(where: str, temperature: float, normal: Columns, reproducible: Columns) -> dict[str, Any]:
    return {
        "where": where,
        "temperature": temperature,
        "normal": normal.share,
        "normal_theory": normal.best,
        "reproducible": reproducible.share,
        "reproducible_theory": reproducible.race,
        "best": reproducible.best,
        "columns": {"normal": normal.checked, "reproducible": reproducible.checked},
    }


# ------------------------------------------------------------------------------------------------ random laws


def random_laws(temperature: float, reproducible: bool) -> Columns:
    """LAWS pairs of laws, one column each, DRAWS seeds a pair."""
    generator = torch.Generator().manual_seed(41)
    target = 2.0 * torch.randn(LAWS, VOCABULARY, generator=generator)
    draft = target + DRAFT_NOISE * torch.randn(LAWS, VOCABULARY, generator=generator)
    unary, candidates = draft.topk(CANDIDATES)
    columns, ones = Columns(), torch.ones(LAWS, dtype=torch.int64)
    codebook = torch.zeros(VOCABULARY, 1)
    for draw in range(DRAWS):
        rows = RowSampling(
            torch.full((LAWS,), temperature),
            ones * 0,
            torch.ones(LAWS),
            ones.cumsum(0) + draw * LAWS,
            ones * 0,
            reproducible=torch.full((LAWS,), reproducible),
        )
        drafts, law = select_path(
            candidates[:, None],
            unary[:, None],
            torch.zeros(LAWS, 1, 1),
            codebook,
            codebook,
            ones,
            ones,
            rows.temperature,
            rows.seeds,
            rows.sub,
            rows.reproducible,
        )
        proposal = Proposal(drafts, candidates[:, None], law)
        logits = target[:, None].expand(-1, 2, -1)
        verdict = accept(logits, proposal, ones, ones, rows)
        if draw == 0:
            columns.add(processed(logits, rows), dense(proposal, VOCABULARY), ones, verdict.accepted)
        else:  # the same laws again
            columns.checked, columns.accepted = columns.checked + LAWS, columns.accepted + int(verdict.accepted.sum())
    return columns


# ------------------------------------------------------------------------------------------------ the demo model


def demo_model(models: Models, options: EngineOptions, sampling: Sampling) -> Columns:
    """Every golden prompt with seeds of its own."""
    columns = Columns()

    def recorded(
        logits: torch.Tensor, proposal: Proposal | None, extent: torch.Tensor, frontier: torch.Tensor, rows: RowSampling
    ) -> Verdict:
        verdict = accept(logits, proposal, extent, frontier, rows)
        if proposal is not None:
            q = dense(proposal, logits.shape[-1])[:, : logits.shape[1] - 1]
            columns.add(processed(logits, rows), q, extent, verdict.accepted)
        return verdict

    cases = json.loads((DEMO / "golden_public.json").read_text())["prompts"][:PROMPTS]
    events: list[Event] = []
    engine = Engine(models, options, events.append)
    with patch.object(rounds, "accept", recorded):
        for index, case in enumerate(cases):
            submit = Submit(f"t{index}", tuple(case["prompt"]), replace(sampling, seed=index), TOKENS)
            engine.execute(submit)
        while engine.step():
            pass
    assert sum(isinstance(event, Finished) for event in events) == len(cases), events[-1]
    return columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options = EngineOptions(DEMO / "target", DEMO / "dflash2", "dflash2", lanes=4, images=0)
    models = load_models(options)
    rows: list[dict[str, Any]] = []
    print(f"{'':12} {'T':>4} {'normal':>7} {'theory':>7} {'repr.':>7} {'theory':>7} {'best':>7}")
    for temperature in TEMPERATURES:
        operators = [random_laws(temperature, reproducible) for reproducible in (False, True)]
        sampling = Sampling(temperature=temperature)
        demo = [demo_model(models, options, replace(sampling, reproducible=flag)) for flag in (False, True)]
        for where, pair in (("random laws", operators), ("demo model", demo)):
            rows.append(row(where, temperature, *pair))
            numbers = [rows[-1][name] for name in ("normal", "normal_theory", "reproducible", "reproducible_theory")]
            shown = " ".join(f"{value:7.3f}" for value in (*numbers, rows[-1]["best"]))
            print(f"{where:12} {temperature:4} {shown}", flush=True)
    if arguments.output:
        facts = {"card": platform.machine(), "torch": torch.__version__, "dtype": "float32", "threads": 1}
        arguments.output.write_text(json.dumps({**facts, "tokens": TOKENS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
