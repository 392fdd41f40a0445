"""The gated delta rule against a serial FP64 oracle, and Fold against verification, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import gated_delta_net as gdn
from kernels.delta_gates import gates_reference, gates_triton
from kernels.delta_prefill import prefill_triton
from tests.kernels import oracles
from tests.kernels.delta_blocks import (
    EXTREMES,
    KERNEL,
    KEY_DIM,
    VALUE_DIM,
    VALUE_HEADS,
    Block,
    extreme,
    pool_of,
    random_block,
    random_state,
    slots_of,
)
from tests.kernels.devices import DEVICE, poison_new_memory
from tests.kernels.oracles import POISON

both = pytest.mark.parametrize("by", ["reference", KERNEL])


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_are_those_of_the_formula(by: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    projection = (torch.randn(2, 5, 16, generator=generator) * 10).to(dtype).to(DEVICE)
    a, b = projection[..., 3:9], projection[..., 10:]  # rows with gaps, as the projection leaves them
    a_log, bias = (torch.randn(6, generator=generator).to(DEVICE) for _ in range(2))
    g, beta = (torch.full((2, 5, 6), POISON, device=DEVICE) for _ in range(2))
    (gates_triton if by == KERNEL else gates_reference)(a, b, a_log, bias, g, beta)
    a64, b64, log64, bias64 = oracles.double(*(t.cpu() for t in (a, b, a_log, bias)))
    softplus = torch.logaddexp(a64 + bias64, torch.zeros(1, dtype=torch.float64))
    oracles.close(g.cpu(), -log64.exp() * softplus, 1e-6)
    oracles.close(beta.cpu(), 1 / (1 + (-b64).exp()), 1e-6)
    assert bool((g <= 0).all())


@both
def test_a_decay_that_is_all_but_one_keeps_its_digits(by: str) -> None:
    """A hundred thousand columns multiply the error of one."""
    a = torch.linspace(-40, 0, 64)[None, None].to(DEVICE)
    zeros, g = torch.zeros(64, device=DEVICE), torch.full((1, 1, 64), POISON, device=DEVICE)
    (gates_triton if by == KERNEL else gates_reference)(a, a, zeros, zeros, g, torch.empty_like(g))
    exact = torch.special.log1p(a.cpu().double().exp())
    torch.testing.assert_close(-g.cpu().double(), exact, rtol=3e-6, atol=0)


@both
@pytest.mark.parametrize("case", EXTREMES)
def test_verification_is_the_serial_recurrence_and_leaves_the_state(case: str, by: str) -> None:
    block, state = extreme(random_block(2, 10), case), random_state(2)
    oracles.close(block.verify(state, by=by), block.oracle(state)[0], 1e-5)


@both
@pytest.mark.parametrize("run", ["verify", "prefill"])
def test_columns_at_or_beyond_the_live_ones_are_exact_zeros_and_touch_nothing(
    by: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, state = random_block(4, 6, seed=9), random_state(4)
    valid = torch.tensor([0, 1, 4, 6])
    clean = block.verify(state, by=by)
    expected = [block.columns(0, live).oracle(state)[1] if live else state.double() for live in valid.tolist()]
    for row, live in enumerate(valid.tolist()):
        for tensor in block.tensors():
            tensor[row, live:] = POISON
    poison_new_memory(monkeypatch)
    outputs, after = (block.verify(state, valid, by), state) if run == "verify" else block.prefill(state, valid, by)
    for row, live in enumerate(valid.tolist()):
        oracles.close(outputs[row, :live], clean[row, :live], 2e-5)
        assert bool((outputs[row, live:] == 0).all())
        oracles.close(after[row], state[row] if run == "verify" else expected[row][row], 2e-5)
    assert torch.equal(after[0], state[0])


@both
def test_bfloat16_columns_are_computed_in_fp32_and_rounded_once(by: str) -> None:
    block, state = random_block(2, 8, seed=10), random_state(2)
    block = replace(block, q=block.q.bfloat16(), k=block.k.bfloat16(), v=block.v.bfloat16())
    expected, expected_state = block.oracle(state)
    outputs = block.verify(state, by=by)
    assert outputs.dtype == torch.bfloat16
    oracles.rounds_like(outputs, expected)
    oracles.close(block.fold(state, torch.tensor([8, 8]), by), expected_state, 1e-5)


@both
@pytest.mark.parametrize("heads", [(1, 1), (2, 6)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 16), (256, 16)])
def test_any_heads_and_dimensions_are_those_of_the_formula(
    heads: tuple[int, int], dims: tuple[int, int], by: str
) -> None:
    block, state = random_block(1, 3, 19, heads, dims), random_state(1, 20, heads[1], dims)
    expected, expected_state = block.oracle(state)
    oracles.close(block.verify(state, by=by), expected, 1e-5)
    oracles.close(block.fold(state, torch.tensor([3]), by), expected_state, 1e-5)


def test_the_kernel_refuses_what_is_not_the_layout_of_its_heads() -> None:
    mixed, g, beta = random_block(1, 2).there()
    slots, states = slots_of(1).to(DEVICE), pool_of(random_state(1))[:, 1]
    with pytest.raises(ValueError, match="mixed: 191 channels, must be those of 4 heads of v"):
        gdn.verify_triton(mixed[..., 1:], g, beta, states, slots, slots)
    with pytest.raises(ValueError, match=r"slots: torch.int32, must be torch.int64"):
        gdn.verify_triton(mixed, g, beta, states, slots.int(), slots)
    gaps = states.new_empty(3, VALUE_HEADS, KEY_DIM, 2 * VALUE_DIM)[..., :VALUE_DIM]
    with pytest.raises(ValueError, match="a layer's heads must be contiguous"):
        prefill_triton(mixed, g, beta, gaps, slots, slots)


# ------------------------------------------------------------------------------------------------ Fold


@pytest.mark.parametrize("by, width", [("reference", 16), (KERNEL, 5)])
@pytest.mark.parametrize(
    "case, dtype",
    [
        ("plain", torch.float32),
        ("tiny keys", torch.bfloat16),
        ("forgets at times", torch.float32),
        ("writes fully", torch.bfloat16),
    ],
)
def test_after_fold_the_next_column_has_the_bits_that_it_had_in_the_block(
    case: str, dtype: torch.dtype, by: str, width: int
) -> None:
    block, state = extreme(random_block(2, width, seed=11), case), random_state(2)
    block = replace(block, q=block.q.to(dtype), k=block.k.to(dtype), v=block.v.to(dtype))
    outputs = block.verify(state, by=by)
    for count in range(width):
        folded = block.fold(state, torch.full((2,), count), by)
        again = block.columns(count).verify(folded, by=by)
        assert torch.equal(again[:, 0], outputs[:, count]), f"N = {count}"
        assert torch.equal(again, outputs[:, count:]), f"N = {count}"


def chained(block: Block, state: torch.Tensor, kept: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Folds `state` over a block whose rejected columns are poisoned; it must have the bits of the state `kept` by the
    verification of the whole block, and its outputs."""
    verified = block.verify(kept)
    outputs, kept = block.verify_and_keep(kept, counts)
    for row, count in enumerate(counts.tolist()):
        assert torch.equal(outputs[row, :count], verified[row, :count])
        for tensor in block.tensors():
            tensor[row, count:] = POISON
    folded = block.fold(state, counts)
    assert torch.equal(folded.view(torch.int32), kept.view(torch.int32))
    return folded


