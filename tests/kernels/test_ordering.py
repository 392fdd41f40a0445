"""Order and shortlist: descending, exact ties to the lower id, whatever the scores are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.ordering import top_rows
from kernels.shortlist import shortlist
from tests.kernels import oracles

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
