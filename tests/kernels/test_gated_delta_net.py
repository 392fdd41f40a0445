"""The gated delta rule against a serial FP64 oracle, and Fold against verification, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from kernels.gated_delta_net import Records, fold, gates, prefill, verify
from tests.kernels import oracles
from tests.kernels.oracles import POISON

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 8


@dataclass(frozen=True)
class Block:
    """Columns of one layer: `q`, `k` [B, T, Hk, Dk], `v` [B, T, Hv, Dv], `g`, `beta` [B, T, Hv]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    @property
    def width(self) -> int:
        return self.v.shape[1]

    def columns(self, start: int, end: int | None = None) -> Block:
        """A block of its own memory: the next round's tensors do not share strides with this one's."""
        return Block(*(t[:, start:end].clone(memory_format=torch.contiguous_format) for t in self.tensors()))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def verify(self, state: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        valid = torch.full((len(state),), self.width) if valid is None else valid
        return verify(self.q, self.k, self.v, self.g, self.beta, state, valid)

    def prefill(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return prefill(self.q, self.k, self.v, self.g, self.beta, state)

    def records(self) -> Records:
        return Records(self.k, self.v, self.g, self.beta, torch.empty(len(self.v), self.width, 0))

    def oracle(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = torch.empty(self.v.shape, dtype=torch.float64)
        states = torch.empty(state.shape, dtype=torch.float64)
        for b in range(len(state)):
            for h in range(VALUE_HEADS):
                source = h // (VALUE_HEADS // KEY_HEADS)
                outputs[b, :, h], states[b, h] = oracles.delta_rule(
                    self.q[b, :, source],
                    self.k[b, :, source],
                    self.v[b, :, h],
                    self.g[b, :, h],
                    self.beta[b, :, h],
                    state[b, h],
                )
        return outputs, states


def random_block(batch: int, width: int, seed: int = 0) -> Block:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    g, beta = gates(
        normal(batch, width, VALUE_HEADS), normal(batch, width, VALUE_HEADS), normal(VALUE_HEADS), normal(VALUE_HEADS)
    )
    keys = (batch, width, KEY_HEADS, KEY_DIM)
    return Block(normal(*keys), normal(*keys), normal(batch, width, VALUE_HEADS, VALUE_DIM), g, beta)


def random_state(batch: int, seed: int = 100) -> torch.Tensor:
    return torch.randn(batch, VALUE_HEADS, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(seed))


def extreme(block: Block, case: str) -> Block:
    g, beta, k = block.g.clone(), block.beta.clone(), block.k.clone()
    if case == "tiny keys":
        k[:, ::3] *= 1e-4  # squares of the order of the norm's epsilon
        k[:, 1::3] = 0.0
    elif case == "forgets everything":
        g[:] = -50.0
    elif case == "forgets at times":
        g[:, ::5] = -50.0
    elif case == "forgets, then remembers":
        g[:, :40], g[:, 40:] = -50.0, -0.01
    elif case == "never forgets":
        g[:] = 0.0
    elif case == "writes nothing":
        beta[:] = 0.0
    elif case == "writes fully":
        beta[:] = 1.0
        k[:, 1::2] = k[:, ::2][:, : k[:, 1::2].shape[1]]  # repeated keys: a full write replaces what was there
    return replace(block, g=g, beta=beta, k=k)


EXTREMES = ["plain", "tiny keys", "forgets everything", "forgets at times", "never forgets", "writes nothing"]
EXTREMES += ["writes fully", "forgets, then remembers"]


def test_gates_are_those_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(2, 5, 4, generator=generator) * 10 for _ in range(2))
    a_log, bias = (torch.randn(4, generator=generator) for _ in range(2))
    g, beta = gates(a.bfloat16(), b.bfloat16(), a_log, bias)
    assert g.dtype == beta.dtype == torch.float32
    a64, b64, log64, bias64 = oracles.double(a.bfloat16(), b.bfloat16(), a_log, bias)
    softplus = torch.logaddexp(a64 + bias64, torch.zeros(1, dtype=torch.float64))
    oracles.close(g, -log64.exp() * softplus, 1e-6)
    oracles.close(beta, 1 / (1 + (-b64).exp()), 1e-6)
    assert bool((g <= 0).all())


@pytest.mark.parametrize("case", EXTREMES)
def test_verification_is_the_serial_recurrence_and_leaves_the_state(case: str) -> None:
    block, state = extreme(random_block(3, 16), case), random_state(3)
    before = state.clone()
    oracles.close(block.verify(state), block.oracle(state)[0], 1e-5)
    assert torch.equal(state, before)


@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 200])
def test_prefill_is_the_serial_recurrence_at_every_chunk_boundary(width: int) -> None:
    block, state = random_block(2, width, seed=width), random_state(2)
    outputs, after = block.prefill(state)
    expected, expected_state = block.oracle(state)
    assert outputs.shape == block.v.shape and after.dtype == torch.float32
    oracles.close(outputs, expected, 2e-5)
    oracles.close(after, expected_state, 2e-5)


