"""When a session's state follows its ledger."""

from __future__ import annotations

from state.names import SessionKey
from state.publication_policy import PublicationPolicy

A, B = SessionKey("a" * 64, "one"), SessionKey("a" * 64, "two")


def test_the_state_of_a_session_follows_when_it_has_rested_and_not_before() -> None:
    policy = PublicationPolicy()
    assert not policy.turn_ended(A, 300, now=100.0)
    assert policy.due(109.9) == [] and policy.due(110.0) == [A]
    policy.written(A, 300, 300)
    assert policy.due(1000.0) == []


def test_a_turn_that_runs_keeps_its_session_from_being_idle() -> None:
    policy = PublicationPolicy()
    policy.turn_ended(A, 300, now=0.0)
    policy.turn_began(A)
    assert policy.due(1e9) == []
    policy.turn_ended(A, 320, now=50.0)
    assert policy.due(60.0) == [A]


def test_state_goes_with_the_record_once_a_session_has_grown_by_so_many_tokens() -> None:
    policy = PublicationPolicy(tokens=1000)
    grown = [policy.turn_ended(A, frontier, now=0.0) for frontier in (999, 1000)]
    assert grown == [False, True]
    policy.written(A, 1000, 1000)
    assert [policy.turn_ended(A, frontier, now=0.0) for frontier in (1400, 1999, 2000)] == [False, False, True]


def test_an_agent_with_short_calls_writes_one_state_in_eight_thousand_tokens() -> None:
    policy, states = PublicationPolicy(), 0
    for call in range(1, 101):
        now, frontier = 3.0 * call, 400 * call
        policy.turn_began(A)
        if policy.turn_ended(A, frontier, now):
            states += 1
            policy.written(A, frontier, frontier)
        assert policy.due(now + 3.0) == []
    assert states == 40_000 // 8192


def test_sessions_are_due_in_the_order_in_which_they_came_to_rest() -> None:
    policy = PublicationPolicy(idle_seconds=1.0)
    policy.turn_ended(B, 5, now=1.0)
    policy.turn_ended(A, 5, now=0.0)
    assert policy.due(1.5) == [A] and policy.due(5.0) == [A, B]


def test_a_session_whose_newest_state_is_lost_is_asked_for_no_more_and_grows_from_what_is_written() -> None:
    policy = PublicationPolicy(tokens=1000)
    policy.turn_ended(A, 700, now=0.0)
    policy.written(A, 700, 300)
    assert policy.due(1e9) == []
    assert [policy.turn_ended(A, frontier, now=0.0) for frontier in (1299, 1300)] == [False, True]


def test_a_session_that_left_is_forgotten() -> None:
    policy = PublicationPolicy()
    policy.turn_ended(A, 301, now=0.0)
    policy.forget(A)
    policy.written(A, 301, 301)
    assert policy.due(1e9) == []
