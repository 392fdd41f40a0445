"""Order and shortlist: descending, exact ties to the lower id, whatever the scores are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.ordering import BLOCKS_PER_CHUNK, CHUNK, argmax_rows, argmax_rows_triton, block_maxima, top_rows
from kernels.shortlist import shortlist, shortlist_reference, shortlist_triton
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, poison_new_memory

INF = float("inf")
AWKWARD = [0.0, -0.0, INF, -INF, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0000001, 0.5]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.sampled_from(AWKWARD), min_size=9, max_size=9), min_size=1, max_size=4), st.integers(1, 9))
def test_rows_come_in_descending_order_with_ties_by_lower_id(table: list[list[float]], k: int) -> None:
    scores, ids = top_rows(torch.tensor(table), k)
    for row, values in enumerate(table):
        expected = oracles.descending(torch.tensor(values).tolist())[:k]
        assert ids[row].tolist() == expected
        assert scores[row].tolist() == [torch.tensor(values)[i].item() for i in expected]


def test_a_tie_that_the_boundary_cuts_goes_to_the_lower_ids() -> None:
    scores = torch.zeros(1, 5000)
    scores[0, ::2] = -0.0
    scores[0, 4000] = 1.0
    assert top_rows(scores, 4)[1].tolist() == [[4000, 0, 1, 2]]


def test_a_wide_random_row_equals_a_full_stable_sort() -> None:
    scores = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(1)).mul(8).round()  # many exact ties
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :16]
    assert torch.equal(top_rows(scores, 16)[1], expected)


def test_minus_infinity_ranks_last_but_still_in_order_of_id() -> None:
    assert top_rows(torch.tensor([[-INF, 2.0, -INF, -5.0]]), 4)[1].tolist() == [[1, 3, 0, 2]]


def test_a_shortlist_is_the_best_k_with_their_own_scores() -> None:
    scores = torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
    unary, ids = shortlist(scores, 16)
    assert unary.shape == ids.shape == (5, 16)
    assert torch.equal(unary, scores.gather(-1, ids))
    for row in range(5):
        assert ids[row].tolist() == oracles.descending(scores[row].tolist())[:16]


@pytest.mark.parametrize("rows", [1, 3, 15])
def test_a_shortlist_of_fewer_rows_than_k_is_filled_with_candidates_that_cannot_be_drawn(rows: int) -> None:
    scores = torch.randn(2, rows, generator=torch.Generator().manual_seed(3))
    unary, ids = shortlist(scores, 16)
    assert unary.shape == ids.shape == (2, 16)
    for row in range(2):
        assert ids[row, :rows].tolist() == oracles.descending(scores[row].tolist())
    assert bool((unary[:, rows:] == -INF).all())
    assert bool((ids < rows).all()), "a filler must be an id that codebooks have"
    assert float(unary.softmax(-1)[:, rows:].sum()) == 0.0


# ------------------------------------------------------------------------------------------------ kernels


def rows_of_every_kind(count: int) -> torch.Tensor:
    """FP32 [8, count]: random, many ties, all equal, zeros of both signs, -inf with few others, all -inf, ascending,
    descending."""
    generator = torch.Generator().manual_seed(count)
    random = torch.randn(count, generator=generator)
    zeros = torch.zeros(count)
    zeros[::2] = -0.0
    forbidden = torch.full((count,), -INF)
    forbidden[torch.randint(0, count, (5,), generator=generator)] = torch.tensor([1.0, -3e38, 1.0, INF, -0.0])
    ascending = torch.arange(count, dtype=torch.float32)
    return torch.stack(
        (
            random,
            (random * 3).round(),
            torch.full((count,), -2.5),
            zeros,
            forbidden,
            torch.full((count,), -INF),
            ascending,
            -ascending,
        )
    )


# One block; one chunk and its neighbours; enough blocks for each number of narrowing steps.
COUNTS = [1, 3, 15, 16, 17, 127, 257, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77, 5 * CHUNK + 3, 9 * CHUNK, 248_077]


@pytest.mark.parametrize("count", COUNTS)
def test_the_kernels_order_rows_as_the_reference_does(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = rows_of_every_kind(count)
    expected, expected_ids = shortlist_reference(scores, 16)
    poison_new_memory(monkeypatch)
    best, ids = shortlist_triton(scores.to(DEVICE), 16)
    assert torch.equal(ids.cpu(), expected_ids)
    assert torch.equal(best.cpu(), expected)
    assert torch.equal(argmax_rows_triton(scores.to(DEVICE)).cpu(), expected_ids[:, 0])


def test_the_best_sixteen_are_found_wherever_they_crowd() -> None:
    """In one block, in one line, one a block, over chunks, at the row's ends."""
    count = 9 * CHUNK + 5
    one_block = torch.tensor([3 * CHUNK + 256 * line + 8 + lane for line in range(5) for lane in range(4)])
    places = [
        one_block,
        torch.arange(20) + 2 * CHUNK - 7,
        torch.arange(20) * 4 + CHUNK,
        torch.arange(20) * 3677,
        torch.cat((torch.arange(10), count - 1 - torch.arange(10))),
    ]
    scores = torch.randn(len(places), count, generator=torch.Generator().manual_seed(4))
    for row, ids in enumerate(places):
        scores[row, ids] = 10.0 + (torch.arange(20) % 7)
    assert torch.equal(shortlist_triton(scores.to(DEVICE), 16)[1].cpu(), top_rows(scores, 16)[1])


