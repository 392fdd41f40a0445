"""Thousands of ways for a cluster to break: nothing published is lost, repeated or contradicted, and all comes back.

What is checked after every step is in `truth.py`. To play one schedule again: `run(SEED)`.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.ownership.cluster import Bugs, Cluster, Fault, run
from tests.ownership.faults import (
    FAULTS,
    FIRST_FAULTS,
    stall_directory,
    stall_directory_over_a_word,
    stall_replica,
    stall_replica_over_a_word,
)

SOAK_SCHEDULES = 100_000
CI_SCHEDULES = 2_000
CI_SLOW_SCHEDULES = 100


def play(seeds: range, machines: Bugs | None = None) -> Counter[str]:
    """Raises `Broken` with the seed at the first schedule that breaks a promise."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        counts = run(seed, machines)
        seen.update(counts.faults)
        seen.update(
            steps=counts.steps, tokens=counts.tokens, takeovers=counts.takeovers, forks=counts.forks, lost=counts.lost,
            found_again=counts.found_again,
        )  # fmt: skip
    return seen


def test_no_schedule_breaks_a_promise_and_every_kind_of_fault_is_in_them():
    seen = play(range(CI_SCHEDULES))
    assert all(seen[fault.__name__] > 50 for fault in FAULTS)
    assert seen["takeovers"] > 2 * CI_SCHEDULES and seen["tokens"] > 20 * CI_SCHEDULES
    assert seen["forks"] > CI_SCHEDULES / 2 and seen["found_again"] > 0


def test_no_fork_is_lost_whose_set_changes_while_its_image_is_made():
    assert play(range(CI_SLOW_SCHEDULES), Bugs(slow_images=True))["forks"] > CI_SLOW_SCHEDULES / 4


@pytest.mark.soak
def test_no_schedule_of_very_many_breaks_a_promise():
    print(play(range(SOAK_SCHEDULES)), play(range(SOAK_SCHEDULES // 5), Bugs(slow_images=True)))


def test_joiner_of_a_forked_session_gets_the_image_that_its_log_begins_with():
    """Its log goes back to the session's beginning, and still does not say all."""
    run(202_015, faults=FIRST_FAULTS)


def test_owner_that_waits_for_a_store_of_its_old_set_is_granted_again_by_a_directory_that_never_granted_it():
    """The stores tell a new directory the set by its name, and not whose machine it is that still waits."""
    run(202_677, faults=FIRST_FAULTS)


def test_owner_that_dies_while_it_gives_a_session_new_copies_leaves_it_lost_and_not_empty():
    run(300_309, faults=FIRST_FAULTS)


@pytest.mark.parametrize("seed", [602_703, 704_006, 706_717])
def test_owner_that_nobody_could_seal_publishes_nothing_beside_who_began_its_session_anew(seed: int):
    """What it published before is lost, which its client is told; where the directory never heard of it, that it is
    not there."""
    run(seed, faults=FIRST_FAULTS)


@pytest.mark.parametrize(
    "stall", [stall_directory, stall_directory_over_a_word, stall_replica, stall_replica_over_a_word]
)
def test_where_only_who_listens_stalls_no_copy_is_given_up(stall: Fault):
    """It hears afterwards what it was told meanwhile."""
    for seed in range(25):
        cluster = Cluster(seed, faults=[stall])
        assert cluster.play().faults[stall.__name__] and not cluster.registry.void()


def test_a_seed_plays_the_same_schedule_again():
    assert run(7) == run(7)
    assert run(7) != run(8)