def test_rounds_of_fold_have_the_bits_of_the_states_that_their_verifications_had() -> None:
    """N from 0 to 16, and every extreme on the way."""
    generator, tokens = torch.Generator().manual_seed(51), 0
    state = random_state(1, heads=1)
    for round_ in range(32):
        width = 1 + round_ % 16
        block = extreme(random_block(1, width, seed=2000 + round_, heads=(1, 1)), EXTREMES[round_ % len(EXTREMES)])
        block = replace(block, k=block.k.bfloat16(), q=block.q.bfloat16(), v=block.v.bfloat16())
        count = width if round_ % 2 else int(torch.randint(0, width + 1, (), generator=generator))
        state, tokens = chained(block, state, state, torch.tensor([count])), tokens + count
    assert tokens > 150 and bool(state.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", EXTREMES)
def test_on_a_card_fold_and_verification_have_the_same_bits_at_the_official_geometry(
    case: str, dtype: torch.dtype
) -> None:
    dims = (128, 128)
    block, state = extreme(random_block(2, 16, 21, (16, 48), dims), case), random_state(2, 22, 48, dims)
    block = replace(block, q=block.q.to(dtype), k=block.k.to(dtype), v=block.v.to(dtype))
    outputs = block.verify(state)
    for count in range(17):
        folded = chained(block.columns(0), state, state, torch.full((2,), count))
        if count < 16:
            assert torch.equal(block.columns(count).verify(folded), outputs[:, count:]), f"N = {count}"


@both
def test_folding_in_two_steps_has_the_bits_of_folding_in_one(by: str) -> None:
    block, state = random_block(2, 12, seed=12), random_state(2)
    whole = block.fold(state, torch.tensor([12, 9]), by)
    half = block.fold(state, torch.tensor([5, 5]), by)
    assert torch.equal(block.columns(5).fold(half, torch.tensor([7, 4]), by), whole)


@pytest.mark.parametrize("count, by", [*((n, "reference") for n in range(17)), *((n, KERNEL) for n in (0, 1, 5, 16))])
def test_fold_is_the_serial_recurrence_over_the_first_records(count: int, by: str) -> None:
    block, state = random_block(2, 16, seed=13), random_state(2)
    folded = block.fold(state, torch.full((2,), count), by)
    oracles.close(folded, block.columns(0, count).oracle(state)[1] if count else state, 1e-5)


@both
def test_all_layers_are_folded_at_once_each_by_its_own_records(by: str) -> None:
    blocks = [random_block(2, 4, seed=30 + layer) for layer in range(3)]
    states = [random_state(2, seed=40 + layer) for layer in range(3)]
    mixed, g, beta = (torch.stack(parts) for parts in zip(*(block.there() for block in blocks), strict=True))
    pool = torch.stack(states, dim=1).flip(0).contiguous().to(DEVICE)
    run = gdn.fold_triton if by == KERNEL else gdn.fold_reference
    slots, counts = (torch.tensor(x, device=DEVICE) for x in ([1, 0], [3, 1]))
    run(gdn.Records(mixed, mixed, g, beta), pool, slots, counts)
    for layer, (block, state) in enumerate(zip(blocks, states, strict=True)):
        assert torch.equal(pool.cpu()[[1, 0], layer], block.fold(state, counts.cpu(), by))


@both
def test_fold_of_nothing_returns_the_state_bit_by_bit(by: str) -> None:
    block, state = random_block(3, 4, seed=14), random_state(3)
    state[0, 0, 0, :8] = torch.tensor([-0.0, 1e-45, 3e38, float("inf"), 0.0, 1.0, -1e-45, 2.0])
    for counts in ([0, 0, 0], [0, 3, 0]):
        folded = block.fold(state, torch.tensor(counts), by)
        assert torch.equal(folded[[0, 2]].view(torch.int32), state[[0, 2]].view(torch.int32))


@both
def test_poisoned_records_beyond_the_count_have_no_influence(by: str) -> None:
    block, state = random_block(4, 8, seed=15), random_state(4)
    counts = torch.tensor([0, 3, 8, 5])
    expected = block.fold(state, counts, by)
    for row, count in enumerate(counts.tolist()):
        for tensor in (block.k, block.v, block.g, block.beta):
            tensor[row, count:] = POISON
    folded = block.fold(state, counts, by)
    assert torch.equal(folded, expected)
    for row, count in enumerate(counts.tolist()):
        alone = block.columns(0, count)
        row_block = Block(*(t[row : row + 1] for t in alone.tensors()))
        oracles.close(folded[row : row + 1], row_block.oracle(state[row : row + 1])[1] if count else state[:1], 1e-5)


@both
def test_a_long_chain_of_rounds_stays_with_the_oracle(by: str) -> None:
    """Sixty rounds of random extent and N: the outputs that count are those of one serial pass over kept columns."""
    generator = torch.Generator().manual_seed(16)
    state, kept, outputs = random_state(1, heads=2), [], []
    start = state
    for round_ in range(60):
        block = random_block(1, 8, seed=1000 + round_, heads=(1, 2))
        live = int(torch.randint(1, 9, (1,), generator=generator))
        count = int(torch.randint(0, live + 1, (1,), generator=generator))
        out = block.verify(state, torch.tensor([live]), by)
        state = block.fold(state, torch.tensor([count]), by)
        kept.append(block.columns(0, count))
        outputs.append(out[:, :count])
    chain = Block(*(torch.cat(parts, dim=1) for parts in zip(*(b.tensors() for b in kept), strict=True)))
    assert chain.width > 100
    expected, expected_state = chain.oracle(start)
    oracles.close(torch.cat(outputs, dim=1), expected, 2e-5)
    oracles.close(state, expected_state, 2e-5)


@both
def test_a_wrong_fold_would_be_seen(by: str) -> None:
    """One record too many, or the state rounded to bfloat16, is far outside the tolerances above."""
    block, state = random_block(1, 6, seed=17), random_state(1)
    exact = block.columns(0, 3).oracle(state)[1]
    for wrong in (block.fold(state, torch.tensor([4]), by), exact.bfloat16()):
        assert float((wrong.double() - exact).abs().max()) > 1e-3
