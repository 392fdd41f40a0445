"""The scheduler's books alone: order, fairness, overtaking, limits and who gives up a lane. Time is a number here."""

from __future__ import annotations

from typing import Any

import pytest

from deployment.engine import errors
from deployment.engine.commands import Submit
from deployment.engine.errors import EngineError
from deployment.engine.options import EngineOptions
from deployment.engine.scheduler import COMPILE_SECONDS, OVERTAKE_SECONDS, OVERTAKES, Scheduler, Shortage, Ticket
from tests.engine.driving import TARGET


class Books:
    """A scheduler over `pages` pages; a turn's prompt has as many tokens as it wants pages."""

    def __init__(self, pages: int = 1000, **options: Any) -> None:
        self.scheduler = Scheduler(EngineOptions(model=TARGET, **options))
        self.free = pages
        self.offered: list[str] = []

    def arrive(self, turn: str, pages: int = 1, now: float = 0.0, **fields: Any) -> Ticket:
        return self.scheduler.enqueue(Submit(turn, (1,) * pages, **fields), now)

    def admit(self, now: float = 0.0) -> list[str]:
        before = {ticket.turn for ticket in self.scheduler.running}
        self.scheduler.admit(now, self._take)
        return [ticket.turn for ticket in self.scheduler.running if ticket.turn not in before]

    def end(self, turn: str) -> None:
        self._give_back(turn)
        self.scheduler.ended(turn)

    def preempt(self, turn: str, now: float) -> None:
        self._give_back(turn)
        self.scheduler.preempted(turn, now)

    def victims(self, now: float) -> list[str]:
        return [ticket.turn for ticket in self.scheduler.victims(now)]

    def _take(self, ticket: Ticket) -> dict[str, int] | Shortage:
        self.offered.append(ticket.turn)
        wanted = len(ticket.submit.prompt_ids)
        if wanted > self.free:
            return Shortage("pages", wanted - self.free)
        self.free -= wanted
        return {"lanes": 1, "pages": wanted}

    def _give_back(self, turn: str) -> None:
        self.free += next(ticket.holding["pages"] for ticket in self.scheduler.running if ticket.turn == turn)


# ------------------------------------------------------------------------------------------------ order


def test_turns_of_one_class_go_in_the_order_of_arrival_and_background_ones_after_all_interactive_ones():
    books = Books(lanes=4)
    books.arrive("b1", priority="background")
    for turn in ("i1", "i2", "i3"):
        books.arrive(turn)
    books.arrive("b2", priority="background")
    assert books.admit() == ["i1", "i2", "i3", "b1"]
    books.arrive("i4")
    books.end("i1")
    assert books.admit() == ["i4"]


def test_a_swarm_of_one_tenant_delays_another_tenants_turn_by_one_lane_and_not_by_the_swarm():
    books = Books(lanes=2)
    for index in range(50):
        books.arrive(f"swarm{index}", tenant="a")
    assert books.admit() == ["swarm0", "swarm1"]
    books.arrive("b0", tenant="b")
    books.end("swarm0")
    assert books.admit() == ["b0"]


def test_tenants_that_all_want_lanes_get_them_in_turn():
    books = Books(lanes=1)
    for tenant in "abc":
        for index in range(3):
            books.arrive(f"{tenant}{index}", tenant=tenant)
    order = []
    for _ in range(9):
        (turn,) = books.admit()
        order.append(turn)
        books.end(turn)
    assert order == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]


def test_a_tenant_that_comes_back_for_each_turn_does_not_pass_those_who_waited_meanwhile():
    """Otherwise one client that sends one turn after another would always be new, and always be first."""
    books = Books(lanes=1)
    books.arrive("b0", tenant="b")
    assert books.admit() == ["b0"]
    books.arrive("a0", tenant="a")
    books.end("b0")
    books.arrive("b1", tenant="b")
    assert books.admit() == ["a0"]


def test_a_tenant_at_its_limit_of_lanes_waits_and_keeps_nobody_else_waiting():
    books = Books(lanes=4, tenant_lanes=2)
    for index in range(4):
        books.arrive(f"a{index}", tenant="a")
    books.arrive("b0", tenant="b")
    assert sorted(books.admit()) == ["a0", "a1", "b0"]
    assert books.admit() == [] and books.victims(now=100.0) == []
    books.end("a1")
    assert books.admit() == ["a2"]


