"""Columns of one layer of the gated delta rule for tests: made at random or extreme, run by kernel or reference on
states that lie in a poisoned pool, and by the serial FP64 oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels import gated_delta_net as gdn
from kernels.delta_gates import gates_reference
from kernels.delta_prefill import prefill_reference, prefill_triton
from tests.kernels import oracles
from tests.kernels.devices import DEVICE
from tests.kernels.oracles import POISON

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 32
KERNEL = "kernel"


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

    def verify_and_keep(self, state: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A verification's outputs and the state that it had after counts[b] columns, by the kernel."""
        mixed, g, beta = (t[None] for t in self.there())
        pool = pool_of(state)
        slots, counts = slots_of(len(state)).to(DEVICE), counts.to(DEVICE)
        out = gdn.recurrence_triton(mixed, g, beta, pool[:, 1:2], slots, counts, answers=True, advances=True)[0]
        return out.cpu(), taken_back(pool, len(state))

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
        g[:, ::5] = -1e4
    elif case == "forgets, then remembers":
        g[:, :40], g[:, 40:] = -1e4, -0.01
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
