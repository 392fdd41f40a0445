"""Lanes that give their place up and come back, deadlines, and prefill beside decoding, through the whole engine."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from deployment.engine import errors
from deployment.engine.commands import Cancel, Drop, Inspect, Preempt, Sampling, Submit
from deployment.engine.engine import Engine
from deployment.engine.events import Event, Failed, Finished, Started, Tokens
from deployment.engine.pacing import PrefillPacer
from state.memory import UNSETTLED
from tests.engine.driving import Driver, alone, prompt, seeded
from tests.engine.hashing import VOCABULARY, Clock, hash_engine, undisturbed

# ------------------------------------------------------------------------------------------------ the demo model


@pytest.mark.parametrize("images", [4, 0], ids=["from its checkpoint", "by replay"])
@pytest.mark.parametrize(
    "sampling", [Sampling(), seeded(5, temperature=1.0, top_k=0, top_p=1.0)], ids=["greedy", "T=1"]
)
@pytest.mark.parametrize("backend", ["dflash", "dflash2"])
def test_a_turn_preempted_again_and_again_yields_the_tokens_and_rounds_of_the_undisturbed_turn(
    backend, sampling, images
):
    expected = alone(prompt(3), 30, sampling, backend)
    driver = Driver(backend, lanes=1, images=images, prefill_chunk=32)
    turn = driver.submit(prompt(3), sampling=sampling, max_tokens=30, ignore_eos=True)
    places = [0, 2, 3, 5, 8]  # published rounds; the first is inside the prompt
    for _ in range(400):
        if not driver.engine.step():
            break
        if places and sum(isinstance(event, Tokens) for event in driver.of(turn)) >= places[0]:
            places.pop(0)
            driver.engine.execute(Preempt(turn))
            assert not driver.engine.memory.sequences
        driver.engine.memory.check_invariants()
    finished = driver.finished(turn)
    assert len(places) < 3, "it ended before it was preempted much"
    assert (finished.token_ids, finished.rounds) == (expected.token_ids, expected.rounds)
    assert driver.streamed(turn) == expected.token_ids
    started = driver.started(turn)
    assert started.reused + started.prefilled == len(prompt(3))


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["none", "dflash", "dflash2"])
def test_the_demo_models_turns_are_those_alone_whatever_arrives_is_cancelled_or_preempted(backend):
    rng = random.Random(11)
    driver = Driver(backend, lanes=3, images=4, prefill_chunk=32)
    asked: dict[str, tuple[int, Sampling]] = {}
    cancelled: set[str] = set()
    for _ in range(3000):
        if len(asked) < 60 and rng.random() < 0.1:
            which, sampling = rng.randrange(12), rng.choice([Sampling(), seeded(5, temperature=1.0)])
            asked[driver.submit(prompt(which), sampling=sampling, max_tokens=30, ignore_eos=True)] = (which, sampling)
        if asked and rng.random() < 0.15:
            driver.engine.execute(Preempt(rng.choice(list(asked))))
        if asked and rng.random() < 0.01:
            cancelled.add(turn := rng.choice(list(asked)))
            driver.engine.execute(Cancel(turn))
        driver.engine.step()
    driver.steps()
    assert len(asked) == 60 and cancelled
    for turn, (which, sampling) in asked.items():
        expected = alone(prompt(which), 30, sampling, backend).token_ids
        got = driver.streamed(turn)
        assert got == expected[: len(got)] and (turn in cancelled or len(got) == 30)
    assert not driver.engine.memory.sequences


@pytest.mark.parametrize("images", [6, 0], ids=["from its checkpoint", "by replay"])
def test_an_interactive_turn_takes_the_lane_of_a_background_one_and_both_yield_what_they_would_alone(images):
    background = alone(prompt(1), 40, seeded(9), "dflash2")
    interactive = alone(prompt(2), 12, seeded(10), "dflash2")
    driver = Driver("dflash2", lanes=1, images=images, preempt_seconds=0.0)
    first = driver.submit(prompt(1), sampling=seeded(9), max_tokens=40, ignore_eos=True, priority="background")
    for _ in range(6):
        driver.engine.step()
    second = driver.submit(prompt(2), sampling=seeded(10), max_tokens=12, ignore_eos=True)
    driver.steps()
    ends = [event.turn for event in driver.events if isinstance(event, Finished)]
    assert ends == [second, first]
    for turn, expected in ((first, background), (second, interactive)):
        got = driver.finished(turn)
        assert (got.token_ids, got.rounds) == (expected.token_ids, expected.rounds)


# ------------------------------------------------------------------------------------------------ a hash as the model


class Hashed:
    """An engine whose model is a hash, its clock and its events."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.events: list[Event] = []
        self.engine: Engine = hash_engine(self.clock, self.events, **options)

    def submit(self, turn: str, length: int = 20, **fields: Any) -> Submit:
        submit = Submit(turn, tuple(place % VOCABULARY for place in range(length)), **fields)
        self.engine.execute(submit)
        return submit

    def steps(self, count: int | None = None) -> None:
        for _ in range(5000 if count is None else count):
            if not self.engine.step():
                return
            self.engine.memory.check_invariants()
        assert count is not None, "the engine does not come to an end"

    def of(self, turn: str) -> list[Event]:
        return [event for event in self.events if getattr(event, "turn", getattr(event, "ref", None)) == turn]


