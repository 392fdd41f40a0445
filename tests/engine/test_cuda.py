"""The same torch code on a GPU: golden data in FP32, and what BF16 must keep. Run with `-m gpu` on a CUDA machine."""

from __future__ import annotations

import pytest
import torch

from deployment.engine.commands import Export, Import, Sampling
from deployment.engine.events import Imported
from tests.engine.driving import Driver, golden, prompt, seeded
from tests.engine.test_golden import CONFIGURATIONS, compared_rounds, compared_tokens

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def full_precision():
    """FP32 products in FP32: TF32 has 10 bits of mantissa and would move more than near ties."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("backend, draft_tokens, key", CONFIGURATIONS)
def test_golden_tokens_and_accepted_counts_in_fp32(backend, draft_tokens, key):
    driver = Driver(backend, draft_tokens, device="cuda", lanes=2, images=2)
    for index, case in enumerate(golden()):
        finished = driver.run(prompt(index), max_tokens=128, ignore_eos=True)
        tokens = compared_tokens(case["gaps"])
        assert list(finished.token_ids[:tokens]) == case["greedy"][:tokens], index
        if key is not None:
            limit = tokens if tokens < len(case["gaps"]) else len(case["gaps"]) + 16
            rounds = compared_rounds(case["accepted"][key], limit)
            assert list(finished.rounds[: len(rounds)]) == rounds, index


@pytest.mark.parametrize("backend", ["dflash", "dflash2"])
@pytest.mark.parametrize("sampling", [Sampling(), seeded()], ids=["greedy", "seeded"])
def test_a_bf16_session_moves_between_engines_and_goes_on_as_if_it_had_stayed(backend, sampling):
    source, stayed, destination = (
        Driver(backend, device="cuda", dtype="bfloat16", lanes=2, images=4) for _ in range(3)
    )
    ledgers = [
        d.run(prompt(6), session="s", sampling=sampling, max_tokens=20, ignore_eos=True) for d in (source, stayed)
    ]
    assert ledgers[0].token_ids == ledgers[1].token_ids
    exported = source.call(Export("e", "s"))
    assert isinstance(destination.call(Import("i", "s", exported.document)), Imported)
    assert destination.call(Export("e", "s")).document == exported.document
    ledger = prompt(6) + ledgers[0].token_ids
    ends = [
        d.run(ledger, session="s", sampling=sampling, max_tokens=40, ignore_eos=True) for d in (destination, stayed)
    ]
    assert (ends[0].token_ids, ends[0].rounds) == (ends[1].token_ids, ends[1].rounds)


@pytest.mark.parametrize("backend, draft_tokens, key", CONFIGURATIONS[1:])
def test_bf16_acceptance_stays_near_the_golden_mean(backend, draft_tokens, key):
    """A drafter bug on the device never shows as wrong text, so acceptance is compared, over all prompts together."""
    driver = Driver(backend, draft_tokens, device="cuda", dtype="bfloat16", lanes=2, images=2)
    rounds = [driver.run(prompt(i), max_tokens=96, ignore_eos=True).rounds for i in range(len(golden()))]
    here = sum(map(sum, rounds)) / sum(map(len, rounds))
    expected = [case["accepted"][key] for case in golden()]
    there = sum(map(sum, expected)) / sum(map(len, expected))
    assert abs(here - there) < 0.15 * (1 + there)
