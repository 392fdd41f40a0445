"""The lanes' sampling controls as tensors, one row a lane: what acceptance and penalties of `kernels/` take.

Histories are rebuilt from the ledgers, so there is no counter that could disagree with them after a restore.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deployment.engine.lane import Lane
from deployment.engine.messages import Sampling
from kernels.acceptance import RowSampling
from kernels.penalties import RowPenalties
from kernels.randomness import signed_seed


def row_sampling(lanes: Sequence[Lane], vocabulary: int, device: torch.device) -> RowSampling:
    """B rows; `vocabulary` is the number of public rows."""
    controls = [lane.submit.sampling for lane in lanes]

    def floats(name: str) -> torch.Tensor:
        return torch.tensor([getattr(c, name) for c in controls], dtype=torch.float32, device=device)

    return RowSampling(
        temperature=floats("temperature"),
        top_k=torch.tensor([min(c.top_k, vocabulary) for c in controls], device=device),
        top_p=floats("top_p"),
        seeds=torch.tensor([signed_seed(c.seed) for c in controls], device=device),
        sub=torch.tensor([c.sub for c in controls], device=device),
        min_p=floats("min_p") if any(c.min_p for c in controls) else None,
        reproducible=torch.tensor([c.reproducible for c in controls], device=device)
        if any(c.reproducible for c in controls)
        else None,
        all_greedy=all(c.temperature <= 0 for c in controls),
    )


def row_penalties(lanes: Sequence[Lane], vocabulary: int, device: torch.device) -> RowPenalties | None:
    """B rows, or None where no lane has a bias or a penalty."""
    if not any(_penalised(lane.submit.sampling) for lane in lanes):
        return None
    shape = (len(lanes), vocabulary)
    bias = torch.zeros(shape)
    in_prompt = torch.zeros(shape, dtype=torch.bool)
    counts = torch.zeros(shape)
    for row, lane in enumerate(lanes):
        controls = lane.submit.sampling
        if not _penalised(controls):
            continue
        for token, added in controls.logit_bias:
            bias[row, token] += added
        in_prompt[row, list(set(lane.ledger[: lane.prompt_tokens]))] = True
        generated = torch.tensor(lane.ledger[lane.prompt_tokens :], dtype=torch.int64)
        counts[row] = torch.bincount(generated, minlength=vocabulary).float()
    controls = [lane.submit.sampling for lane in lanes]
    return RowPenalties(
        repetition=torch.tensor([c.repetition_penalty for c in controls], device=device),
        presence=torch.tensor([c.presence_penalty for c in controls], device=device),
        frequency=torch.tensor([c.frequency_penalty for c in controls], device=device),
        bias=bias.to(device),
        in_prompt=in_prompt.to(device),
        counts=counts.to(device),
    )


def forbidden_ends(lanes: Sequence[Lane], width: int, vocabulary: int, device: torch.device) -> torch.Tensor | None:
    """Bool [B, width, V]: end tokens and stop ids at columns before a lane's `min_tokens`; None if there are none."""
    missing = [lane.submit.sampling.min_tokens - len(lane.published) for lane in lanes]
    if max(missing) <= 0:
        return None
    forbidden = torch.zeros(len(lanes), width, vocabulary, dtype=torch.bool)
    for row, lane in enumerate(lanes):
        if missing[row] > 0:
            ends = [token for token in lane.stop_ids if token < vocabulary]
            forbidden[row, : missing[row], ends] = True
    return forbidden.to(device)


def _penalised(controls: Sampling) -> bool:
    neutral = (controls.repetition_penalty, controls.presence_penalty, controls.frequency_penalty) == (1.0, 0.0, 0.0)
    return bool(controls.logit_bias) or not neutral
