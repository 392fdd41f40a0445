"""Which experts a column goes to, and with which weights: the kernel in the interpreter, and the reference, against the
formula in FP64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.router import Routing, route_reference, route_triton
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, poison_new_memory

Route = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Routing]


def on_device(x: torch.Tensor, router: torch.Tensor, shared_gate: torch.Tensor, top_k: int) -> Routing:
    routing = route_triton(x.to(DEVICE), router.to(DEVICE), shared_gate.to(DEVICE), top_k)
    return Routing(routing.experts.cpu(), routing.weights.cpu())


each_form = pytest.mark.parametrize("run", [route_reference, on_device])


def inputs(columns: int, experts: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(columns + experts)
    x = torch.randn(columns, width, generator=generator)
    router = torch.randn(experts, width, generator=generator) * 2 * width**-0.5
    return x.to(dtype), router.to(dtype), (torch.randn(1, width, generator=generator) * width**-0.5).to(dtype)


@each_form
@pytest.mark.parametrize("columns, experts, width, top_k", [(1, 1, 16, 1), (3, 7, 48, 7), (70, 16, 1040, 3)])
def test_weights_are_the_renormalised_best_of_a_softmax_over_all_experts(
    columns: int, experts: int, width: int, top_k: int, run: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_new_memory(monkeypatch)
    x, router, shared_gate = inputs(columns, experts, width, torch.float32)
    routing = run(x, router, shared_gate, top_k)
    scores = (x.double() @ router.double().T).softmax(-1)
    best, chosen = scores.sort(descending=True, dim=-1)
    assert torch.equal(routing.experts.long(), chosen[:, :top_k])
    oracles.close(routing.weights[:, :top_k], best[:, :top_k] / best[:, :top_k].sum(-1, keepdim=True), 1e-5)
    oracles.close(routing.weights[:, top_k:], (x.double() @ shared_gate.double().T).sigmoid(), 1e-5)


@each_form
def test_exact_ties_go_to_the_lower_expert(run: Route) -> None:
    router = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    routing = run(torch.tensor([[2.0, 1.0], [1.0, 2.0], [0.0, 0.0]]), router, torch.zeros(1, 2), 2)
    assert routing.experts.tolist() == [[0, 1], [2, 0], [0, 1]]
    assert routing.weights[0].tolist() == [0.5, 0.5, 0.5] == routing.weights[2].tolist()


@each_form
def test_logits_are_rounded_before_the_softmax_so_that_bf16_neighbours_tie(run: Route) -> None:
    """1 + 1 / 512 is 1 in BF16, and so is its product with 1: the second expert is no better than the first."""
    x = torch.tensor([[1.0, 2.0**-9]]).bfloat16()
    router = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]).bfloat16()
    assert run(x, router, torch.zeros(1, 2).bfloat16(), 2).experts.tolist() == [[0, 1]]


@pytest.mark.parametrize("columns", [5, 65])
def test_few_columns_and_many_choose_alike_in_bf16(columns: int) -> None:
    """Few stream the router in parts, many go through the library: sums in FP32 that are rounded once."""
    x, router, shared_gate = inputs(columns, 24, 512, torch.bfloat16)
    got, expected = on_device(x, router, shared_gate, 4), route_reference(x, router, shared_gate, 4)
    same = (got.experts == expected.experts).all(-1)
    assert float(same.double().mean()) > 0.9  # a logit may fall on the other side of a rounding boundary
    oracles.close(got.weights[same], expected.weights[same], 2.0**-7)


def test_a_column_that_is_not_a_number_still_names_experts_that_exist() -> None:
    x, router, shared_gate = inputs(2, 5, 16, torch.float32)
    x[0] = torch.nan
    routing = on_device(x, router, shared_gate, 3)
    assert sorted(set(routing.experts[0].tolist())) == sorted(routing.experts[0].tolist())
    assert int(routing.experts.min()) >= 0 and int(routing.experts.max()) < 5
    assert bool(routing.weights[1].isfinite().all())


def test_no_columns_choose_nothing_and_what_does_not_fit_is_refused_by_name() -> None:
    x, router, shared_gate = inputs(2, 4, 16, torch.float32)
    routing = route_triton(x[:0], router, shared_gate, 2)
    assert routing.experts.shape == (0, 2) and routing.weights.shape == (0, 3)
    with pytest.raises(ValueError, match="top_k: 5, must be 1 to 4, the number of experts"):
        route_triton(x, router, shared_gate, 5)
    with pytest.raises(ValueError, match=r"router: torch\.bfloat16, must be torch\.float32"):
        route_triton(x, router.bfloat16(), shared_gate, 2)
    with pytest.raises(ValueError, match=r"shared_gate: shape \(4, 16\), must be \(1, 16\)"):
        route_triton(x, router, router, 2)
