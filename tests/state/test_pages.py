"""Pages are counted, and never handed out twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from state.errors import CapacityError, StateError
from state.geometry import PAGE_TOKENS, pages_for
from state.pages import PagePool


def pool_of(pages: int) -> PagePool:
    return PagePool("target pages", 2, 1, 4, pages, torch.float32, torch.float16)


def test_pages_for_counts_started_pages() -> None:
    assert [pages_for(tokens) for tokens in (0, 1, 63, 64, 65, 128, 129)] == [0, 1, 1, 1, 2, 2, 3]


def test_a_page_is_contiguous_over_its_layers_and_keeps_both_dtypes() -> None:
    pool = pool_of(3)
    assert pool.keys.shape == (3, 2, PAGE_TOKENS, 1, 4)
    assert pool.keys[1].is_contiguous() and pool.values[1].is_contiguous()
    assert (pool.keys.dtype, pool.values.dtype) == (torch.float32, torch.float16)


def test_too_many_pages_are_refused_and_nothing_is_taken() -> None:
    pool = pool_of(3)
    pool.allocate(1)
    with pytest.raises(CapacityError, match=r"^target pages: 3 wanted, 2 free$") as refused:
        pool.allocate(3)
    assert (refused.value.pool, refused.value.wanted, refused.value.free) == ("target pages", 3, 2)
    assert pool.free == 2
    pool.allocate(2)


def test_a_released_page_cannot_be_released_or_shared_again() -> None:
    pool = pool_of(2)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(StateError, match=f"page {page} is released, but it is free already"):
        pool.release([page])
    with pytest.raises(StateError, match=f"page {page} is free and cannot be shared"):
        pool.share([page])
    assert pool.free == 2


def test_sharing_is_all_or_nothing() -> None:
    pool = pool_of(2)
    (page,) = pool.allocate(1)
    with pytest.raises(StateError):
        pool.share([page, 1 - page])
    assert pool.refcount(page) == 1


def test_each_allocation_of_a_page_gives_it_a_new_epoch() -> None:
    pool = pool_of(1)
    epochs: list[int] = []
    for _ in range(3):
        (page,) = pool.allocate(1)
        epochs.append(pool.epoch(page))
        pool.share([page])
        assert pool.epoch(page) == epochs[-1]
        pool.release([page, page])
    assert len(set(epochs)) == 3


def test_copying_some_columns_of_a_page_leaves_zeros_beyond_them() -> None:
    pool = pool_of(2)
    source, destination = pool.allocate(2)
    for plane in (pool.keys, pool.values):
        plane[source] = 1 + torch.arange(plane[source].numel()).view_as(plane[source]) % 100
        plane[destination] = 9
    pool.copy_page(source, destination, columns=5)
    for plane in (pool.keys, pool.values):
        assert torch.equal(plane[destination, :, :5], plane[source, :, :5])
        assert not plane[destination, :, 5:].any()
    pool.copy_page(source, destination)
    assert torch.equal(pool.keys[destination], pool.keys[source])


def test_an_empty_pool_and_a_negative_wish_are_refused() -> None:
    with pytest.raises(StateError, match="a pool of 0 pages"):
        pool_of(0)
    with pytest.raises(StateError, match="-1 pages wanted"):
        pool_of(1).allocate(-1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 5)), max_size=40))
def test_counts_equal_the_references_that_exist(steps: list[tuple[str, int]]) -> None:
    pool, held = pool_of(6), []
    for step, number in steps:
        if step == "allocate":
            free = pool.free
            if number > free:
                with pytest.raises(CapacityError):
                    pool.allocate(number)
            else:
                taken = pool.allocate(number)
                assert len(set(taken)) == number and not set(taken) & set(held)
                held += taken
        elif held:
            page = held[number % len(held)]
            if step == "share":
                pool.share([page])
                held.append(page)
            else:
                pool.release([page])
                held.remove(page)
        pool.check_references(held)
        assert pool.free == 6 - len(set(held))
        assert all(pool.refcount(page) == held.count(page) for page in range(6))


def test_a_leaked_and_a_doubly_used_page_are_found() -> None:
    pool = pool_of(3)
    (page,) = pool.allocate(1)
    with pytest.raises(StateError, match=f"page {page} counts 1 references, but 0 exist"):
        pool.check_references([])
    with pytest.raises(StateError, match=f"page {page} counts 1 references, but 2 exist"):
        pool.check_references([page, page])
