"""The gated feed-forward: SiLU of the first half times the second, with the rounding points of torch."""

from __future__ import annotations

import pytest
import torch

from kernels.gated_mlp import gated_mlp, silu_product, silu_product_triton
from kernels.linear import Linear
from tests.kernels import oracles
from tests.kernels.devices import DEVICE


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))) * 4


def silu(x: torch.Tensor) -> torch.Tensor:
    return x.double() / (1 + (-x.double()).exp())


@pytest.mark.parametrize("inner", [16, 48, 1024, 1040])
def test_the_first_half_gates_the_second(inner: int) -> None:
    gate_up = normal(2, 3, 2 * inner)
    gate_up[0, 0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    exact = silu(gate_up[..., :inner]) * gate_up[..., inner:].double()
    oracles.close(silu_product(gate_up), exact, 2e-6)
    oracles.close(silu_product_triton(gate_up.to(DEVICE)).cpu(), exact, 2e-6)


def test_the_kernel_rounds_the_gate_before_the_product() -> None:
    gate_up = normal(9, 2048).bfloat16()
    got = silu_product_triton(gate_up.to(DEVICE)).cpu()
    gate, up = gate_up.chunk(2, dim=-1)
    oracles.rounds_like(got, silu(gate).float().bfloat16().double() * up.double())
    oracles.rounds_like(got, silu_product(gate_up).double())
    with pytest.raises(AssertionError):
        oracles.rounds_like(got, silu(gate) * up.double())


def test_the_feed_forward_is_two_products_around_the_gate() -> None:
    x, gate_up, down = normal(2, 3, 32), normal(96, 32) / 16, normal(32, 48) / 16
    hidden = x.double() @ gate_up.double().T
    exact = (silu(hidden[..., :48]) * hidden[..., 48:]) @ down.double().T
    oracles.close(gated_mlp(x, Linear(gate_up), Linear(down)), exact, 1e-5)


def test_an_odd_width_and_gaps_between_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="gate_up: last axis 33, must be even"):
        silu_product_triton(normal(2, 33))
    with pytest.raises(ValueError, match="gate_up: strides"):
        silu_product_triton(normal(4, 64)[::2])