def test_a_turn_that_waits_too_long_for_its_first_lane_fails_with_queue_timeout_and_costs_nobody_anything():
    world = Hashed(lanes=1, queue_seconds=5.0)
    running = world.submit("running", max_tokens=100)
    world.steps(3)
    world.submit("late")
    world.clock.now = 5.0
    world.steps()
    (failed,) = world.of("late")
    assert isinstance(failed, Failed) and failed.code == errors.QUEUE_TIMEOUT and "5.0 s" in failed.message
    finished = world.of("running")[-1]
    assert isinstance(finished, Finished) and finished.token_ids == undisturbed(running, 256)[0]


def test_a_turn_that_may_not_wait_at_all_runs_if_there_is_a_lane():
    world = Hashed(lanes=1)
    for turn in "ab":
        world.submit(turn, max_tokens=5, queue_seconds=0.0)
    world.steps()
    assert isinstance(world.of("a")[-1], Finished)
    (failed,) = world.of("b")
    assert isinstance(failed, Failed) and failed.code == errors.QUEUE_TIMEOUT


def test_a_turn_that_no_queue_has_room_for_is_overloaded_and_the_turns_before_it_run():
    world = Hashed(lanes=1, queue_turns=2)
    for turn in "abcd":
        world.submit(turn, max_tokens=2)
    world.steps()
    (failed,) = world.of("d")
    assert isinstance(failed, Failed) and failed.code == errors.OVERLOADED and "queue_turns" in failed.message
    assert all(isinstance(world.of(turn)[-1], Finished) for turn in "abc")


@pytest.mark.parametrize(
    "fields, param", [({"priority": "urgent"}, "priority"), ({"queue_seconds": -1.0}, "queue_seconds")]
)
def test_a_class_that_does_not_exist_and_a_negative_time_are_refused_by_name(fields, param):
    world = Hashed()
    world.submit("a", **fields)
    (failed,) = world.of("a")
    assert isinstance(failed, Failed) and (failed.code, failed.param) == (errors.INVALID_REQUEST, param)


def test_cancelling_a_preempted_turn_keeps_for_its_session_what_was_committed():
    world = Hashed(lanes=1, images=3)
    submit = world.submit("a", session="s", max_tokens=100)
    world.steps(5)
    world.submit("other", max_tokens=100)
    world.engine.execute(Preempt("a"))
    world.engine._take = lambda ticket: None  # nobody gets a lane, and everybody who asks for one has ended
    world.engine.execute(Cancel("a"))
    world.steps()
    finished = world.of("a")[-1]
    assert isinstance(finished, Finished) and finished.finish_reason == "cancelled"
    assert finished.token_ids and finished.token_ids == undisturbed(submit, 256)[0][: len(finished.token_ids)]
    (kept,) = world.engine.memory.checkpoints
    assert kept.frontier == finished.frontier == 20 + len(finished.token_ids) - 1
    assert kept.ledger == submit.prompt_ids + finished.token_ids


