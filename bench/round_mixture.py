"""Which experts does a round of random weights choose? For `bench/round.py`.

A trained router is balanced: over many tokens each expert is chosen about as often as every other, and the choices of
unlike tokens have little in common. A router of random weights does the same with unlike tokens, but drafters of random
weights propose one token again and again, and all columns of one token choose the same experts. So the drafts of a
round are replaced by random ids before they are verified (`VariedDrafts`), and what the layers then choose is counted
(`chosen_experts`), not assumed: `experts` of a row is the mean number of different ones of a layer. Tokens of a real
text are less unlike than random ones: a trained model's rounds choose fewer experts, and read less.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch

from deployment.engine.graphs import Runs
from kernels.router import Routing, route
from model.mlp import MoeMlp
from model.target import Target


@dataclass(frozen=True)
class VariedDrafts:
    """Runs segments; behind `propose`, `drafts` int64 are ids below `public_rows` that no drafter thought of."""

    runs: Runs
    drafts: torch.Tensor
    public_rows: int

    def __call__(self, key: Hashable, segment: Callable[[], None]) -> None:
        self.runs(key, segment)
        if isinstance(key, tuple) and key[0] == "propose":
            self.drafts.random_(0, self.public_rows)


@dataclass
class Chosen:
    """How many different experts each mixture chose, one after the other."""

    counts: list[int] = field(default_factory=list)

    @property
    def experts(self) -> float:
        """Of a layer, on average."""
        return sum(self.counts) / max(len(self.counts), 1)

    def unread_bytes(self, target: Target) -> int:
        """Of the experts of all layers that a round does not choose, on average."""
        experts = [block.mlp.experts for block in target.blocks if isinstance(block.mlp, MoeMlp)]
        whole = sum(layer.gate_up.nbytes + layer.down.nbytes for layer in experts)
        return round(whole * (1 - self.experts / experts[0].count))


@contextmanager
def chosen_experts() -> Iterator[Chosen]:
    """Counts the choices of all mixtures that run in it, and waits for the device each time."""
    chosen = Chosen()

    def counted(x: torch.Tensor, router: torch.Tensor, shared_gate: torch.Tensor, top_k: int) -> Routing:
        routing = route(x, router, shared_gate, top_k)
        chosen.counts.append(len(routing.experts.unique()))
        return routing

    with patch("model.mlp.route", counted):
        yield chosen
