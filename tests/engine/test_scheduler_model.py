"""Engine and scheduler against a simple reference: whatever arrives, is cancelled, preempted or short of memory, each
turn's stream is that of the turn alone, and every book balances after every step."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from deployment.engine import errors
from deployment.engine.commands import Cancel, Drop, Fork, Preempt, Sampling, Submit
from deployment.engine.events import Event, Evicted, Failed, Finished, Started, Tokens
from tests.engine.hashing import VOCABULARY, Clock, hash_engine, undisturbed

CONTEXT = 256
TENANT_LANES = 3


class World:
    """An engine, a clock, and what was asked of it. `beside`: the engine takes its device for one that works while the
    host does, as a card."""

    def __init__(self, beside: bool = False, **options) -> None:
        self.clock = Clock()
        self.events: list[Event] = []
        self.engine = hash_engine(
            self.clock,
            self.events,
            CONTEXT,
            beside,
            tenant_lanes=TENANT_LANES,
            tenant_queued_tokens=900,
            queue_turns=12,
            preempt_seconds=1.0,
            prefill_chunk=128,
            **options,
        )
        self.submits: dict[str, Submit] = {}
        self.cancelled: set[str] = set()
        self.steps_done = 0
        self.preemptions = 0

    def submit(self, **fields) -> None:
        submit = Submit(turn=f"t{len(self.submits)}", **fields)
        self.submits[submit.turn] = submit
        self.engine.execute(submit)

    def cancel(self, index: int) -> None:
        if self.submits:
            turn = f"t{index % len(self.submits)}"
            self.cancelled.add(turn)
            self.engine.execute(Cancel(turn))

    def preempt(self, index: int) -> None:
        running = self.engine._scheduler.running
        if running:
            self.preemptions += 1
            self.engine.execute(Preempt(running[index % len(running)].turn))
            self.engine.memory.check_invariants()  # after a step the engine does it
            self.check()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.now += 0.05
            self.engine.step()
            self.steps_done += 1
            self.check()

    def check(self) -> None:
        engine = self.engine
        running = engine._scheduler.running
        assert sorted(t.turn for t in running) == sorted(lane.submit.turn for lane in engine._lanes)
        assert running or not engine._outbox._held, "an event waits for a round that will not come"
        assert len({lane.row for lane in engine._lanes}) == len(running) <= engine._options.lanes
        assert len(engine.memory.sequences) == len(running), "memory is held by nobody's lane"
        for tenant in "abc":
            assert sum(t.tenant == tenant for t in running) <= TENANT_LANES
        assert set(engine._suspended) == {t.turn for t in engine._scheduler.waiting if t.begun}
        assert set(engine._sessions._parked) <= set(engine._suspended), "a checkpoint was parked and forgotten"

    def finish(self) -> None:
        """Runs until nothing waits, and looks at all streams."""
        for _ in range(20_000):
            if self.engine.idle:
                break
            self.step()
        assert self.engine.idle, "the engine does not come to an end"
        by_turn: dict[str | None, list[Event]] = defaultdict(list)
        for event in self.events:
            by_turn[getattr(event, "turn", getattr(event, "ref", None))].append(event)
        for turn, submit in self.submits.items():
            self.check_turn(submit, by_turn[turn])
        assert not self.engine._scheduler._served, "a tenant that has gone is remembered"

    def check_turn(self, submit: Submit, events: list[Event]) -> None:
        last = events[-1]
        assert sum(isinstance(event, Finished | Failed) for event in events) == 1, "a turn has one end"
        if isinstance(last, Failed):
            assert last.code in (errors.OVERLOADED, errors.QUEUE_TIMEOUT) and last.message
            assert len(events) == 1, "a turn that was refused has begun"
            return
        assert isinstance(last, Finished)
        expected, rounds, reason = undisturbed(submit, CONTEXT)
        streamed: list[int] = []
        for event in events:
            if isinstance(event, Tokens):
                assert event.start == len(submit.prompt_ids) + len(streamed), "a gap or a repeat in the stream"
                streamed.extend(event.token_ids)
        assert tuple(streamed) == last.token_ids
        started = [event for event in events if isinstance(event, Started)]
        assert len(started) == bool(streamed or last.rounds or last.finish_reason == "stop")
        assert all(event.reused + event.prefilled == len(submit.prompt_ids) for event in started)
        if last.finish_reason == "cancelled":
            assert submit.turn in self.cancelled
            assert expected[: len(streamed)] == last.token_ids and rounds[: len(last.rounds)] == last.rounds
        else:
            assert (last.token_ids, last.rounds, last.finish_reason) == (expected, rounds, reason)


def prompt(family: int, length: int) -> tuple[int, ...]:
    """Prompts of one family are prefixes of each other, so that sessions find something to go on from."""
    return tuple((family * 7 + place * 3) % VOCABULARY for place in range(length))


@st.composite
def turns(draw) -> dict:
    length = draw(st.integers(1, 180))
    return {
        "prompt_ids": prompt(draw(st.integers(0, 2)), length),
        "sampling": Sampling(seed=draw(st.integers(0, 3))),
        "max_tokens": draw(st.sampled_from([1, 2, 5, 20, 70, None])),
        "stop_ids": draw(st.sampled_from([(), (5,), (5, 17, 40)])),
        "session": draw(st.sampled_from([None, "s0", "s1", "s2"])),
        "stable_boundary": draw(st.integers(0, length)),
        "tenant": draw(st.sampled_from("abc")),
        "priority": draw(st.sampled_from(["interactive", "interactive", "background"])),
        "queue_seconds": draw(st.sampled_from([None, None, 0.0, 2.0])),
    }


class Machine(RuleBasedStateMachine):
    @initialize(beside=st.booleans(), lanes=st.integers(1, 5), images=st.integers(0, 6), pages=st.integers(4, 14))
    def begin(self, beside: bool, lanes: int, images: int, pages: int) -> None:
        self.world = World(beside, lanes=lanes, images=images, pages=pages)

    @rule(arrivals=st.lists(turns(), min_size=1, max_size=4), steps=st.integers(0, 3))
    def arrive(self, arrivals: list[dict], steps: int) -> None:
        for fields in arrivals:
            self.world.submit(**fields)
        self.world.step(steps)

    @rule(index=st.integers(0, 40))
    def cancel(self, index: int) -> None:
        self.world.cancel(index)

    @rule(index=st.integers(0, 4), fields=turns(), steps=st.integers(1, 6))
    def preempt(self, index: int, fields: dict, steps: int) -> None:
        self.world.submit(**fields)
        self.world.step(steps)
        self.world.preempt(index)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        self.world.step(count)

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.now += seconds

    @rule(session=st.sampled_from(["s0", "s1", "s2"]), child=st.sampled_from([None, "s1", "s2"]))
    def leave_or_fork(self, session: str, child: str | None) -> None:
        self.world.engine.execute(Drop("drop", session) if child is None else Fork("fork", session, child))
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


def run_machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def random_days(seed: int, steps: int) -> World:
    """A long life of one small engine under load that changes, with everything that can happen to a turn."""
    rng = random.Random(seed)
    world = World(beside=seed % 2 == 1, lanes=4, images=4, pages=14)
    while world.steps_done < steps:
        for _ in range(rng.choice([0, 0, 1, 3, 6])):
            length = rng.randrange(1, 180)
            world.submit(
                prompt_ids=prompt(rng.randrange(3), length),
                sampling=Sampling(seed=rng.randrange(99)),
                max_tokens=rng.choice([1, 5, 30, 70, None]),
                stop_ids=rng.choice([(), (5,)]),
                session=rng.choice([None, "s0", "s1", "s2"]),
                stable_boundary=rng.randrange(length),
                tenant=rng.choice("aaabc"),
                priority=rng.choice(["interactive", "background"]),
                queue_seconds=rng.choice([None, 5.0]),
            )
        if rng.random() < 0.2:
            world.preempt(rng.randrange(4))
        if rng.random() < 0.1:
            world.cancel(max(0, len(world.submits) - rng.randrange(1, 9)))
        world.step(rng.randrange(1, 12))
    world.finish()
    return world


def test_whatever_arrives_is_cancelled_or_preempted_every_stream_is_that_of_the_turn_alone():
    run_machine(examples=60, steps=30)


def test_ten_thousand_steps_lose_no_page_image_or_lane_and_every_turn_ends_as_it_would_alone():
    world = random_days(seed=1, steps=10_000)
    ends = [event for event in world.events if isinstance(event, Finished)]
    refused = {event.code for event in world.events if isinstance(event, Failed)}
    assert len(ends) > 500 and world.preemptions > 100
    assert refused == {errors.OVERLOADED, errors.QUEUE_TIMEOUT}
    assert {event.finish_reason for event in ends} == {"stop", "length", "cancelled"}
    assert any(isinstance(event, Evicted) for event in world.events)


@pytest.mark.soak
def test_many_more_lives_of_the_machine():
    run_machine(examples=1500, steps=80)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_more_days(seed):
    random_days(seed, steps=50_000)