def test_cancelling_a_preempted_turn_without_a_session_gives_all_its_memory_back():
    world = Hashed(lanes=1, images=3)
    world.submit("a", max_tokens=100)
    world.steps(5)
    world.engine.execute(Preempt("a"))
    assert len(world.engine.memory.checkpoints) == 1
    world.engine.execute(Cancel("a"))
    world.steps()
    assert isinstance(world.of("a")[-1], Finished) and not world.engine.memory.checkpoints


def test_a_session_that_was_dropped_while_its_turn_was_preempted_gets_nothing_from_it():
    world = Hashed(lanes=1, images=3)
    submit = world.submit("a", session="s", max_tokens=40)
    world.steps(3)
    world.engine.execute(Preempt("a"))
    world.engine.execute(Drop("d", "s"))
    world.steps()
    finished = world.of("a")[-1]
    assert isinstance(finished, Finished) and finished.token_ids == undisturbed(submit, 256)[0]
    assert not world.engine.memory.checkpoints


def test_a_turn_whose_draft_context_was_torn_when_it_was_preempted_is_replayed():
    world = Hashed(lanes=1, images=3)
    submit = world.submit("a", max_tokens=60)
    world.steps(4)

    def torn(lanes):
        lanes[0].memory.context_frontier = UNSETTLED
        raise RuntimeError("device lost")

    executor = world.engine._executor
    catch_up, executor.catch_up = executor.catch_up, torn
    world.engine.execute(Preempt("a"))
    executor.catch_up = catch_up
    assert not world.engine.memory.checkpoints
    world.steps()
    finished = world.of("a")[-1]
    assert isinstance(finished, Finished) and finished.token_ids == undisturbed(submit, 256)[0]


def test_preempting_a_turn_that_waits_or_is_unknown_changes_nothing():
    world = Hashed(lanes=1)
    world.submit("a", max_tokens=5)
    world.engine.execute(Preempt("a"))
    world.engine.execute(Preempt("nobody"))
    world.engine.execute(Inspect("i"))
    world.steps()
    assert isinstance(world.of("a")[-1], Finished)


def test_what_a_preempted_turn_keeps_makes_room_for_a_turn_that_needs_it_and_it_is_replayed():
    world = Hashed(lanes=2, images=4, pages=4, preempt_seconds=0.0)
    background = world.submit("b", length=100, max_tokens=100, priority="background")
    world.steps(8)
    interactive = world.submit("i", length=150, max_tokens=100)  # all four pages
    world.steps()
    for submit in (background, interactive):
        finished = world.of(submit.turn)[-1]
        assert isinstance(finished, Finished) and finished.token_ids == undisturbed(submit, 256)[0]
        assert sum(isinstance(event, Started) for event in world.of(submit.turn)) == 1


# ------------------------------------------------------------------------------------------------ pacing


