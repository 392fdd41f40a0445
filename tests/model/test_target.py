"""The target against transformers' Qwen3.5, on the demo checkpoint: whole, in odd chunks, and token by token."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from model import DEMO
from model.config import load_target_config
from model.target import Columns, Target, TargetState
from model.weights import WeightFiles

TOLERANCE = 2e-4
TOKENS = 150


@pytest.fixture(scope="module")
def target() -> Target:
    directory = DEMO / "target"
    config = load_target_config(directory)
    checkpoint = WeightFiles.open(directory)
    return Target.load(checkpoint, config, config.vocab_size, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def token_ids() -> torch.Tensor:
    golden = json.loads((DEMO / "golden_public.json").read_text())
    prompt = golden["prompts"][0]
    return torch.tensor((prompt["prompt"] + prompt["greedy"])[:TOKENS])


@pytest.fixture(scope="module")
def oracle(token_ids: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Logits [T, V] and the residual after every block but the last [T, H] of transformers' own code."""
    from transformers import Qwen3_5ForCausalLM

    theirs = Qwen3_5ForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()
    with torch.no_grad():
        out = theirs(token_ids[None], output_hidden_states=True)
    return out.logits[0], tuple(h[0] for h in out.hidden_states[1:-1])


def new_state(target: Target, slots: int = 1, pages: int = 8) -> TargetState:
    c = target.config
    poison = float("nan")  # unwritten rows must never be read
    full, delta = len(c.full_layers), len(c.gdn_layers)
    return TargetState(
        keys=torch.full((pages, full, 64, c.num_kv_heads, c.head_dim), poison),
        values=torch.full((pages, full, 64, c.num_kv_heads, c.head_dim), poison),
        recurrent=torch.zeros(slots, delta, c.gdn_value_heads, c.gdn_key_dim, c.gdn_value_dim),
        history=torch.zeros(slots, delta, c.conv_channels, c.conv_kernel - 1),
    )


def columns(ids: torch.Tensor, start: int) -> Columns:
    """One row whose pages are in a shuffled order, so that a page table that is ignored shows."""
    table = torch.tensor([[5, 2, 7, 0]])
    return Columns(ids[None], torch.tensor([start]), torch.tensor([len(ids)]), table, torch.tensor([0]))


def run_in_chunks(target: Target, ids: torch.Tensor, sizes: list[int], taps: tuple[int, ...] = ()):
    state = new_state(target)
    logits, features, start = [], [], 0
    for size in sizes:
        forward = target.prefill(columns(ids[start : start + size], start), state, taps)
        logits.append(target.logits(forward.hidden)[0])
        if forward.features is not None:
            features.append(forward.features[0])
        start += size
    assert start == len(ids)
    return torch.cat(logits), torch.cat(features) if features else None, state


@pytest.mark.parametrize(
    "sizes",
    [[TOKENS], [1, 7, 64, 13, 65], [1] * TOKENS],
    ids=["one piece", "odd chunks", "token by token"],
)
def test_logits_equal_those_of_transformers(target, token_ids, oracle, sizes):
    logits, _, _ = run_in_chunks(target, token_ids, sizes)
    assert (logits - oracle[0]).abs().max() < TOLERANCE


def test_tapped_features_are_the_residuals_after_those_blocks(target, token_ids, oracle):
    _, features, _ = run_in_chunks(target, token_ids, [TOKENS], taps=(1, 3, 6))
    assert features is not None
    expected = torch.cat([oracle[1][i] for i in (1, 3, 6)], dim=-1)
    assert (features - expected).norm() < 1e-5 * expected.norm()


def test_verification_equals_transformers_and_changes_no_image(target, token_ids, oracle):
    state = new_state(target)
    start = 70
    target.prefill(columns(token_ids[:start], 0), state)
    before = state.recurrent.clone(), state.history.clone()
    forward = target.verify(columns(token_ids[start : start + 16], start), state)
    assert (target.logits(forward.hidden)[0] - oracle[0][start : start + 16]).abs().max() < TOLERANCE
    assert torch.equal(state.recurrent, before[0]) and torch.equal(state.history, before[1])


@pytest.mark.parametrize("kept", [0, 1, 3, 4, 9, 16])
def test_fold_equals_recomputation_of_the_kept_columns(target, token_ids, kept):
    start = 61
    state, recomputed = new_state(target), new_state(target)
    target.prefill(columns(token_ids[:start], 0), state)
    target.prefill(columns(token_ids[:start], 0), recomputed)
    before = state.recurrent.clone(), state.history.clone()
    forward = target.verify(columns(token_ids[start : start + 16], start), state)
    target.commit(forward.records, torch.tensor([kept]), torch.tensor([0]), state)
    if kept == 0:
        assert torch.equal(state.recurrent, before[0]) and torch.equal(state.history, before[1])
        return
    target.prefill(columns(token_ids[start : start + kept], start), recomputed)
    assert torch.allclose(state.recurrent, recomputed.recurrent, atol=1e-4)
    assert torch.allclose(state.history, recomputed.history, atol=1e-4)


def test_inactive_columns_of_a_ragged_batch_change_nothing(target, token_ids):
    """Two rows of 5 and 2 live columns: each row's live columns equal its run alone, whatever the filler is."""
    start = 40
    state = new_state(target, slots=2, pages=8)
    tables = torch.tensor([[5, 2], [7, 0]])
    for row in range(2):
        one = Columns(
            token_ids[None, :start],
            torch.tensor([0]),
            torch.tensor([start]),
            tables[row : row + 1],
            torch.tensor([row]),
        )
        target.prefill(one, state)
    ids = token_ids[start : start + 5].repeat(2, 1)
    ids[1, 2:] = 17
    batch = Columns(ids, torch.tensor([start, start]), torch.tensor([5, 2]), tables, torch.tensor([0, 1]))
    forward = target.verify(batch, state)
    assert torch.allclose(forward.hidden[0, :2], forward.hidden[1, :2], atol=1e-4)
    target.commit(forward.records, torch.tensor([2, 2]), torch.tensor([0, 1]), state)
    assert torch.allclose(state.recurrent[0], state.recurrent[1], atol=1e-4)
    assert torch.isnan(state.keys[7, :, start + 2 :]).all()


def test_bf16_weights_give_fp32_logits_that_are_not_rounded_to_bf16(token_ids):
    """Near 16 to 32, BF16 steps are 0.125: rounding the head's output would tie neighbours and reorder them."""
    directory = DEMO / "target"
    config = load_target_config(directory)
    narrow = Target.load(WeightFiles.open(directory), config, 8000, torch.device("cpu"), torch.bfloat16)
    hidden = 4 * torch.randn(20, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = narrow.logits(hidden)
    exact = hidden.double() @ narrow.head[:8000].double().T
    assert logits.dtype == torch.float32 and logits.shape == (20, 8000)
    assert (logits - exact).norm() < 1e-5 * exact.norm()
    assert not torch.equal(logits, logits.bfloat16().float())
    assert torch.equal(logits.argmax(-1), exact.argmax(-1))


@pytest.mark.parametrize("name", ["parent", "depth"])
def test_columns_of_a_tree_are_refused_by_name(name: str) -> None:
    chain = columns(torch.tensor([1, 2, 3]), 0)
    with pytest.raises(ValueError, match=f"columns: {name} is given, must be None: trees of drafts are not verified"):
        replace(chain, **{name: torch.zeros(1, 3, dtype=torch.int64)})
