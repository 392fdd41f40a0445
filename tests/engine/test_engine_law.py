"""The law of what a whole engine generates, over many short turns: exactly that of its target (decisions 14, 15).

Scheduler, prefill, drafter, verification, commit and publication all take part; only the model is tiny, so that the
target alone gives the law of the first three tokens, context by context. An engine that accepts one draft more than the
rule allows must fail the very same test.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from deployment.engine import segments
from deployment.engine.commands import Sampling, Submit
from deployment.engine.engine import Engine
from deployment.engine.events import Event, Finished
from deployment.engine.options import Backend
from kernels.acceptance import Proposal, RowSampling, Verdict, accept, choose
from model.target import Columns, TargetState
from tests.engine.tiny import PUBLIC, tiny_models, tiny_options
from tests.kernels import oracles
from tests.kernels.test_controls import ENDS, PROMPT, Controls

TURNS, LANES = 400, 32
TOKENS = 3
MAX_TOKENS = 5
"""Of a turn, so that rounds that license the first three tokens may propose more."""
CASES: dict[str, tuple[Backend, bool]] = {
    "drafting off": ("none", False),
    "DFlash": ("dflash", False),
    "DFlash2": ("dflash2", False),
    "DFlash2 reproducible": ("dflash2", True),
}
PLAIN = Controls(temperature=0.9)
MIXED = Controls(0.8, 6, 0.9, 0.05, 1.3, 0.3, 0.4, (0.5,) + (0.0,) * 6 + (-0.5,), 2)


def submit(seed: int, controls: Controls, reproducible: bool) -> Submit:
    sampling = Sampling(
        temperature=controls.temperature,
        top_k=controls.top_k,
        top_p=controls.top_p,
        min_p=controls.min_p,
        repetition_penalty=controls.repetition,
        presence_penalty=controls.presence,
        frequency_penalty=controls.frequency,
        logit_bias=tuple((token, added) for token, added in enumerate(controls.bias) if added),
        min_tokens=controls.min_tokens,
        seed=seed,
        reproducible=reproducible,
    )
    return Submit(f"turn-{seed}", PROMPT, sampling, MAX_TOKENS, stop_ids=ENDS if controls.min_tokens else ())


def generated(name: str, controls: Controls, turns: int) -> tuple[torch.Tensor, float]:
    """The first three committed ids of every turn, and accepted drafts a round. An end token is committed too; what
    would follow it counts as the token PUBLIC."""
    backend, reproducible = CASES[name]
    events: list[Event] = []
    engine = Engine(tiny_models(backend), tiny_options(backend, lanes=LANES, images=0), events.append)
    for first in range(0, turns, 2 * LANES):
        for seed in range(first, min(turns, first + 2 * LANES)):
            engine.execute(submit(seed, controls, reproducible))
        while engine.step():
            pass
    ends = [event for event in events if isinstance(event, Finished)]
    assert len(ends) == turns
    engine.memory.check_invariants()
    rows = [(event.token_ids + event.hidden_ids + (PUBLIC,) * TOKENS)[:TOKENS] for event in ends]
    accepted = [count for event in ends for count in event.rounds]
    return torch.tensor(rows), sum(accepted) / len(accepted)


@functools.cache
def target_logits() -> dict[tuple[int, ...], list[float]]:
    """What the target alone says after the prompt and each of 0, 1 and 2 further tokens: one prefill a context."""
    target = tiny_models("none").target
    c = target.config
    found: dict[tuple[int, ...], list[float]] = {}
    for further in itertools.product(range(PUBLIC), repeat=TOKENS - 1):
        ids = torch.tensor([[*PROMPT, *further]])
        pages = (1, len(c.full_layers), 64, c.num_kv_heads, c.head_dim)
        recurrent = (1, len(c.gdn_layers), c.gdn_value_heads, c.gdn_key_dim, c.gdn_value_dim)
        history = (1, len(c.gdn_layers), c.conv_channels, c.conv_kernel - 1)
        state = TargetState(*(torch.zeros(shape) for shape in (pages, pages, recurrent, history)))
        zero = torch.tensor([0])
        columns = Columns(ids, zero, torch.tensor([ids.shape[1]]), zero[None], zero)
        logits = target.logits(target.prefill(columns, state).hidden)[0]
        for count in range(TOKENS):
            found[further[:count]] = logits[len(PROMPT) - 1 + count].tolist()
    return found


@functools.cache
def joint_law(controls: Controls) -> torch.Tensor:
    """FP64 [9, 9, 9] of the first three committed tokens; the token PUBLIC stands for "the turn is over"."""
    joint = torch.zeros((PUBLIC + 1,) * TOKENS, dtype=torch.float64)
    joint[-1, -1, -1] = 1.0  # so far nothing is generated, with certainty
    ends = ENDS if controls.min_tokens else ()
    for place in range(TOKENS):
        for before in itertools.product(range(PUBLIC), repeat=place):
            cell = before + (PUBLIC,) * (TOKENS - place)
            if float(joint[cell]) == 0 or any(token in ends for token in before):
                continue
            probability, joint[cell] = float(joint[cell]), 0.0
            for token, p in enumerate(controls.law(target_logits()[before], before)):
                joint[before + (token,) + (PUBLIC,) * (TOKENS - place - 1)] += probability * p
    return joint


def p_values(tokens: torch.Tensor, controls: Controls) -> tuple[float, float]:
    """Of the joint law of three tokens, and of the two that come out of rounds."""
    side = PUBLIC + 1
    cell = (tokens[:, 0] * side + tokens[:, 1]) * side + tokens[:, 2]
    counts = torch.bincount(cell, minlength=side**TOKENS).view(side, side, side)
    law = joint_law(controls)
    return oracles.chi_square(counts, law), oracles.chi_square(counts.sum(0), law.sum(0))


def too_eager(
    logits: torch.Tensor, proposal: Proposal | None, extent: torch.Tensor, frontier: torch.Tensor, rows: RowSampling
) -> Verdict:
    """The planted fault: the first draft that is rejected is accepted all the same, and the target's choice follows."""
    verdict = accept(logits, proposal, extent, frontier, rows)
    if proposal is None:
        return verdict
    row = torch.arange(len(extent))
    eager = torch.minimum(verdict.accepted + 1, extent)
    positions = frontier[:, None] + torch.arange(logits.shape[1])
    licensed = torch.cat((proposal.drafts[:, : logits.shape[1] - 1], verdict.licensed[:, :1]), dim=1)
    licensed[row, eager] = choose(logits, positions, rows)[row, eager]
    return Verdict(licensed, eager)