@pytest.mark.parametrize("case", EXTREMES)
def test_prefill_survives_extreme_keys_and_gates(case: str) -> None:
    block, state = extreme(random_block(2, 130, seed=7), case), random_state(2)
    outputs, after = block.prefill(state)
    expected, expected_state = block.oracle(state)
    # the chunked form subtracts sums of log decays, whose FP32 spacing after 40 gates of -50 is 1e-4
    tolerance = {"forgets at times": 1e-4, "forgets, then remembers": 3e-4}.get(case, 2e-5)
    oracles.close(outputs, expected, tolerance)
    oracles.close(after, expected_state, tolerance)


def test_prefill_in_pieces_is_prefill_in_one_piece() -> None:
    block, state = random_block(1, 150, seed=8), random_state(1)
    whole, after = block.prefill(state)
    first, middle = block.columns(0, 37).prefill(state)
    second, last = block.columns(37).prefill(middle)
    oracles.close(torch.cat((first, second), dim=1), whole, 2e-5)
    oracles.close(last, after, 2e-5)


def test_columns_at_or_beyond_the_live_ones_are_exact_zeros_and_touch_nothing() -> None:
    block, state = random_block(4, 6, seed=9), random_state(4)
    valid = torch.tensor([0, 1, 4, 6])
    clean = block.verify(state)
    for row, live in enumerate(valid.tolist()):
        for tensor in block.tensors():
            tensor[row, live:] = POISON
    outputs = block.verify(state, valid)
    for row, live in enumerate(valid.tolist()):
        assert torch.equal(outputs[row, :live], clean[row, :live])
        assert bool((outputs[row, live:] == 0).all())


def test_bfloat16_columns_are_computed_in_fp32_and_rounded_once() -> None:
    block, state = random_block(2, 8, seed=10), random_state(2)
    block = replace(block, q=block.q.bfloat16(), k=block.k.bfloat16(), v=block.v.bfloat16())
    expected, expected_state = block.oracle(state)
    outputs = block.verify(state)
    assert outputs.dtype == torch.bfloat16
    oracles.close(outputs, expected, 2.0**-8)
    oracles.close(fold(block.records(), state, torch.tensor([8, 8])), expected_state, 1e-5)


# ------------------------------------------------------------------------------------------------ Fold