def test_rows_of_a_wider_table_are_read_at_its_stride_and_no_further() -> None:
    table = torch.randn(3, 700, generator=torch.Generator().manual_seed(5))
    table[:, 611:] = INF
    view = table.to(DEVICE)[:, :611]
    assert torch.equal(shortlist_triton(view, 16)[1].cpu(), top_rows(table[:, :611], 16)[1])
    assert torch.equal(argmax_rows_triton(view).cpu(), table[:, :611].argmax(-1))


@pytest.mark.parametrize("k", [1, 4, 16])
def test_a_shorter_list_is_the_front_of_the_long_one(k: int) -> None:
    scores = torch.randn(2, 300, generator=torch.Generator().manual_seed(6)).round()
    best, ids = shortlist_triton(scores.to(DEVICE), k)
    assert best.shape == ids.shape == (2, k)
    assert torch.equal(ids.cpu(), top_rows(scores, k)[1])


def test_a_block_maximum_is_the_best_key_of_its_own_128_ids() -> None:
    scores = torch.randn(1, CHUNK + 600, generator=torch.Generator().manual_seed(7))
    maxima = block_maxima(scores.to(DEVICE)).cpu()
    assert maxima.shape == (1, 2 * BLOCKS_PER_CHUNK)
    ids = 0xFFFFFFFF - (maxima & 0xFFFFFFFF)
    place = torch.arange(CHUNK + 600)
    block = place // CHUNK * BLOCKS_PER_CHUNK + place % 256 // 4
    for number in range(2 * BLOCKS_PER_CHUNK):
        members = place[block == number]
        if len(members):
            assert int(ids[0, number]) == int(members[scores[0, members].argmax()])


def test_no_rows_and_impossible_arguments() -> None:
    assert argmax_rows(torch.empty(0, 5)).shape == (0,)
    assert argmax_rows_triton(torch.empty(0, 5, device=DEVICE)).shape == (0,)
    assert shortlist_triton(torch.empty(0, 5, device=DEVICE), 16)[0].shape == (0, 16)
    with pytest.raises(ValueError, match="k: 17, must be 1 to 16"):
        shortlist_triton(torch.zeros(1, 40, device=DEVICE), 17)
    with pytest.raises(ValueError, match=r"scores: torch.bfloat16, must be torch.float32"):
        shortlist_triton(torch.zeros(1, 40, device=DEVICE, dtype=torch.bfloat16), 16)
    with pytest.raises(ValueError, match="scores: 0 columns"):
        argmax_rows_triton(torch.zeros(1, 0, device=DEVICE))
