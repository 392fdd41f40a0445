"""What a round finds on the device: its rows' numbers, page tables and histories, written where they have changed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployment.engine.buffers import PageTables, PromptSlice
from deployment.engine.commands import Sampling, Submit
from deployment.engine.histories import Histories
from deployment.engine.ingress import FLOATS, INTEGERS, Ingress, Row
from deployment.engine.lane import Lane
from state.memory import SequenceMemory

CPU = torch.device("cpu")
LANES, VOCABULARY = 3, 11


def row(number: int) -> Row:
    values = {name: 100 * place + number for place, name in enumerate(INTEGERS)}
    return Row(**values, **{name: place + number / 8 for place, name in enumerate(FLOATS)})  # pyright: ignore


def test_every_number_of_every_row_arrives_under_its_name_whatever_was_there_before():
    ingress = Ingress(5, CPU)
    for count in (5, 2, 4):
        rows = [row(count + index) for index in range(count)]
        ingress.send(rows)
        there = ingress.rows(count)
        for name in (*INTEGERS, *FLOATS):
            values = getattr(there, name)
            assert values.tolist() == [getattr(one, name) for one in rows]
            assert values.dtype == (torch.float32 if name in FLOATS else torch.int64) and values.is_contiguous()


def test_seeds_of_64_bits_arrive_whole():
    ingress = Ingress(1, CPU)
    ingress.send([row(0)._replace(seed=-(1 << 63)), row(1)._replace(seed=(1 << 63) - 1)][:1])
    assert ingress.rows(1).seed.tolist() == [-(1 << 63)]


def test_a_lanes_page_table_is_its_sequences_and_anothers_when_that_comes():
    tables = PageTables(LANES, 6, CPU)
    first = SequenceMemory(0, [4, 9], [])
    tables.write(1, first, first.pages)
    assert tables.device.tolist() == [[0] * 6, [4, 9, 0, 0, 0, 0], [0] * 6, [0] * 6]
    second = SequenceMemory(0, [7, 5, 3], [])
    tables.write(1, second, second.pages)
    assert tables.device[1, :3].tolist() == [7, 5, 3]
    assert not tables.device[LANES].any()


def test_a_slice_has_its_numbers_its_tokens_and_nothing_of_the_one_before_behind_them():
    prompt = PromptSlice(8, CPU)
    for slot, lane, start, tokens, columns in (
        (5, 2, 64, range(11, 19), 8),
        (6, 1, 72, (21, 22, 23), 4),
        (0, 3, 0, (), 8),
    ):
        prompt.send(slot, lane, start, tuple(tokens), columns)
        *numbers, ids = prompt.of(columns)
        assert [number.tolist() for number in numbers] == [[slot], [lane], [start], [len(tokens)]]
        assert ids.tolist() == [[*tokens, *[0] * (columns - len(tokens))]]
        assert all(part.data_ptr() % 16 == prompt.device.data_ptr() % 16 for part in (*numbers, ids))


# ------------------------------------------------------------------------------------------------ histories


def lane_of(place: int, prompt: list[int], sampling: Sampling) -> Lane:
    submit = Submit(f"turn-{place}", tuple(prompt), sampling)
    memory = SequenceMemory(0, [], [])
    return Lane(submit, place, memory, list(prompt), 100, frozenset(), "none", 0, 0.0)


tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, LANES - 1), st.booleans(), tokens, st.lists(tokens, max_size=3)), max_size=6))
def test_a_history_is_that_of_the_ledger_whoever_was_in_the_lane_before(turns):
    """Turns come into lanes one after another, and say something in several rounds; some have no penalties."""
    histories = Histories(LANES, VOCABULARY, CPU)
    for place, penalised, prompt, rounds in turns:
        bias = ((2, 1.5), (2, 0.5), (7, -3.0))
        controls = Sampling(presence_penalty=0.5, logit_bias=bias) if penalised else Sampling()
        lane = lane_of(place, prompt, controls)
        for said in rounds:
            lane.ledger += said
            histories.follow([lane])
            at = histories.row(lane)
            assert at == (place if penalised else LANES)
            told = Counter(lane.generated) if penalised else Counter[int]()
            assert histories.counts[at].tolist() == [told[token] for token in range(VOCABULARY)]
            seen = set(prompt) if penalised else set()
            assert histories.in_prompt[at].tolist() == [token in seen for token in range(VOCABULARY)]
            assert histories.bias[at].tolist() == [
                {2: 2.0, 7: -3.0}.get(token, 0.0) * penalised for token in range(VOCABULARY)
            ]


def test_a_turn_that_comes_back_to_its_lane_with_less_than_it_had_is_counted_anew():
    histories = Histories(LANES, VOCABULARY, CPU)
    lane = lane_of(0, [1], Sampling(frequency_penalty=1.0))
    lane.ledger += [3, 3, 4]
    histories.follow([lane])
    del lane.ledger[2:]
    histories.follow([lane])
    assert histories.counts[0].nonzero().flatten().tolist() == [3] and histories.counts[0, 3] == 1


@pytest.mark.parametrize(
    "controls",
    [
        Sampling(repetition_penalty=1.1),
        Sampling(presence_penalty=-0.1),
        Sampling(frequency_penalty=0.1),
        Sampling(logit_bias=((0, 1.0),)),
    ],
)
def test_whoever_asks_for_any_of_them_has_a_history(controls):
    assert Histories(LANES, VOCABULARY, CPU).row(lane_of(1, [0], controls)) == 1
