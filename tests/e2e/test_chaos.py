"""What every promise of `docs/sessions.md` comes to: a cluster whose parts are killed while conversations go on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.chaos.experiment import Experiment, overlapping_faults, single_faults
from tests.e2e.chaos.faults import KINDS
from tests.e2e.chaos.nodes import Nodes, cluster_of


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with cluster_of(2) as nodes:
        yield nodes


# One run in many still finds a resumed turn that draws another token: see docs/sessions.md.
@pytest.mark.soak
def test_no_kill_and_no_move_loses_repeats_or_contradicts_a_token(nodes: Nodes):
    """Sessions with equal draws are compared with an undisturbed run; those whose owners never draw alike, at the same
    time and under the same faults, with their followers, their ledgers and their transcripts."""
    experiment = Experiment(nodes, seed=11, plain=8, salted=4, longest=64)
    outcome = single_faults(experiment, ["ingress", "replica", "node", "directory", "host_store"], moves_between=1)
    print(outcome)
    assert outcome.plain.clean, outcome.plain.what
    assert outcome.salted.clean, outcome.salted.what
    assert not outcome.plain.why_given_up and not outcome.salted.why_given_up
    assert all(outcome.kills[kind] for kind in KINDS) and outcome.moves >= 3
    assert outcome.plain.streams_resumed and outcome.salted.streams_resumed


@pytest.mark.soak
def test_overlapping_kills_may_refuse_a_session_and_still_lose_no_token(nodes: Nodes):
    experiment = Experiment(nodes, seed=12, plain=8, salted=8, longest=160)
    outcome = overlapping_faults(experiment, 30, seconds=6.0)
    print(outcome)
    assert outcome.plain.clean, outcome.plain.what
    assert outcome.salted.clean, outcome.salted.what
