"""bench/demo_parity.py finds where two answers part, and how sure an acceptance length is."""

from __future__ import annotations

import pytest

from bench.demo_parity import acceptance, parting
from deployment.engine.commands import TokenLogprob

TOLD = [TokenLogprob(token, -0.1, ((token, -0.1), (9, -0.35))) for token in (5, 6, 7)]


def test_answers_part_at_the_first_place_that_differs_by_what_the_plain_run_preferred_its_own_token():
    assert parting((5, 6, 7), TOLD, (5, 9, 1)) == {"place": 1, "gap": 0.25}
    assert parting((5, 6, 7), TOLD, (5, 6, 8)) == {"place": 2, "gap": None}
    assert parting((5, 6, 7), TOLD, (5, 6, 7)) is None


def test_acceptance_is_tokens_a_round_and_its_interval_holds_it_and_has_no_width_where_all_prompts_agree():
    length, (low, high) = acceptance([[3, 1], [0, 0, 2], [4]])
    assert length == pytest.approx(1 + 10 / 6) and 1 < low < length < high <= 5
    assert acceptance([[2, 2], [2]]) == (3, (3, 3))