@pytest.mark.parametrize("name", CASES)
def test_three_tokens_of_an_engine_have_exactly_the_targets_law(name: str) -> None:
    tokens, accepted = generated(name, PLAIN, TURNS)
    assert min(p_values(tokens, PLAIN)) > 1e-3
    assert (accepted > 0.15) == (name != "drafting off")


def test_the_law_is_that_of_the_controlled_target_under_a_mixture_of_controls() -> None:
    tokens, _ = generated("DFlash2", MIXED, TURNS)
    assert min(p_values(tokens, MIXED)) > 1e-3
    assert p_values(tokens, replace(MIXED, frequency=0.0))[0] < 1e-6, "a law without one of the controls fits too"


@pytest.mark.parametrize("name", ["DFlash", "DFlash2"])
def test_an_engine_that_accepts_one_draft_too_many_fails_the_same_test(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "accept", too_eager)
    tokens, _ = generated(name, PLAIN, TURNS // 4)
    assert max(p_values(tokens, PLAIN)) < 1e-6


@pytest.mark.soak
@pytest.mark.parametrize("controls", [PLAIN, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_the_law_holds_over_many_more_turns(name: str, controls: Controls) -> None:
    tokens, _ = generated(name, controls, 3000)
    assert min(p_values(tokens, controls)) > 1e-3
