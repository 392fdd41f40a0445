"""The gated delta rule on a card, for `bench/target_kernels.py`: verification, Fold and prefill at the heads of 27B.

The oracle is the serial recurrence in FP64 on the same inputs. The peer is flash-linear-attention's kernel for the same
work: FP32 state, keys and queries normalised inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.gpu import norm_error, sets
from bench.target_works import DEVICE, Peer, Work
from kernels import gated_delta_net as gdn
from kernels.delta_gates import gates
from kernels.delta_prefill import prefill

MODEL, KEY_HEADS, HEADS, DIM, LAYERS = "27B", 16, 48, 128, 48
KEYS = KEY_HEADS * DIM
CHANNELS = 2 * KEYS + HEADS * DIM
ROUNDS, LANES, WIDTH = 10_000, 4, 16

try:
    from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
        chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule,
    )

    MISSING = ""
except ImportError as error:
    MISSING = f"flash-linear-attention: {error}"


@dataclass(frozen=True)
class Columns:
    """`mixed` BF16 [B, T, C], `g`, `beta` FP32 [B, T, Hv]."""

    mixed: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def random(cls, batch: int, width: int) -> Columns:
        mixed = torch.randn(batch, width, CHANNELS, device=DEVICE).bfloat16()
        a, b = (torch.randn(batch, width, HEADS, device=DEVICE) for _ in range(2))
        a_log, bias = torch.randn(HEADS, device=DEVICE), torch.randn(HEADS, device=DEVICE) - 2
        g, beta = torch.empty_like(a), torch.empty_like(a)
        gates(a, b, a_log, bias, g, beta)
        return cls(mixed, g, beta)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.mixed, self.g, self.beta

    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [B, T, Hk, D] and v [B, T, Hv, D], each of its own memory."""
        parts = self.mixed.split((KEYS, KEYS, HEADS * DIM), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, DIM)).contiguous() for part in parts)
        return q, k, v

    @property
    def nbytes(self) -> int:
        return self.mixed.nbytes + self.g.nbytes + self.beta.nbytes