@pytest.mark.parametrize("case", ["plain", "tiny keys", "forgets at times", "writes fully"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_fold_the_next_column_has_the_bits_that_it_had_in_the_block(case: str, dtype: torch.dtype) -> None:
    block, state = extreme(random_block(3, 16, seed=11), case), random_state(3)
    block = replace(block, q=block.q.to(dtype), k=block.k.to(dtype), v=block.v.to(dtype))
    outputs = block.verify(state)
    for count in range(16):
        folded = fold(block.records(), state, torch.full((3,), count))
        again = block.columns(count).verify(folded)
        assert torch.equal(again[:, 0], outputs[:, count]), f"N = {count}"
        assert torch.equal(again, outputs[:, count:]), f"N = {count}"


def test_folding_in_two_steps_has_the_bits_of_folding_in_one() -> None:
    block, state = random_block(2, 12, seed=12), random_state(2)
    whole = fold(block.records(), state, torch.tensor([12, 9]))
    half = fold(block.records(), state, torch.tensor([5, 5]))
    assert torch.equal(fold(block.columns(5).records(), half, torch.tensor([7, 4])), whole)


@pytest.mark.parametrize("count", range(17))
def test_fold_is_the_serial_recurrence_over_the_first_records(count: int) -> None:
    block, state = random_block(2, 16, seed=13), random_state(2)
    folded = fold(block.records(), state, torch.full((2,), count))
    oracles.close(folded, block.columns(0, count).oracle(state)[1] if count else state, 1e-5)


def test_fold_of_nothing_returns_the_state_bit_by_bit() -> None:
    block, state = random_block(3, 4, seed=14), random_state(3)
    state[0, 0, 0] = torch.tensor([-0.0, 1e-45, 3e38, float("inf"), 0.0, 1.0, -1e-45, 2.0])
    for counts in ([0, 0, 0], [0, 3, 0]):
        folded = fold(block.records(), state, torch.tensor(counts))
        assert torch.equal(folded[[0, 2]].view(torch.int32), state[[0, 2]].view(torch.int32))


def test_poisoned_records_beyond_the_count_have_no_influence() -> None:
    block, state = random_block(4, 8, seed=15), random_state(4)
    counts = torch.tensor([0, 3, 8, 5])
    expected = fold(block.records(), state, counts)
    for row, count in enumerate(counts.tolist()):
        for tensor in (block.k, block.v, block.g, block.beta):
            tensor[row, count:] = POISON
    folded = fold(block.records(), state, counts)
    assert torch.equal(folded, expected)
    for row, count in enumerate(counts.tolist()):
        alone = block.columns(0, count)
        row_block = Block(*(t[row : row + 1] for t in alone.tensors()))
        oracles.close(folded[row : row + 1], row_block.oracle(state[row : row + 1])[1] if count else state[:1], 1e-5)


def test_a_long_chain_of_rounds_stays_with_the_oracle() -> None:
    """Sixty rounds of random extent and N: the outputs that count are those of one serial pass over kept columns."""
    generator = torch.Generator().manual_seed(16)
    state, kept, outputs = random_state(1), [], []
    start = state
    for round_ in range(60):
        block = random_block(1, 8, seed=1000 + round_)
        live = int(torch.randint(1, 9, (1,), generator=generator))
        count = int(torch.randint(0, live + 1, (1,), generator=generator))
        out = block.verify(state, torch.tensor([live]))
        state = fold(block.records(), state, torch.tensor([count]))
        kept.append(block.columns(0, count))
        outputs.append(out[:, :count])
    chain = Block(*(torch.cat(parts, dim=1) for parts in zip(*(b.tensors() for b in kept), strict=True)))
    assert chain.width > 100
    expected, expected_state = chain.oracle(start)
    oracles.close(torch.cat(outputs, dim=1), expected, 2e-5)
    oracles.close(state, expected_state, 2e-5)


def test_a_wrong_fold_would_be_seen() -> None:
    """One record too many, or the state rounded to bfloat16, is far outside the tolerances above."""
    block, state = random_block(1, 6, seed=17), random_state(1)
    exact = block.columns(0, 3).oracle(state)[1]
    for wrong in (fold(block.records(), state, torch.tensor([4])), exact.bfloat16()):
        assert float((wrong.double() - exact).abs().max()) > 1e-3
