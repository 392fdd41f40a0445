"""Random weights, and one sequence through a target in chunks: what comparisons with transformers share."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from model.media_positions import media_positions
from model.placeholders import MediaSpan, inserted
from model.target import Columns, Target, TargetState


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Every parameter: initial values (norms of 0 or 1, dt_bias of 1) would hide what is done to them."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            parameter.data = noise * 0.5
        elif parameter.dim() == 1:
            parameter.data = parameter.data + noise * 0.3
        else:
            parameter.data = noise / parameter.shape[-1] ** 0.5


class Runner:
    """One sequence through a target, in chunks: logits and the residual after every block. `spans`, `embeddings`: its
    media, which may be cut by a chunk's end."""

    def __init__(
        self, target: Target, spans: Sequence[MediaSpan] = (), embeddings: Sequence[torch.Tensor] = ()
    ) -> None:
        c = target.config
        full, delta, pages = len(c.full_layers), len(c.gdn_layers), 3
        self.target = target
        self.spans = spans
        self.embeddings = embeddings
        self.position = 0
        self.state = TargetState(
            keys=torch.full((pages, full, 64, c.num_kv_heads, c.head_dim), float("nan")),
            values=torch.full((pages, full, 64, c.num_kv_heads, c.head_dim), float("nan")),
            recurrent=torch.zeros(1, delta, c.gdn_value_heads, c.gdn_key_dim, c.gdn_value_dim),
            history=torch.zeros(1, delta, c.conv_channels, c.conv_kernel - 1),
        )

    def run(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start, self.position = self.position, self.position + len(ids)
        columns = Columns(
            ids[None],
            torch.tensor([start]),
            torch.tensor([len(ids)]),
            torch.tensor([[2, 0, 1]]),
            torch.tensor([0]),
            positions=media_positions(self.spans, start, self.position)[None] if self.spans else None,
            inserted=inserted(self.spans, start, self.position, lambda item: self.embeddings[item]),
        )
        forward = self.target.prefill(columns, self.state, tuple(range(self.target.config.num_layers)))
        assert forward.features is not None
        return self.target.logits(forward.hidden)[0], forward.features[0]

    def chunks(self, ids: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [self.run(piece) for piece in ids.split(sizes)]
        return torch.cat([logits for logits, _ in parts]), torch.cat([features for _, features in parts])


def random_sizes(total: int, seed: int) -> list[int]:
    rng, sizes = random.Random(seed), []
    while sum(sizes) < total:
        sizes.append(min(rng.choice([1, 2, 7, 31, 64]), total - sum(sizes)))
    return sizes


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