class Device(Hashed):
    """Prefill takes 10 ms and 0.1 ms a token; what ran is in `log` as ("prefill", turn, tokens) and ("round",)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log: list[tuple[Any, ...]] = []
        executor = self.engine._executor
        prefill, run = executor.prefill, executor.run

        def timed(lane, end):
            tokens = end - lane.frontier
            self.clock.now += 0.010 + 0.0001 * tokens
            self.log.append(("prefill", lane.submit.turn, tokens))
            prefill(lane, end)

        def logged(lanes, meanwhile):
            self.log.append(("round",))
            return run(lanes, meanwhile)

        executor.prefill, executor.run = timed, logged  # pyright: ignore

    def slices(self, turn: str) -> list[int]:
        return [entry[2] for entry in self.log if entry[:2] == ("prefill", turn)]


def test_slices_beside_decoding_lanes_come_to_last_about_max_stall_and_never_longer():
    device = Device(context=8192, lanes=2, prefill_chunk=2048, max_stall_ms=60.0)
    device.submit("decodes", length=1, max_tokens=3000)
    device.steps(1)
    device.submit("long", length=6000, max_tokens=1)
    device.steps(40)
    assert any(isinstance(event, Started) for event in device.of("long"))
    slices = device.slices("long")
    assert max(0.010 + 0.0001 * tokens for tokens in slices) <= 0.060
    assert 448 <= slices[len(slices) // 2] <= 500
    assert sum(slices) == 6000 and all(tokens % 64 == 0 for tokens in slices[:-1])


def test_between_two_slices_every_decoding_lane_has_a_round():
    device = Device(context=4096, lanes=3, prefill_chunk=512)
    device.submit("decodes", length=1, max_tokens=1000)
    device.steps(1)
    for turn in "ab":
        device.submit(turn, length=1500, max_tokens=1)
    device.steps(30)
    kinds = [entry[0] for entry in device.log]
    assert kinds.count("prefill") > 8
    assert all(pair != ("prefill", "prefill") for pair in itertools.pairwise(kinds))


def test_with_nobody_decoding_a_prompt_goes_in_whole_chunks():
    device = Device(context=8192, lanes=2, prefill_chunk=2048)
    device.submit("a", length=5000, max_tokens=1)
    device.steps()
    assert device.slices("a") == [2048, 2048, 904]


def test_a_short_prompt_does_not_wait_for_a_long_one_and_a_stream_of_them_does_not_stop_it():
    device = Device(context=8192, lanes=2, prefill_chunk=64)
    device.submit("long", length=640, max_tokens=1)
    device.steps(1)
    for index in range(60):
        device.submit(f"short{index}", length=50, max_tokens=1)
    device.steps()
    order = [entry[1] for entry in device.log if entry[0] == "prefill"]
    assert order[1] == "short0"
    last = max(index for index, turn in enumerate(order) if turn == "long")
    assert last < 50, "the long prompt came last"
    assert set(order[last + 1 :]) and order.count("long") == 10


def test_a_prompts_interactive_turn_is_prefilled_before_a_background_one_however_short():
    device = Device(context=4096, lanes=2, prefill_chunk=64)
    device.submit("background", length=30, max_tokens=1, priority="background")
    device.submit("interactive", length=128, max_tokens=1)
    device.steps()
    assert [entry[1] for entry in device.log] == ["interactive", "interactive", "background"]


def test_a_slow_slice_shrinks_the_next_ones_and_they_recover():
    pacer = PrefillPacer(2048, 60.0)
    world = Hashed(context=8192)
    world.submit("a", length=8000)
    world.engine._admit(0.0)
    (lane,) = world.engine._lanes
    pacer.measured(512, 0.05)
    usual = pacer.slice_end(lane, decoding=True)
    pacer.measured(512, 5.0)
    assert pacer.slice_end(lane, decoding=True) < usual
    for _ in range(5):
        pacer.measured(512, 0.05)
    assert pacer.slice_end(lane, decoding=True) >= usual - 64


def test_a_prompt_that_is_shorter_than_a_slice_does_not_shrink_the_next_ones_unless_it_takes_too_long_itself():
    """Every slice reads all weights: 10 ms of its 12 do not depend on how many tokens it has."""
    pacer = PrefillPacer(2048, 60.0)
    world = Hashed(context=8192)
    world.submit("a", length=8000)
    world.engine._admit(0.0)
    (lane,) = world.engine._lanes
    pacer.measured(512, 0.06)
    for _ in range(5):
        pacer.measured(20, 0.012)
    assert pacer.slice_end(lane, decoding=True) == 512
    pacer.measured(20, 0.061)
    assert pacer.slice_end(lane, decoding=True) < 512
