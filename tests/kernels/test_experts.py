"""The experts of a mixture: the kernels in the interpreter, and the reference, against loops in FP64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.experts import (
    Experts,
    Tiling,
    most_tiles,
    run_experts_reference,
    run_experts_triton,
    sort_choices,
    tilings,
)
from kernels.router import Routing
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, poison_new_memory, there

SMALL = Tiling(16, 32, 16, 2, 1), Tiling(16, 32, 16, 2, 1)
Run = Callable[[torch.Tensor, Routing, Experts], torch.Tensor]


def on_device(x: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
    return run_experts_triton(x.to(DEVICE), there(routing), there(experts), SMALL).cpu()


each_form = pytest.mark.parametrize("run", [run_experts_reference, on_device])


def random_experts(
    count: int, width: int, inner: int, shared_inner: int, dtype: torch.dtype = torch.float32
) -> Experts:
    generator = torch.Generator().manual_seed(count + width + inner)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    return Experts(
        weight(count, 2 * inner, width),
        weight(count, width, inner),
        weight(2 * shared_inner, width),
        weight(width, shared_inner),
    )


def random_routing(columns: int, top_k: int, count: int, dtype: torch.dtype = torch.float32) -> Routing:
    """Every column's choices differ, as a router's do."""
    generator = torch.Generator().manual_seed(columns + top_k)
    chosen = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(columns)])
    return Routing(chosen.to(torch.int32), torch.rand(columns, top_k + 1, generator=generator).to(dtype))


def random_columns(columns: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(columns, width, generator=torch.Generator().manual_seed(width)).to(dtype)


def oracle(x: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
    """[T, k + 1, H], one column and one expert after the other."""

    def feed_forward(column: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = (gate_up.double() @ column.double()).chunk(2)
        return down.double() @ (gate * gate.sigmoid() * up)

    parts = [
        [
            *(feed_forward(column, experts.gate_up[e], experts.down[e]) for e in chosen),
            feed_forward(column, experts.shared_gate_up, experts.shared_down),
        ]
        for column, chosen in zip(x, routing.experts.tolist(), strict=True)
    ]
    return torch.stack([torch.stack(row) for row in parts]) * routing.weights.double()[..., None]


# ------------------------------------------------------------------------------------------------ products


@each_form
@pytest.mark.parametrize(
    "columns, top_k, count, width, inner, shared_inner",
    [(1, 1, 1, 16, 16, 16), (5, 3, 7, 48, 24, 40), (30, 2, 3, 20, 72, 8)],
)
def test_every_choice_gives_its_experts_output_times_its_weight(
    columns: int,
    top_k: int,
    count: int,
    width: int,
    inner: int,
    shared_inner: int,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few columns an expert and several tiles of one, widths that are no multiple of a tile, a shared expert that is
    wider or narrower than the others."""
    poison_new_memory(monkeypatch)
    experts = random_experts(count, width, inner, shared_inner)
    x, routing = random_columns(columns, width), random_routing(columns, top_k, count)
    oracles.close(run(x, routing, experts), oracle(x, routing, experts), 1e-5)