def oracle(columns: Columns, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Serial, FP64: outputs [B, T, Hv, D] and the state [B, Hv, D, D] after all columns."""
    q, k, v = (x.double() for x in columns.heads())
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, dim=2) for x in (q * DIM**-0.5, k))
    decay, beta, state = columns.g.double().exp(), columns.beta.double(), state.double()
    outputs = torch.empty_like(v)
    for t in range(v.shape[1]):
        state = state * decay[:, t, :, None, None]
        u = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ state)[:, :, 0])
        state = state + k[:, t, :, :, None] * u[:, :, None]
        outputs[:, t] = (q[:, t, :, None] @ state)[:, :, 0]
    return outputs, state


def random_states(*slots: int) -> torch.Tensor:
    return torch.randn(*slots, HEADS, DIM, DIM, device=DEVICE) / 4


def peer(name: str, calls: Callable[[], list[Callable[[], Any]]]) -> Peer:
    return Peer(MISSING) if MISSING else Peer(f"fla {name}", calls())


def works() -> Iterator[Work]:
    for batch in (1, 8, 32):
        yield verify_work(batch, 8)
    for batch in (1, 8, 32):
        yield fold_work(batch, 8)
    for batch, width in ((1, 512), (1, 2048), (1, 8192), (4, 2048)):
        yield prefill_work(batch, width)


def verify_work(batch: int, width: int) -> Work:
    columns = Columns.random(batch, width)
    size = batch * HEADS * DIM * DIM * 4
    states = random_states(sets(size) * batch)
    slots = torch.randperm(len(states), device=DEVICE).view(-1, batch)
    counts = torch.full((batch,), width, device=DEVICE)

    def error() -> float:
        out = gdn.verify(*columns.tensors(), states, slots[0], counts)
        return norm_error(out, oracle(columns, states[slots[0]])[0])

    def peers() -> list[Callable[[], Any]]:
        q, k, v = columns.heads()
        shared: dict[str, Any] = {"g": columns.g, "beta": columns.beta, "use_qk_l2norm_in_kernel": True}
        return [
            partial(fused_recurrent_gated_delta_rule, q, k, v, initial_state=states[part], **shared)
            for part in torch.arange(len(states), device=DEVICE).view(-1, batch)
        ]

    calls = [partial(gdn.verify, *columns.tensors(), states, rows, counts) for rows in slots]
    moved = size + columns.nbytes + batch * width * HEADS * DIM * 2
    named = peer("fused_recurrent_gated_delta_rule", peers)
    return Work("gdn_verify", MODEL, batch, width, 0, calls, moved, error, named)


def fold_work(batch: int, width: int) -> Work:
    """All layers of the model, all columns kept."""
    size = LAYERS * batch * HEADS * DIM * DIM * 4
    states = random_states(sets(size) * batch, LAYERS)
    slots = torch.randperm(len(states), device=DEVICE).view(-1, batch)
    counts = torch.full((batch,), width, device=DEVICE)
    layers = [Columns.random(batch, width) for _ in range(LAYERS)]
    mixed, g, beta = (torch.stack(parts) for parts in zip(*(layer.tensors() for layer in layers), strict=True))
    records = gdn.Records(mixed, mixed, g, beta)

    def error() -> float:
        worst, before = 0.0, [states[slots[0], layer].clone() for layer in (0, LAYERS - 1)]
        gdn.fold(records, states, slots[0], counts)
        for layer, state in zip((0, LAYERS - 1), before, strict=True):
            worst = max(worst, norm_error(states[slots[0], layer], oracle(layers[layer], state)[1]))
        return worst

    calls = [partial(gdn.fold, records, states, rows, counts) for rows in slots]
    moved = 2 * size + g.nbytes + beta.nbytes + mixed.nbytes // CHANNELS * (CHANNELS - KEYS)
    return Work("gdn_fold", MODEL, batch, width, 0, calls, moved, error)


def prefill_work(batch: int, width: int) -> Work:
    columns = Columns.random(batch, width)
    states = random_states(batch)
    slots = torch.arange(batch, device=DEVICE)
    counts = torch.full((batch,), width, device=DEVICE)

    def error() -> float:
        before = states.clone()
        out = prefill(*columns.tensors(), states, slots, counts)
        outputs, after = oracle(columns, before)
        print(f"prefill {batch} x {width}: y {norm_error(out, outputs):.1e}, state {norm_error(states, after):.1e}")
        return max(norm_error(out, outputs), norm_error(states, after))

    def peers() -> list[Callable[[], Any]]:
        q, k, v = columns.heads()
        shared: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "initial_state": states, "output_final_state": True}
        return [partial(chunk_gated_delta_rule, q, k, v, columns.g, columns.beta, **shared)]

    calls = [partial(prefill, *columns.tensors(), states, slots, counts)]
    moved = 2 * states.nbytes + columns.nbytes + batch * width * HEADS * DIM * 2
    return Work("gdn_prefill", MODEL, batch, width, 0, calls, moved, error, peer("chunk_gated_delta_rule", peers))


# ------------------------------------------------------------------------------------------------ Fold


def fold_chains() -> dict[str, Any]:
    """Random blocks and N, the rejected suffix poisoned: after each round the folded states must have the bits of the
    states that the verification had after column N - 1, and its outputs those of the verification that kept them."""
    folded = random_states(LANES)
    kept, slots = folded.clone(), torch.arange(LANES, device=DEVICE)
    unequal = torch.zeros((), dtype=torch.int64, device=DEVICE)
    column = torch.arange(WIDTH, device=DEVICE)
    for _ in range(ROUNDS):
        columns = extreme(Columns.random(LANES, WIDTH))
        counts = torch.randint(0, WIDTH + 1, (LANES,), device=DEVICE)
        mixed, g, beta = (x[None] for x in columns.tensors())
        verified = gdn.verify_triton(*columns.tensors(), kept, slots, torch.full_like(counts, WIDTH))
        out = gdn.recurrence_triton(mixed, g, beta, kept[:, None], slots, counts, answers=True, advances=True)[0]
        rejected = (column >= counts[:, None])[..., None]
        unequal += (verified.masked_fill(rejected[..., None], 0.0) != out).any()
        for x in columns.tensors():
            x.masked_fill_(rejected, torch.nan)
        gdn.fold_triton(gdn.Records(mixed, mixed, g, beta), folded[:, None], slots, counts)
        unequal += (folded.view(torch.int32) != kept.view(torch.int32)).any()
    return {"rounds": ROUNDS, "bit_equal": int(unequal) == 0 and bool(folded.isfinite().all())}


def extreme(columns: Columns) -> Columns:
    """Some columns of tiny keys, some gates that forget all or nothing, some that write nothing or all."""
    mixed, g, beta = columns.tensors()
    chance = torch.rand(*g.shape, device=DEVICE)
    g.masked_fill_(chance < 0.02, -1e4).masked_fill_(chance > 0.9, 0.0)
    chance = torch.rand(*g.shape, device=DEVICE)
    beta.masked_fill_(chance < 0.05, 0.0).masked_fill_(chance > 0.95, 1.0)
    tiny = torch.rand(*g.shape[:2], 1, device=DEVICE) < 0.1
    mixed[..., KEYS : 2 * KEYS] *= torch.where(tiny, 1e-4, 1.0).bfloat16()
    return columns
