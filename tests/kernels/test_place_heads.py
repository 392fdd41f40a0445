"""Heads of the target's attention projection on their way to attention: FP64 norms and rotation, and whose page gets
what, in pools that hold NaN everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kernels.place_heads import place_heads_reference, place_heads_triton, queries_and_gates
from kernels.rotary import rotary_frequencies, rotary_tables
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, poison_new_memory
from tests.kernels.oracles import POISON

EPS, PAGE, PAGES, LAYERS, LAYER, THETA = 1e-6, 64, 9, 3, 1, 1e7
NO_PAGE = 2**40  # an entry of a page table that must never be followed
START, VALID = torch.tensor([62, 0, 130]), torch.tensor([4, 0, 3])
TABLE = torch.tensor([[7, 2, NO_PAGE], [NO_PAGE, NO_PAGE, NO_PAGE], [NO_PAGE, NO_PAGE, 5]])
SHAPES = [(6, 2, 64, 64), (24, 4, 256, 64), (3, 3, 128, 32), (5, 1, 16, 4)]
"""Query heads, kv heads, head dimension, rotated dimensions."""

Place = Callable[..., torch.Tensor]


@pytest.fixture(params=["reference", "triton"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    poison_new_memory(monkeypatch)
    return place_heads_reference if request.param == "reference" else on_device


def on_device(*arguments: object) -> torch.Tensor:
    """The kernel, on the card where there is one; pools are written where they are."""
    moved = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in arguments]
    q = place_heads_triton(*moved).cpu()  # type: ignore[arg-type]
    for index in (5, 6):
        arguments[index].copy_(moved[index])  # type: ignore[union-attr]
    return q


@dataclass(frozen=True)
class Case:
    """Three rows of four columns and one layer of a pool of three; columns that are not live are NaN or huge."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    projected: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    pools: tuple[torch.Tensor, torch.Tensor]
    rotated: int

    @property
    def positions(self) -> torch.Tensor:
        return START[:, None] + torch.arange(self.q.shape[1])

    def run(self, place: Place) -> torch.Tensor:
        tables = rotary_tables(self.positions, rotary_frequencies(self.rotated, THETA))
        keys, values = (pool[:, LAYER] for pool in self.pools)
        return place(self.projected, self.q_norm, self.k_norm, *tables, keys, values, TABLE, START, VALID, EPS)

    def exact(self, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        normed = oracles.rms(x, EPS) * (1 + norm.double())
        return oracles.rotate(normed, self.positions, rotary_frequencies(self.rotated, THETA))


def case(
    queries: int, kv_heads: int, dim: int, rotated: int, dtype: torch.dtype, pool_dtype: torch.dtype | None = None
) -> Case:
    generator = torch.Generator().manual_seed(queries + dim)
    q, gate, k, v = (
        (torch.randn(3, 4, heads, dim, generator=generator) * 3).to(dtype)
        for heads in (queries, queries, kv_heads, kv_heads)
    )
    gate = torch.full_like(gate, POISON)  # nobody reads gates here
    for row, live in enumerate(VALID.tolist()):
        q[row, live:] = POISON
        for x in (k, v):
            x[row, live:] = 1e9  # would show among the pools' NaN
    interleaved = torch.cat((q, gate), dim=-1).flatten(-2)
    projected = torch.cat((interleaved, k.flatten(-2), v.flatten(-2)), dim=-1)
    norms = torch.randn(2, dim, generator=generator).to(dtype)
    pools = torch.full((2, PAGES, LAYERS, PAGE, kv_heads, dim), POISON, dtype=pool_dtype or dtype)
    return Case(q, k, v, projected, norms[0], norms[1], (pools[0], pools[1]), rotated)


def taken(pool: torch.Tensor, row: int, column: int) -> torch.Tensor:
    """What the page of a live column holds [Hkv, D]; the place is poisoned again."""
    position = int(START[row]) + column
    place = pool[TABLE[row, position // PAGE], LAYER, position % PAGE]
    held = place.clone()
    place.fill_(POISON)
    return held


@pytest.mark.parametrize(("queries", "kv_heads", "dim", "rotated"), SHAPES)
def test_live_columns_are_normalised_rotated_and_placed_as_in_fp64(
    place: Place, queries: int, kv_heads: int, dim: int, rotated: int
) -> None:
    c = case(queries, kv_heads, dim, rotated, torch.float32)
    q = c.run(place)
    exact_q, exact_k = c.exact(c.q, c.q_norm), c.exact(c.k, c.k_norm)
    for row, live in enumerate(VALID.tolist()):
        oracles.close(q[row, :live], exact_q[row, :live], 4e-6)
        for column in range(live):
            oracles.close(taken(c.pools[0], row, column), exact_k[row, column], 4e-6)
            assert torch.equal(taken(c.pools[1], row, column), c.v[row, column])
    assert all(bool(pool.isnan().all()) for pool in c.pools)  # nothing lies anywhere else


@pytest.mark.parametrize(("queries", "kv_heads", "dim", "rotated"), SHAPES)
def test_the_kernel_rounds_bfloat16_where_the_separate_operators_do(
    queries: int, kv_heads: int, dim: int, rotated: int
) -> None:
    ours, theirs = (case(queries, kv_heads, dim, rotated, torch.bfloat16) for _ in range(2))
    q, expected = ours.run(on_device), theirs.run(place_heads_reference)
    assert q.shape == expected.shape and q.is_contiguous()
    for row, live in enumerate(VALID.tolist()):
        for column in range(live):
            oracles.rounds_like(q[row, column], expected[row, column].double())
            k = taken(ours.pools[0], row, column)
            oracles.rounds_like(k, taken(theirs.pools[0], row, column).double(), share=0.01)
            assert torch.equal(taken(ours.pools[1], row, column), ours.v[row, column])


def test_pages_may_be_coarser_than_the_model(place: Place) -> None:
    c = case(6, 2, 64, 64, torch.float32, pool_dtype=torch.bfloat16)
    c.run(place)
    oracles.rounds_like(taken(c.pools[0], 0, 3), c.exact(c.k, c.k_norm)[0, 3], share=0.02)
    assert torch.equal(taken(c.pools[1], 0, 3), c.v[0, 3].bfloat16())


def test_a_gate_lies_behind_the_query_of_its_head() -> None:
    projected = torch.arange(2 * 2 * 3 + 4).expand(1, 1, -1)
    q, gate = queries_and_gates(projected, 2, 3)
    assert q[0, 0].tolist() == [[0, 1, 2], [6, 7, 8]] and gate[0, 0].tolist() == [[3, 4, 5], [9, 10, 11]]


def test_what_does_not_fit_together_is_refused_by_name() -> None:
    c = case(4, 2, 64, 64, torch.float32)
    cos, sin = rotary_tables(c.positions, rotary_frequencies(64, THETA))
    keys, values = (pool[:, LAYER] for pool in c.pools)
    rest = (keys, values, TABLE, START, VALID, EPS)
    with pytest.raises(ValueError, match="projected: 767 values a column, must be 2 \\* 64 for each query head"):
        place_heads_triton(c.projected[..., :767], c.q_norm, c.k_norm, cos, sin, *rest)
    with pytest.raises(ValueError, match=r"k_norm: torch\.bfloat16, must be torch\.float32"):
        place_heads_triton(c.projected, c.q_norm, c.k_norm.bfloat16(), cos, sin, *rest)
    with pytest.raises(ValueError, match="sin: shape"):
        place_heads_triton(c.projected, c.q_norm, c.k_norm, cos, sin[:1], *rest)
    with pytest.raises(ValueError, match="keys: strides"):
        place_heads_triton(c.projected, c.q_norm, c.k_norm, cos, sin, keys[:, ::2], values[:, ::2], *rest[2:])
    with pytest.raises(ValueError, match="valid: shape"):
        place_heads_triton(c.projected, c.q_norm, c.k_norm, cos, sin, *rest[:4], VALID[:2], EPS)
