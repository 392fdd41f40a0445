"""The gated delta rule against a serial FP64 oracle, and Fold against verification, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from kernels import gated_delta_net as gdn
from kernels.delta_gates import gates_reference, gates_triton
from kernels.delta_prefill import prefill_reference, prefill_triton
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, poison_new_memory
from tests.kernels.oracles import POISON

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 32

KERNEL = "kernel"
both = pytest.mark.parametrize("by", ["reference", KERNEL])


def slots_of(batch: int) -> torch.Tensor:
    """Rows lie in the pool in another order, and not in all of it: slot 2 b + 1, from the end."""
    return 2 * torch.arange(batch).flip(0) + 1


def pool_of(state: torch.Tensor) -> torch.Tensor:
    """`state` [B, Hv, Dk, Dv] as layer 1 of 3 of a pool [slots, L, Hv, Dk, Dv], poison everywhere else."""
    pool = torch.full((2 * len(state) + 1, 3, *state.shape[1:]), POISON)
    pool[slots_of(len(state)), 1] = state
    return pool.to(DEVICE)


def taken_back(pool: torch.Tensor, batch: int) -> torch.Tensor:
    """The rows' states; fails if anything else of the pool lost its poison."""
    pool = pool.cpu()
    states = pool[slots_of(batch), 1].clone()
    pool[slots_of(batch), 1] = POISON
    assert bool(pool.isnan().all())
    return states


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

    def there(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The operator's `mixed`, `g` and `beta`, where kernels run."""
        mixed = torch.cat([t.flatten(-2) for t in (self.q, self.k, self.v)], dim=-1)
        return mixed.to(DEVICE), self.g.contiguous().to(DEVICE), self.beta.contiguous().to(DEVICE)

    def verify(self, state: torch.Tensor, valid: torch.Tensor | None = None, by: str = KERNEL) -> torch.Tensor:
        run = gdn.verify_triton if by == KERNEL else gdn.verify_reference
        pool = pool_of(state)
        out = run(*self.there(), pool[:, 1], slots_of(len(state)).to(DEVICE), self.counts(valid))
        assert torch.equal(taken_back(pool, len(state)).view(torch.int32), state.view(torch.int32))
        return out.cpu()

    def prefill(
        self, state: torch.Tensor, valid: torch.Tensor | None = None, by: str = KERNEL
    ) -> tuple[torch.Tensor, torch.Tensor]:
        run = prefill_triton if by == KERNEL else prefill_reference
        pool = pool_of(state)
        out = run(*self.there(), pool[:, 1], slots_of(len(state)).to(DEVICE), self.counts(valid))
        return out.cpu(), taken_back(pool, len(state))

    def fold(self, state: torch.Tensor, counts: torch.Tensor, by: str = KERNEL) -> torch.Tensor:
        run = gdn.fold_triton if by == KERNEL else gdn.fold_reference
        mixed, g, beta = (t[None] for t in self.there())
        pool = pool_of(state)
        run(gdn.Records(mixed, mixed, g, beta), pool[:, 1:2], slots_of(len(state)).to(DEVICE), counts.to(DEVICE))
        return taken_back(pool, len(state))

    def counts(self, valid: torch.Tensor | None) -> torch.Tensor:
        return (torch.full((len(self.v),), self.width) if valid is None else valid).to(DEVICE)

    def oracle(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = torch.empty(self.v.shape, dtype=torch.float64)
        states = torch.empty(state.shape, dtype=torch.float64)
        for b in range(len(state)):
            for h in range(self.v.shape[2]):
                source = h // (self.v.shape[2] // self.k.shape[2])
                outputs[b, :, h], states[b, h] = oracles.delta_rule(
                    self.q[b, :, source],
                    self.k[b, :, source],
                    self.v[b, :, h],
                    self.g[b, :, h],
                    self.beta[b, :, h],
                    state[b, h],
                )
        return outputs, states


def random_block(
    batch: int,
    width: int,
    seed: int = 0,
    heads: tuple[int, int] = (KEY_HEADS, VALUE_HEADS),
    dims: tuple[int, int] = (KEY_DIM, VALUE_DIM),
) -> Block:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    g, beta = torch.empty(2, batch, width, heads[1])
    a, b = normal(batch, width, heads[1]), normal(batch, width, heads[1])
    gates_reference(a, b, normal(heads[1]), normal(heads[1]), g, beta)
    keys = (batch, width, heads[0], dims[0])
    return Block(normal(*keys), normal(*keys), normal(batch, width, heads[1], dims[1]), g, beta)


def random_state(
    batch: int, seed: int = 100, heads: int = VALUE_HEADS, dims: tuple[int, int] = (KEY_DIM, VALUE_DIM)
) -> torch.Tensor:
    return torch.randn(batch, heads, *dims, generator=torch.Generator().manual_seed(seed))


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


@pytest.mark.parametrize(
    "width, by", [*((width, "reference") for width in (1, 2, 63, 64, 65, 200)), (1, KERNEL), (2, KERNEL), (65, KERNEL)]
)
def test_prefill_is_the_serial_recurrence_at_every_chunk_boundary(width: int, by: str) -> None:
    block, state = random_block(2, width, seed=width), random_state(2)
    outputs, after = block.prefill(state, by=by)
    expected, expected_state = block.oracle(state)
    assert outputs.shape == block.v.shape and after.dtype == torch.float32
    oracles.close(outputs, expected, 2e-5)
    oracles.close(after, expected_state, 2e-5)


@pytest.mark.parametrize("case", EXTREMES)
def test_prefill_in_chunks_survives_extreme_keys_and_gates(case: str) -> None:
    block, state = extreme(random_block(2, 130, seed=7), case), random_state(2)
    outputs, after = block.prefill(state, by="reference")
    expected, expected_state = block.oracle(state)
    # the chunked form subtracts sums of log decays, whose FP32 spacing after 40 gates of -50 is 1e-4
    tolerance = {"forgets at times": 1e-4, "forgets, then remembers": 3e-4}.get(case, 2e-5)
    oracles.close(outputs, expected, tolerance)
    oracles.close(after, expected_state, tolerance)


def test_prefill_in_pieces_is_prefill_in_one_piece() -> None:
    block, state = random_block(1, 150, seed=8), random_state(1)
    whole, after = block.prefill(state, by="reference")
    first, middle = block.columns(0, 37).prefill(state, by="reference")
    second, last = block.columns(37).prefill(middle, by="reference")
    oracles.close(torch.cat((first, second), dim=1), whole, 2e-5)
    oracles.close(last, after, 2e-5)


def test_the_kernel_gives_a_prompt_in_pieces_and_its_rounds_the_bits_of_one_pass() -> None:
    block, state = random_block(1, 20, seed=18), random_state(1)
    whole, after = block.prefill(state)
    first, middle = block.columns(0, 9).prefill(state)
    verified = block.columns(9, 17).verify(middle)
    folded = block.columns(9, 17).fold(middle, torch.tensor([8]))
    last, end = block.columns(17).prefill(folded)
    assert torch.equal(torch.cat((first, verified, last), dim=1), whole)
    assert torch.equal(end, after)


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
@pytest.mark.parametrize("case", ["plain", "tiny keys", "forgets at times", "writes fully"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_card_fold_verification_and_prefill_have_the_same_bits_at_the_official_geometry(
    dtype: torch.dtype,
) -> None:
    dims = (128, 128)
    block, state = extreme(random_block(2, 16, 21, (16, 48), dims), "tiny keys"), random_state(2, 22, 48, dims)
    block = replace(block, q=block.q.to(dtype), k=block.k.to(dtype), v=block.v.to(dtype))
    outputs = block.verify(state)
    for count in range(1, 17):
        folded = block.fold(state, torch.full((2,), count))
        prefilled, after = block.columns(0, count).prefill(state)
        assert torch.equal(folded, after), f"N = {count}"
        assert torch.equal(prefilled, outputs[:, :count]), f"N = {count}"
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