# ------------------------------------------------------------------------------------------------ overtaking


def test_a_large_turn_is_overtaken_a_bounded_number_of_times_and_then_blocks_the_others():
    books = Books(pages=4, lanes=4)
    books.arrive("small")
    assert books.admit() == ["small"]
    books.arrive("large", pages=4)
    running = "small"
    for index in range(OVERTAKES):
        books.arrive(f"s{index}")
        assert books.admit() == [f"s{index}"]
        books.end(running)
        running = f"s{index}"
    books.arrive("late")
    assert books.admit() == []
    books.end(running)
    assert books.admit() == ["large"]


def test_a_turn_that_could_be_overtaken_is_so_for_a_bounded_time_only():
    books = Books(pages=4, lanes=4)
    books.arrive("small")
    books.admit()
    books.arrive("large", pages=4)
    books.arrive("s0")
    assert books.admit(now=0.0) == ["s0"]
    books.arrive("s1")
    books.arrive("b0", priority="background")
    assert books.admit(now=OVERTAKE_SECONDS) == []


def test_a_background_turn_that_blocks_does_not_block_interactive_ones():
    books = Books(pages=4, lanes=4)
    books.arrive("small")
    books.admit()
    books.arrive("large", pages=4, priority="background")
    assert books.admit(now=0.0) == [] and books.admit(now=OVERTAKE_SECONDS) == []
    books.arrive("b1", priority="background")
    books.arrive("i1")
    assert books.admit(now=OVERTAKE_SECONDS) == ["i1"]


def test_one_pass_looks_at_a_few_turns_however_many_wait():
    books = Books(pages=4, lanes=4)
    books.arrive("running")
    books.admit()
    for index in range(100):
        books.arrive(f"large{index}", pages=4)
    books.offered.clear()
    books.admit()
    assert 1 <= len(books.offered) <= 8


# ------------------------------------------------------------------------------------------------ preemption


def test_an_interactive_turn_that_waited_too_long_takes_the_youngest_background_lane():
    books = Books(lanes=3, preempt_seconds=2.0)
    books.arrive("b0", priority="background")
    books.arrive("b1", priority="background")
    books.arrive("i0")
    books.admit()
    books.arrive("i1", now=1.0)
    books.admit(now=2.9)
    assert books.victims(now=2.9) == []
    assert books.victims(now=3.0) == ["b1"]


def test_background_turns_and_turns_that_came_later_take_no_lane_of_their_own_tenant():
    books = Books(lanes=1, preempt_seconds=1.0)
    books.arrive("i0")
    books.admit()
    books.arrive("i1")
    books.arrive("b0", priority="background")
    books.admit(now=50.0)
    assert books.victims(now=50.0) == []


def test_a_tenant_with_one_lane_more_keeps_it_and_one_with_two_more_gives_its_youngest():
    books = Books(lanes=2, preempt_seconds=1.0)
    books.arrive("a0", tenant="a")
    books.arrive("a1", tenant="a")
    books.admit()
    books.arrive("b0", tenant="b")
    assert books.victims(now=5.0) == ["a1"]
    books.preempt("a1", now=5.0)
    assert books.admit(now=5.0) == ["b0"], "what a victim gives up is for the turn that it was taken for"
    assert books.victims(now=50.0) == [], "or two turns would swap for ever"


def test_a_turn_that_was_overtaken_gets_the_room_of_younger_turns_back():
    books = Books(pages=4, lanes=4, preempt_seconds=1.0)
    books.arrive("old")
    books.admit()
    books.arrive("large", pages=3)
    books.arrive("younger")
    books.arrive("youngest")
    books.free = 2
    assert books.admit() == ["younger", "youngest"]
    books.free = 1
    books.admit(now=2.0)
    assert books.victims(now=2.0) == ["youngest", "younger"]


def test_nobody_is_preempted_where_that_would_not_be_enough():
    books = Books(pages=8, lanes=4, preempt_seconds=1.0)
    books.arrive("i0", pages=6)
    books.arrive("b0", pages=1, priority="background")
    books.admit()
    books.arrive("i1", pages=4)
    books.admit(now=5.0)
    assert books.victims(now=5.0) == []


