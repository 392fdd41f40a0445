"""The lanes' sampling controls as tensors, one row a lane: what acceptance, penalties and masks of `kernels/` take.

Histories are rebuilt from the ledgers, so there is no counter that could disagree with them after a restore.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from deployment.engine.grammar import Masks
from deployment.engine.lane import Lane
from deployment.engine.messages import Sampling
from deployment.engine.transfer import on_device
from kernels.acceptance import Proposal, RowSampling
from kernels.masking import TokenMasks
from kernels.penalties import RowPenalties, adjust_logits
from kernels.randomness import signed_seed


def row_sampling(lanes: Sequence[Lane], vocabulary: int, device: torch.device) -> RowSampling:
    """B rows; `vocabulary` is the number of public rows."""
    controls = [lane.submit.sampling for lane in lanes]

    def floats(name: str) -> torch.Tensor:
        return on_device(torch.tensor([getattr(c, name) for c in controls], dtype=torch.float32), device)

    def whole(values: Iterable[int]) -> torch.Tensor:
        return on_device(torch.tensor(list(values)), device)

    return RowSampling(
        temperature=floats("temperature"),
        top_k=whole(min(c.top_k, vocabulary) for c in controls),
        top_p=floats("top_p"),
        seeds=whole(signed_seed(c.seed) for c in controls),
        sub=whole(c.sub for c in controls),
        min_p=floats("min_p") if any(c.min_p for c in controls) else None,
        reproducible=whole(c.reproducible for c in controls) if any(c.reproducible for c in controls) else None,
        all_greedy=all(c.temperature <= 0 for c in controls),
    )


def row_penalties(lanes: Sequence[Lane], vocabulary: int, device: torch.device) -> RowPenalties | None:
    """B rows, or None where no lane has a bias or a penalty. Only tokens that have something cross to the device."""
    if not any(_penalised(lane.submit.sampling) for lane in lanes):
        return None
    bias, in_prompt, counts = dict[int, float](), dict[int, float](), Counter[int]()
    for row, lane in enumerate(lanes):
        controls, first = lane.submit.sampling, row * vocabulary
        if not _penalised(controls):
            continue
        for token, added in controls.logit_bias:
            bias[first + token] = bias.get(first + token, 0.0) + added
        in_prompt.update((first + token, 1) for token in set(lane.ledger[: lane.prompt_tokens]))
        counts.update(first + token for token in lane.generated)

    def dense(values: Mapping[int, float], dtype: torch.dtype) -> torch.Tensor:
        where = on_device(torch.tensor(list(values), dtype=torch.int64), device)
        what = on_device(torch.tensor(list(values.values())).to(dtype), device)
        return torch.zeros(len(lanes) * vocabulary, dtype=dtype, device=device).scatter_(0, where, what)

    def floats(name: str) -> torch.Tensor:
        return on_device(torch.tensor([getattr(lane.submit.sampling, name) for lane in lanes]), device)

    shape = len(lanes), vocabulary
    return RowPenalties(
        repetition=floats("repetition_penalty"),
        presence=floats("presence_penalty"),
        frequency=floats("frequency_penalty"),
        bias=dense(bias, torch.float32).view(shape),
        in_prompt=dense(in_prompt, torch.bool).view(shape),
        counts=dense(counts, torch.float32).view(shape),
    )


def token_masks(
    lanes: Sequence[Lane], masks: Masks | None, width: int, vocabulary: int, device: torch.device
) -> TokenMasks | None:
    """What the lanes' grammars allow, less end tokens and stop ids at columns before a lane's `min_tokens`; None if
    everything is allowed."""
    missing = [lane.submit.sampling.min_tokens - len(lane.published) for lane in lanes]
    if masks is None and max(missing) <= 0:
        return None
    constrained = masks.rows if masks else ()
    early = [row for row, count in enumerate(missing) if count > 0]
    rows = [*constrained, *(row for row in early if row not in constrained)]
    words = masks.bits.shape[2] if masks else -(-vocabulary // 32)
    bits = np.full((len(rows), width, words), -1, dtype=np.int32)
    if masks is not None:
        bits[: len(constrained)] = masks.bits
    allowed = bits.view(np.uint8)
    for row in early:
        for token in lanes[row].stop_ids:
            if token < vocabulary:
                allowed[rows.index(row), : missing[row], token // 8] &= 0xFF ^ (1 << token % 8)
    of_lane = torch.full((len(lanes),), -1)
    of_lane[rows] = torch.arange(len(rows))
    return TokenMasks(on_device(torch.from_numpy(allowed), device), on_device(of_lane, device))


def controlled(
    lanes: Sequence[Lane], logits: torch.Tensor, proposal: Proposal | None, masks: Masks | None
) -> torch.Tensor:
    """`logits` FP32 [B, W, V] after bias, penalties and masks, each column with its own history."""
    width, vocabulary = logits.shape[1:]
    penalties = row_penalties(lanes, vocabulary, logits.device)
    allowed = token_masks(lanes, masks, width, vocabulary, logits.device)
    none = torch.empty(len(lanes), 0, dtype=torch.int64, device=logits.device)
    return adjust_logits(logits, none if proposal is None else proposal.drafts, penalties, allowed)


def _penalised(controls: Sampling) -> bool:
    neutral = (controls.repetition_penalty, controls.presence_penalty, controls.frequency_penalty) == (1.0, 0.0, 0.0)
    return bool(controls.logit_bias) or not neutral