@each_form
def test_nothing_is_dropped_and_nothing_computed_twice_when_every_expert_says_its_name(run: Run) -> None:
    """One-hot routers of which some send all columns to one expert: SiLU(20) * 1 = 20, and expert e's only row of
    `down` is (e + 1) / 20, so that each part is the number of its expert times its weight."""
    count, columns, width, inner = 6, 20, 16, 16
    experts = random_experts(count, width, inner, inner)
    for tensor in vars(experts).values():
        tensor.zero_()
    for matrix in (*experts.gate_up.unbind(), experts.shared_gate_up):
        matrix[0, 0], matrix[inner, 0] = 20.0, 1.0
    names = torch.arange(1, count + 1)
    experts.down[:, :, 0] = names[:, None] / 20
    experts.shared_down[:, 0] = (count + 1) / 20
    x = torch.zeros(columns, width)
    x[:, 0] = 1.0
    for chosen in (torch.full((columns,), 4), torch.arange(columns) % count, torch.arange(columns) // 17):
        routing = Routing(chosen.to(torch.int32)[:, None], torch.stack((torch.ones(columns), torch.zeros(columns)), 1))
        parts = run(x, routing, experts)
        oracles.close(parts[:, 0], names[chosen][:, None].expand(-1, width).double(), 1e-6)
        oracles.close(parts[:, 1], torch.zeros(columns, width), 1e-6)


def test_an_expert_that_nobody_chose_is_never_read() -> None:
    experts = random_experts(5, 32, 16, 16)
    experts.gate_up[2], experts.down[2] = torch.nan, torch.nan
    routing = Routing(torch.tensor([[0, 1], [4, 3], [1, 3]], dtype=torch.int32), torch.ones(3, 3))
    assert bool(on_device(random_columns(3, 32), routing, experts).isfinite().all())


def test_outputs_and_their_products_are_rounded_to_bf16_where_the_reference_rounds() -> None:
    experts = random_experts(4, 64, 32, 32, torch.bfloat16)
    x, routing = random_columns(9, 64, torch.bfloat16), random_routing(9, 2, 4, torch.bfloat16)
    got, expected = on_device(x, routing, experts), run_experts_reference(x, routing, experts)
    assert got.dtype == torch.bfloat16
    assert float((got == expected).double().mean()) > 0.98
    exact = oracle(x, routing, experts)
    assert float((got.double() - exact).norm() / exact.norm()) < 1e-2


def test_a_column_has_the_same_bits_whatever_stands_beside_it() -> None:
    experts = random_experts(5, 32, 16, 16, torch.bfloat16)
    x, routing = random_columns(40, 32, torch.bfloat16), random_routing(40, 2, 5, torch.bfloat16)
    alone = on_device(x[33:34], Routing(routing.experts[33:34], routing.weights[33:34]), experts)
    assert torch.equal(on_device(x, routing, experts)[33:34], alone)


# ------------------------------------------------------------------------------------------------ tiles


@pytest.mark.parametrize("columns, top_k, count", [(1, 1, 3), (8, 8, 9), (700, 7, 5), (40, 3, 70)])
def test_places_are_sorted_by_expert_and_none_is_missing(columns: int, top_k: int, count: int) -> None:
    """700 columns are more choices than a program looks at together."""
    routing = random_routing(columns, min(top_k, count), count)
    places, begins, ended = (found.cpu() for found in sort_choices(there(routing), count))
    chosen = routing.experts.flatten()
    order = chosen.argsort(stable=True)
    at = order // routing.top_k * (routing.top_k + 1) + order % routing.top_k
    assert torch.equal(places.long(), at)
    expected = torch.tensor([int((chosen < expert).sum()) for expert in range(count)])
    assert torch.equal(begins.long(), expected)
    assert ended.tolist() == [0] * (count + 1)


def test_every_program_of_gate_and_up_is_counted_for_its_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """What products with down wait for: 16 columns a tile, 2 x 48 rows of gate and up in tiles of 32."""
    kept: list[torch.Tensor] = []

    def kept_sort(routing: Routing, experts: int) -> tuple[torch.Tensor, ...]:
        kept[:] = sort_choices(routing, experts)
        return tuple(kept)

    monkeypatch.setattr("kernels.experts.sort_choices", kept_sort)
    routing = random_routing(40, 2, 5)
    on_device(random_columns(40, 32), routing, random_experts(5, 32, 16, 48))
    sizes = [*routing.experts.flatten().bincount(minlength=5).tolist(), 40]
    assert kept[2].tolist() == [-(-2 * 48 // 32) * -(-size // 16) for size in sizes]
    assert max(sizes) > 16


@pytest.mark.parametrize(
    "columns, top_k, count, rows", [(1, 8, 256, 16), (3, 2, 2, 16), (100, 8, 256, 16), (33, 1, 4, 16)]
)
def test_a_grid_has_a_tile_for_every_routing(columns: int, top_k: int, count: int, rows: int) -> None:
    """The worst one: every expert has one column, and all others go to one."""
    choices = columns * top_k
    touched = min(choices, count)
    worst = [1] * (touched - 1) + [choices - touched + 1]
    needed = sum(-(-size // rows) for size in worst) + -(-columns // rows)
    assert needed <= most_tiles(columns, top_k, count, rows)


def test_the_tilings_that_are_chosen_by_themselves_are_right_too() -> None:
    experts = random_experts(3, 96, 80, 48, torch.bfloat16)
    for columns in (4, 60):  # of 16 rows, and of 64
        x, routing = random_columns(columns, 96, torch.bfloat16), random_routing(columns, 2, 3, torch.bfloat16)
        got = run_experts_triton(x.to(DEVICE), there(routing), there(experts)).cpu()
        exact = oracle(x, routing, experts)
        assert float((got.double() - exact).norm() / exact.norm()) < 1e-2
    assert [tilings(columns, 8, 256, torch.bfloat16)[0].rows for columns in (8, 256, 512, 8192)] == [16, 16, 32, 128]


def test_no_columns_give_no_parts_and_what_does_not_fit_is_refused_by_name() -> None:
    experts = random_experts(4, 32, 16, 16)
    x, routing = random_columns(2, 32), random_routing(2, 2, 4)
    none = Routing(routing.experts[:0], routing.weights[:0])
    assert run_experts_triton(x[:0], none, experts).shape == (0, 3, 32)
    with pytest.raises(ValueError, match=r"down: shape \(3, 32, 16\), must be \(4, 32, 16\)"):
        run_experts_triton(x, routing, replace(experts, down=experts.down[:3]))
    with pytest.raises(ValueError, match=r"weights: shape \(2, 2\), must be \(2, 3\)"):
        run_experts_triton(x, replace(routing, weights=routing.weights[:, :2].contiguous()), experts)