def test_a_preempted_turn_waits_without_a_deadline_and_before_turns_that_came_later():
    books = Books(lanes=1)
    books.arrive("i0", queue_seconds=1.0)
    books.admit()
    books.arrive("i1")
    books.preempt("i0", now=0.5)
    assert books.scheduler.expired(now=100.0) == []
    assert books.admit(now=100.0) == ["i0"]


# ------------------------------------------------------------------------------------------------ limits


def test_a_full_queue_refuses_with_the_count_and_preempted_turns_do_not_fill_it():
    books = Books(lanes=1, queue_turns=2)
    books.arrive("i0")
    books.admit()
    books.preempt("i0", now=0.0)
    books.arrive("i1")
    books.arrive("i2")
    with pytest.raises(EngineError, match=r"2 turns wait already.*queue_turns") as refused:
        books.arrive("i3")
    assert refused.value.code == errors.OVERLOADED


def test_a_tenants_queued_tokens_are_limited_and_others_are_not_refused_for_it():
    books = Books(lanes=1, tenant_queued_tokens=10)
    books.arrive("running", tenant="a")
    books.admit()
    books.arrive("a0", pages=12, tenant="a")  # alone: it has to run some time
    with pytest.raises(EngineError, match="have 12 tokens; this one's 1 more would exceed its limit of 10") as refused:
        books.arrive("a1", tenant="a")
    assert (refused.value.code, refused.value.param) == (errors.OVERLOADED, "prompt")
    books.arrive("b0", pages=10, tenant="b")


def test_turns_that_come_at_once_are_no_queue_while_there_are_lanes_for_them():
    books = Books(lanes=2, queue_turns=1, tenant_queued_tokens=3, pages=10)
    books.arrive("i0", pages=2)
    books.arrive("i1", pages=3)
    books.arrive("waits", pages=2)
    with pytest.raises(EngineError, match="1 turns wait already"):
        books.arrive("refused")
    assert books.admit() == ["i0", "i1"]
    books.end("i0")
    assert books.admit() == ["waits"]


def test_a_turn_that_did_not_fit_fills_the_queue_though_a_lane_is_free():
    books = Books(lanes=2, queue_turns=1, pages=3)
    books.arrive("large", pages=4)
    assert books.admit() == []
    with pytest.raises(EngineError, match="1 turns wait already"):
        books.arrive("small")


def test_a_turn_whose_grammar_is_compiled_waits_though_lanes_are_free_and_does_not_wait_any_more_once_it_is():
    books = Books(lanes=3, queue_turns=1)
    compiling = books.arrive("compiling")
    compiling.compiling = True
    with pytest.raises(EngineError, match="1 turns wait already"):
        books.arrive("refused")
    assert books.admit() == [] and books.offered == []
    compiling.compiling = False
    books.arrive("together")
    assert books.admit() == ["compiling", "together"]


def test_a_turn_that_does_not_wait_for_a_lane_waits_a_moment_for_its_grammar():
    books = Books(lanes=1)
    quick, slow = (books.arrive(turn, now=1.0, queue_seconds=0.0) for turn in ("quick", "slow"))
    quick.compiling = slow.compiling = True
    assert books.scheduler.expired(1.1) == []
    quick.compiling = False
    assert books.admit(1.5) == ["quick"] and books.scheduler.expired(1.5) == []
    assert books.scheduler.expired(1.0 + COMPILE_SECONDS) == [slow]


def test_a_turn_waits_as_long_as_it_says_or_the_option_says():
    books = Books(queue_seconds=5.0)
    books.arrive("patient", now=1.0, queue_seconds=60.0)
    books.arrive("usual", now=1.0)
    books.arrive("hasty", now=1.0, queue_seconds=0.5)
    assert [ticket.turn for ticket in books.scheduler.expired(now=1.4)] == []
    assert [ticket.turn for ticket in books.scheduler.expired(now=1.5)] == ["hasty"]
    assert [ticket.turn for ticket in books.scheduler.expired(now=6.0)] == ["usual"]
    assert [ticket.turn for ticket in books.scheduler.waiting] == ["patient"]


@pytest.mark.parametrize(
    "option, value",
    [("queue_turns", 0), ("tenant_lanes", 0), ("tenant_queued_tokens", -1), ("queue_seconds", -1.0),
     ("preempt_seconds", float("nan")), ("max_stall_ms", 0.0)],
)  # fmt: skip
def test_a_limit_that_nobody_could_keep_is_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"{option} is {value}, must be"):
        Books(**{option: value})
