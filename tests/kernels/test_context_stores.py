"""The context K/V of all draft layers, written by one operator: what lies where, against FP64, position by position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from kernels.context_kv import ContextStores, store_context_kv, store_context_kv_reference, store_context_kv_triton
from kernels.rotary import rotary_frequencies
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, there
from tests.kernels.oracles import POISON

HIDDEN, HEADS, DIM, WINDOW, PAGE, EPS, FACTOR = 32, 3, 16, 6, 64, 1e-6, 1.25
SLOTS, PAGES = 9, 7
ALL_LOCAL, ALL_FULL, MIXED = (True, True), (False, False), (True, False, True, True, False)
UNTOUCHED = -12345.0

Store = Callable[..., None]


@pytest.fixture(params=["reference", "triton"])
def store(request: pytest.FixtureRequest) -> Store:
    return store_context_kv_reference if request.param == "reference" else store_context_kv_triton


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Chunk:
    """Context features of B rows and the weights of L layers; NaN at and beyond each row's count."""

    c: torch.Tensor
    weight: torch.Tensor
    key_norms: torch.Tensor
    frequencies: torch.Tensor
    start: torch.Tensor
    counts: torch.Tensor

    def expected(self, row: int, column: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [Hkv, D] of one position and layer, FP64, V rounded to the model's dtype."""
        weights = self.weight.double().view(*self.key_norms.shape[:1], 2, HEADS, self.key_norms.shape[1], HIDDEN)[layer]
        raw_k, raw_v = weights @ self.c[row, column].double()
        position = self.start[row] + column
        keys = self.key_norms[layer].double() * oracles.rms(raw_k, EPS)
        return oracles.rotate(keys, position, self.frequencies, FACTOR), raw_v.to(self.c.dtype).double()


def chunk(layers: int, start: list[int], counts: list[int], columns: int, dtype: torch.dtype, dim: int = DIM) -> Chunk:
    c = normal(len(start), columns, HIDDEN, seed=1).to(dtype)
    for row, count in enumerate(counts):
        c[row, max(count, 0) :] = POISON
    weight = normal(layers * 2 * HEADS * dim, HIDDEN, seed=2).to(dtype)
    norms = normal(layers, dim, seed=3).to(dtype)
    return Chunk(c, weight, norms, rotary_frequencies(dim, 1e7), torch.tensor(start), torch.tensor(counts))


def stores(
    local: tuple[bool, ...], batch: int, types: tuple[torch.dtype, torch.dtype], dim: int = DIM
) -> ContextStores:
    """Untouched planes; rows own slots and pages in no order, and a table has entries that must never be followed."""
    generator = torch.Generator().manual_seed(4)
    slots = torch.randperm(SLOTS, generator=generator)[:batch]
    table = torch.full((batch, 4), 2**40)
    free = torch.randperm(PAGES, generator=generator).tolist()
    for row in range(batch):
        for index in range(2 if row == 0 else 1):
            table[row, index] = free.pop()

    def planes(count: int, layers: int, tokens: int) -> list[torch.Tensor]:
        return [torch.full((count, layers, tokens, HEADS, dim), UNTOUCHED, dtype=dtype) for dtype in types]

    rings = planes(SLOTS, local.count(True), WINDOW if True in local else 0)
    pages = planes(PAGES, local.count(False), PAGE) if False in local else [None, None]
    return ContextStores(local, slots, table, rings[0], rings[1], pages[0], pages[1])


def write(store: Store, x: Chunk, into: ContextStores) -> ContextStores:
    """The stores after the append; what was given is changed as well where kernels run on its device."""
    at, moved = there(into), there(x)
    store(moved.c, moved.weight, moved.key_norms, EPS, moved.frequencies, FACTOR, moved.start, moved.counts, at)
    tensors = {name: value.cpu() for name, value in vars(at).items() if isinstance(value, torch.Tensor)}
    return replace(at, **tensors)


def places(x: Chunk, into: ContextStores, row: int, column: int, layer: int) -> tuple[int, int]:
    """(plane, token) of a position, by the rule."""
    position = int(x.start[row]) + column
    if into.local[layer]:
        return int(into.slots[row]), position % WINDOW
    return int(into.page_table[row, position // PAGE]), position % PAGE


def check(x: Chunk, into: ContextStores, tolerance: float) -> None:
    """Every stored position holds its K and V, and nothing else was touched."""
    for layer, is_local in enumerate(into.local):
        keys, values = (plane.clone() for plane in into.planes(layer))
        for row, count in enumerate(x.counts.tolist()):
            for column in range(max(0, count - WINDOW) if is_local else 0, count):
                plane, token = places(x, into, row, column, layer)
                k, v = x.expected(row, column, layer)
                oracles.close(keys[plane, token], k, tolerance)
                oracles.close(values[plane, token], v, tolerance)
                keys[plane, token], values[plane, token] = UNTOUCHED, UNTOUCHED
        for plane in (keys, values):
            assert bool((plane == torch.tensor(UNTOUCHED, dtype=plane.dtype)).all())


@pytest.mark.parametrize("local", [ALL_LOCAL, ALL_FULL, MIXED])
def test_each_layer_writes_ragged_rows_to_its_own_store(store: Store, local: tuple[bool, ...]) -> None:
    """Counts 0, 1, below, at, and above the ring's size, across the ring's wrap and a page's edge."""
    x = chunk(len(local), [61, 0, 11, 5, 40], [7, 1, WINDOW, 0, WINDOW - 1], 8, torch.float32)
    into = stores(local, 5, (torch.float32, torch.float32))
    check(x, write(store, x, into), 1e-5)


@pytest.mark.parametrize("count", [WINDOW + 1, 5 * WINDOW])
def test_a_chunk_longer_than_the_ring_stores_its_live_window_only(store: Store, count: int) -> None:
    x = chunk(1, [3], [count], count + 2, torch.float32)
    check(x, write(store, x, stores((True,), 1, (torch.float32, torch.float32))), 1e-5)


def test_leaving_out_columns_before_the_live_window_changes_nothing(store: Store) -> None:
    count = 3 * WINDOW
    x = chunk(1, [3], [count], count, torch.float32)
    cut = replace(x, c=x.c[:, -WINDOW:].contiguous(), start=x.start + count - WINDOW, counts=x.counts - count + WINDOW)
    whole, part = (write(store, y, stores((True,), 1, (torch.float32, torch.float32))) for y in (x, cut))
    oracles.close(part.ring_keys, whole.ring_keys, 1e-6)
    oracles.close(part.ring_values, whole.ring_values, 1e-6)


def test_keys_round_once_and_values_by_way_of_the_models_dtype(store: Store) -> None:
    """BF16 K is FP64's K rounded once, but where FP32 falls beside a boundary; FP16 V is a represented BF16 value."""
    x = chunk(2, [9, 70_000], [4, 6], 6, torch.bfloat16)
    into = write(store, x, stores(ALL_LOCAL, 2, (torch.bfloat16, torch.float16)))
    check(x, into, 2.0**-7)
    keys, expected = [], []
    for layer in range(2):
        for row, count in enumerate(x.counts.tolist()):
            for column in range(count):
                plane, token = places(x, into, row, column, layer)
                keys.append(into.planes(layer)[0][plane, token])
                expected.append(x.expected(row, column, layer)[0])
                value = into.planes(layer)[1][plane, token]
                assert torch.equal(value, value.bfloat16().half())
    oracles.rounds_like(torch.stack(keys), torch.stack(expected), share=0.01)


def test_the_reference_and_the_kernel_write_the_same_bits_but_for_near_ties() -> None:
    x = chunk(5, [61, 0], [7, 3], 8, torch.bfloat16)
    written = [
        write(store, x, stores(MIXED, 2, (torch.bfloat16, torch.float16)))
        for store in (store_context_kv_reference, store_context_kv_triton)
    ]
    for name in ("ring_keys", "ring_values", "page_keys", "page_values"):
        one, other = (getattr(w, name) for w in written)
        touched = one != torch.tensor(UNTOUCHED, dtype=one.dtype)
        assert bool(touched.any())
        assert float((one != other)[touched].double().mean()) < 0.01


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_kernel_takes_every_head_dimension(dim: int) -> None:
    x = chunk(2, [61], [7], 8, torch.bfloat16, dim)
    into = stores((True, False), 1, (torch.bfloat16, torch.float16), dim)
    check(x, write(store_context_kv_triton, x, into), 2.0**-6)


def test_the_operator_is_the_one_of_the_tensors_device() -> None:
    x = there(chunk(2, [61], [7], 8, torch.float32))
    into = there(stores((True, False), 1, (torch.float32, torch.float32)))
    store_context_kv(x.c, x.weight, x.key_norms, EPS, x.frequencies, FACTOR, x.start, x.counts, into)
    assert x.c.device.type == DEVICE
    assert bool((into.ring_keys != UNTOUCHED).any()) and into.page_keys is not None
    assert bool((into.page_keys != UNTOUCHED).any())


def test_a_launch_refuses_what_does_not_fit_by_name() -> None:
    x = chunk(2, [61], [7], 8, torch.float32)
    into = stores((True, False), 1, (torch.float32, torch.float32))
    for name, (given, where) in {
        "weight": (replace(x, weight=x.weight[1:]), into),
        "key_norms": (replace(x, key_norms=x.key_norms[:, 1:]), into),
        "start": (replace(x, start=x.start.int()), into),
        "stores.slots": (x, replace(into, slots=into.slots[:0])),
        "stores: ring planes": (x, replace(into, ring_keys=into.ring_keys[..., :1, :])),
        "page_keys": (x, replace(into, page_keys=None)),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            write(store_context_kv_triton, given, where)
