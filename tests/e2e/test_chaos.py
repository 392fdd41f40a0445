"""What every promise of `docs/sessions.md` comes to: a cluster whose parts are killed while conversations go on."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.e2e.chaos.experiment import Experiment, Outcome, overlapping_faults, single_faults
from tests.e2e.chaos.faults import KINDS, Kind
from tests.e2e.chaos.nodes import Nodes, cluster_of

ONCE: list[Kind] = ["ingress", "replica", "node", "directory", "host_store"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with cluster_of(2) as nodes:
        yield nodes


def test_each_part_killed_once_loses_repeats_or_contradicts_no_token(nodes: Nodes):
    """Sessions with equal draws are compared with an undisturbed run; those whose owners never draw alike, at the same
    time and under the same faults, with their followers, their ledgers and their transcripts."""
    undisturbed_by(single_faults(Experiment(nodes, seed=11, plain=4, salted=4, longest=48), ONCE, moves_between=1))


@pytest.mark.soak
def test_thirty_kills_lose_repeat_or_contradict_no_token(nodes: Nodes):
    outcome = single_faults(Experiment(nodes, seed=13, plain=8, salted=8, longest=96), ONCE * 6, moves_between=2)
    undisturbed_by(outcome)
    assert outcome.moves >= 30 and outcome.plain.streams_resumed and outcome.salted.streams_resumed


def undisturbed_by(outcome: Outcome) -> None:
    told_the_truth(outcome)
    assert not outcome.plain.why_given_up and not outcome.salted.why_given_up
    assert outcome.plain.streams_resumed + outcome.salted.streams_resumed > 0, "no kill met a stream"


def told_the_truth(outcome: Outcome) -> None:
    """And there was something to tell, and something that could have kept it from it."""
    print(outcome)
    assert outcome.plain.clean, outcome.plain.what
    assert outcome.salted.clean, outcome.salted.what
    assert all(outcome.kills[kind] for kind in KINDS) and outcome.moves > 0
    assert outcome.plain.tokens_published > 0 and outcome.salted.tokens_published > 0
    assert outcome.log_records_compared > 0, f"of {outcome.log_records} records none was read from two stores"


@pytest.mark.soak
def test_overlapping_kills_may_refuse_a_session_and_still_lose_no_token(nodes: Nodes):
    experiment = Experiment(nodes, seed=12, plain=8, salted=8, longest=160)
    kinds = random.Random(experiment.seed).choices(KINDS, k=30)
    outcome = overlapping_faults(experiment, kinds, seconds=6.0)
    told_the_truth(outcome)
    assert sum(outcome.kills.values()) == 30
    assert outcome.plain.given_up + outcome.salted.given_up <= 4, "a few, of 16"
