"""Which tokens has each lane's turn seen and said, as the device counts them for penalties?

A lane's row is written whole from its ledger when its turn comes into the lane, and then follows it token by token. The
ledger is what counts: of a turn that comes back from elsewhere the row is written anew. Rows exist from the first turn
on that needs one; the last is of lanes without penalties, and is empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from deployment.engine.lane import Lane
from deployment.engine.messages import Sampling
from deployment.engine.transfer import on_device

_PLANES = {"bias": torch.float32, "in_prompt": torch.bool, "counts": torch.float32}


def history_bytes(lanes: int, vocabulary: int) -> int:
    """What the histories of so many lanes take of the device, from the first turn on that needs one."""
    return (lanes + 1) * vocabulary * sum(dtype.itemsize for dtype in _PLANES.values())


class Histories:
    """For `lanes` lanes and a vocabulary of public rows: `bias` FP32, `in_prompt` bool, `counts` FP32, each
    [lanes + 1, V], as `kernels.penalties.RowPenalties` describes a row of them."""

    def __init__(self, lanes: int, vocabulary: int, device: torch.device) -> None:
        self._lanes = lanes
        self._vocabulary = vocabulary
        self._device = device
        self._written: list[tuple[Lane | None, int]] = [(None, 0)] * lanes
        self.bias = self.in_prompt = self.counts = torch.empty(0)

    def row(self, lane: Lane) -> int:
        """Which row is a lane's."""
        return lane.row if penalised(lane.submit.sampling) else self._lanes

    def follow(self, lanes: Sequence[Lane]) -> None:
        """Takes in what the turns of `lanes` have chosen since they were last here."""
        if not self.counts.numel():
            shape = (self._lanes + 1, self._vocabulary)
            planes = {name: torch.zeros(shape, dtype=dtype, device=self._device) for name, dtype in _PLANES.items()}
            self.bias, self.in_prompt, self.counts = planes["bias"], planes["in_prompt"], planes["counts"]
        for lane in lanes:
            if penalised(lane.submit.sampling):
                self._follow(lane)

    def _follow(self, lane: Lane) -> None:
        known, told = self._written[lane.row]
        total = len(lane.ledger) - lane.prompt_tokens
        if known is not lane or told > total:
            self._begin(lane)
            told = 0
        if told < total:
            new = Counter(lane.ledger[lane.prompt_tokens + told :])
            tokens, times = self._sent(new)
            self.counts[lane.row].index_add_(0, tokens, times)
        self._written[lane.row] = lane, total

    def _begin(self, lane: Lane) -> None:
        bias: dict[int, float] = {}
        for token, added in lane.submit.sampling.logit_bias:
            bias[token] = bias.get(token, 0.0) + added
        prompt = dict.fromkeys(lane.ledger[: lane.prompt_tokens], 1.0)
        for plane, values in ((self.bias, bias), (self.in_prompt, prompt), (self.counts, {})):
            tokens, what = self._sent(values)
            plane[lane.row].zero_().index_copy_(0, tokens, what.to(plane.dtype))

    def _sent(self, values: Mapping[int, float]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = on_device(torch.tensor(list(values), dtype=torch.int64), self._device)
        return tokens, on_device(torch.tensor(list(values.values()), dtype=torch.float32), self._device)


def penalised(controls: Sampling) -> bool:
    """Whether a turn has a bias or a penalty."""
    neutral = (controls.repetition_penalty, controls.presence_penalty, controls.frequency_penalty) == (1.0, 0.0, 0.0)
    return bool(controls.logit_bias) or not neutral
