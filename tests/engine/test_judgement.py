"""Judging lanes a few at a time: a slice's verdicts are those of all lanes together, and its logits fit its bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deployment.engine import judgement
from deployment.engine.controls import row_sampling
from deployment.engine.errors import EngineError
from deployment.engine.grammar import Masks
from deployment.engine.judgement import judge, lane_slices
from deployment.engine.messages import Sampling
from kernels.acceptance import Proposal

LANES, WIDTH, VOCABULARY, CHOICES = 7, 4, 200, 5
CONTROLS = (
    Sampling(),
    Sampling(temperature=0.8, seed=3, logprobs=2),
    Sampling(temperature=1.0, seed=4, top_k=20, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.2),
    Sampling(temperature=0.7, seed=5, min_p=0.1, logit_bias=((7, 3.0),)),
    Sampling(temperature=1.2, seed=6, reproducible=True, logprobs=0),
    Sampling(min_tokens=9, logprobs=3),
    Sampling(temperature=0.9, seed=8, frequency_penalty=0.5),
)


def lane(index: int) -> Any:
    ledger = [(11 * index + i) % VOCABULARY for i in range(12)]
    return SimpleNamespace(
        submit=SimpleNamespace(sampling=CONTROLS[index]),
        ledger=ledger,
        prompt_tokens=8,
        generated=ledger[8:],
        published=ledger[8:],
        stop_ids=frozenset({3}),
    )


def scene(law: bool) -> tuple[Any, ...]:
    """Logits that mostly agree with the drafts, extents from 0 on, and two lanes with a grammar, of which one ends."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(LANES, WIDTH, VOCABULARY, generator=generator) * 3
    candidates = torch.randint(0, VOCABULARY, (LANES, WIDTH - 1, CHOICES), generator=generator)
    hidden[:, :-1].scatter_add_(-1, candidates, torch.full(candidates.shape, 8.0))
    scores = hidden[:, :-1].gather(-1, candidates)
    drafts = candidates.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
    proposal = Proposal(drafts, candidates, scores.softmax(-1)) if law else Proposal(drafts)
    bits = np.random.default_rng(2).integers(-(2**31), 2**31, (2, WIDTH, -(-VOCABULARY // 32)), dtype=np.int32)
    masks = Masks(bits, (1, 5), {5: (0, EngineError("dead_end", "nothing may follow"))})
    lanes = [lane(index) for index in range(LANES)]
    extent = torch.arange(LANES) % WIDTH
    frontier = torch.arange(LANES) * 10 + 11
    return lanes, hidden, lambda x: x, VOCABULARY, proposal, masks, extent, frontier


@pytest.mark.parametrize("lanes_a_slice", [1, 2, 3])
@pytest.mark.parametrize("law", [False, True])
def test_slices_give_what_all_lanes_together_give(
    law: bool, lanes_a_slice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes, *rest = scene(law)
    sampling = row_sampling(lanes, VOCABULARY, torch.device("cpu"))
    whole = judge(lanes, *rest, sampling=sampling)
    monkeypatch.setattr(judgement, "SLICE_BYTES", lanes_a_slice * WIDTH * VOCABULARY * 4)
    assert judge(lanes, *rest, sampling=sampling) == whole
    assert len(whole.licensed) == LANES and max(whole.accepted) > 0
    assert [bool(told) for told in whole.logprobs] == [
        c.logprobs is not None and bool(t) for c, t in zip(CONTROLS, whole.licensed, strict=True)
    ]
    assert [lanes.index(ended) for ended, _ in whole.dead_ends] == [5] and whole.licensed[5] == ()


def test_the_logits_of_a_slice_take_at_most_its_bytes() -> None:
    slices = lane_slices(64, 16, 248_077)
    assert [index for part in slices for index in range(64)[part]] == list(range(64))
    assert max(part.stop - part.start for part in slices) == 16
    assert lane_slices(3, 16, 10**9) == [slice(0, 1), slice(1, 2), slice(2, 3)]
