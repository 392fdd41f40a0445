"""Turns through the engine: limits, ends, cancellation, batches, memory, and refusals that cost nobody anything."""

from __future__ import annotations

import asyncio

import pytest

from deployment.engine import errors
from deployment.engine.commands import Cancel, Drop, Export, Inspect, Sampling
from deployment.engine.errors import EngineError
from deployment.engine.events import Dropped, Facts, Failed, Finished, Tokens
from deployment.engine.service import EngineService
from tests.engine.driving import Driver, alone, models, options, prompt, seeded

DRAFTERS = [("none", None), ("dflash", None), ("dflash", 3), ("dflash2", None), ("dflash2", 2)]


# ------------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("backend, draft_tokens", DRAFTERS)
def test_a_batch_of_mixed_turns_equals_each_turn_alone(backend, draft_tokens):
    """Greedy and seeded rows, short and long budgets, with and without drafting, joining and leaving at any round."""
    turns = [
        {"sampling": Sampling(), "max_tokens": 20},
        {"sampling": seeded(3), "max_tokens": 7},
        {"sampling": Sampling(), "max_tokens": 1},
        {"sampling": seeded(4), "max_tokens": 15, "drafting": False},
        {"sampling": seeded(5, temperature=1.0, top_k=0, top_p=1.0), "max_tokens": 12},
        {"sampling": Sampling(), "max_tokens": 2},
    ]
    together = Driver(backend, draft_tokens, lanes=3, images=2)
    ids = [together.submit(prompt(i), ignore_eos=True, **turn) for i, turn in enumerate(turns)]
    together.steps()
    single = Driver(backend, draft_tokens, lanes=1, images=2)
    for i, turn in enumerate(turns):
        expected = single.run(prompt(i), ignore_eos=True, **turn)
        got = together.finished(ids[i])
        assert got.token_ids == expected.token_ids == together.streamed(ids[i])
        assert got.rounds == expected.rounds
    assert together.call(Inspect("i")).facts["pages_free"] == together.engine.memory.target.pages


@pytest.mark.parametrize("draft_tokens", [1, 4, 15])
def test_seeded_output_with_dflash_does_not_depend_on_the_drafter_or_its_width(draft_tokens):
    plain = alone(prompt(4), 40, seeded(11))
    drafted = Driver("dflash", draft_tokens, images=2).run(
        prompt(4), sampling=seeded(11), max_tokens=40, ignore_eos=True
    )
    assert drafted.token_ids == plain.token_ids
    assert sum(drafted.rounds) > 0


def test_seeds_and_subs_give_different_draws_and_the_same_ones_again():
    driver = Driver("none", images=2)

    def drawn(**fields):
        return driver.run(prompt(2), sampling=seeded(**fields), max_tokens=10, ignore_eos=True).token_ids

    assert drawn(seed=1) == drawn(seed=1)
    assert len({drawn(seed=1), drawn(seed=2), drawn(seed=1, sub=1), drawn(seed=2**64 - 1)}) == 4


# ------------------------------------------------------------------------------------------------ ends and limits


@pytest.mark.parametrize("backend, draft_tokens", DRAFTERS)
@pytest.mark.parametrize("left", range(1, 6))
def test_prompts_just_below_the_limit_yield_what_is_left_and_finish_by_length(backend, draft_tokens, left):
    context = len(prompt(0)) + left
    driver = Driver(backend, draft_tokens, context=context, lanes=1, images=2)
    finished = driver.run(prompt(0), max_tokens=100, ignore_eos=True)
    assert (len(finished.token_ids), finished.finish_reason) == (left, "length")
    unlimited = alone(prompt(0), 20).token_ids
    assert finished.token_ids == unlimited[:left]


def test_a_prompt_of_the_limit_is_refused_with_both_counts():
    context = len(prompt(0))
    driver = Driver("dflash2", context=context, images=2)
    failed = driver.failed(driver.submit(prompt(0)))
    assert failed.code == errors.CONTEXT_LENGTH_EXCEEDED
    assert str(len(prompt(0))) in failed.message and str(context) in failed.message


@pytest.mark.parametrize("backend", ["none", "dflash", "dflash2"])
def test_an_end_token_inside_an_accepted_run_ends_state_and_stream_at_that_token(backend):
    """The hidden id is committed but not published; what the drafter had beyond it is gone."""
    plain = alone(prompt(8), 100)
    ends = set(models("none").defaults.eos_ids)
    cut = next(i for i, token in enumerate(plain.token_ids) if token in ends)
    driver = Driver(backend, images=4)
    turn = driver.submit(prompt(8), session="s", max_tokens=200)
    driver.steps()
    finished = driver.finished(turn)
    assert finished.finish_reason == "stop" and finished.stop_id == plain.token_ids[cut]
    assert finished.token_ids == driver.streamed(turn) == plain.token_ids[:cut]
    assert finished.frontier == len(prompt(8)) + cut
    (checkpoint,) = driver.engine.memory.checkpoints
    assert checkpoint.ledger == prompt(8) + plain.token_ids[: cut + 1]


def test_a_stop_id_is_one_more_end_token():
    plain = alone(prompt(0), 20)
    stop = plain.token_ids[9]
    cut = plain.token_ids.index(stop)
    finished = Driver("dflash2", images=2).run(prompt(0), max_tokens=20, ignore_eos=True, stop_ids=(stop,))
    assert finished.token_ids == plain.token_ids[:cut] and finished.stop_id == stop


def test_a_stop_as_the_first_token_publishes_nothing_and_still_captures_the_turn():
    first = alone(prompt(0), 20).token_ids[0]
    driver = Driver("dflash", images=4)
    turn = driver.submit(prompt(0), session="s", stop_ids=(first,), ignore_eos=True)
    driver.steps()
    finished = driver.finished(turn)
    assert (finished.token_ids, finished.rounds, finished.stop_id) == ((), (), first)
    assert [c.frontier for c in driver.captured(turn)] == [len(prompt(0))]


def test_acceptance_length_is_published_tokens_after_the_first_by_rounds():
    finished = Driver("dflash2", images=2).run(prompt(10), max_tokens=30, ignore_eos=True)
    assert finished.acceptance_length == 29 / len(finished.rounds) > 1.5


def test_a_drafter_whose_position_limit_ends_first_stops_proposing_instead_of_failing(monkeypatch):
    from dataclasses import replace

    driver = Driver("dflash", images=2)
    drafter = driver.engine.models.drafter
    assert drafter is not None
    limit = len(prompt(10)) + 8
    monkeypatch.setattr(drafter, "config", replace(drafter.config, max_positions=limit))
    finished = driver.run(prompt(10), max_tokens=40, ignore_eos=True)
    plain = alone(prompt(10), 40)
    assert finished.token_ids == plain.token_ids
    assert finished.rounds[-20:] == (0,) * 20 and sum(finished.rounds) > 0


# ------------------------------------------------------------------------------------------------ cancellation


@pytest.mark.parametrize("backend", ["none", "dflash2"])
def test_a_cancelled_turn_keeps_what_was_committed_and_frees_its_lane(backend):
    driver = Driver(backend, lanes=1, images=4)
    turn = driver.submit(prompt(0), session="s", max_tokens=60, ignore_eos=True)
    for _ in range(4):
        driver.engine.step()
    driver.engine.execute(Cancel(turn))
    driver.steps()
    finished = driver.finished(turn)
    assert finished.finish_reason == "cancelled" and 0 < len(finished.token_ids) < 60
    ledger = prompt(0) + finished.token_ids
    again = driver.submit(ledger, session="s", max_tokens=60 - len(finished.token_ids), ignore_eos=True)
    driver.steps()
    assert driver.started(again).reused == len(ledger) - 1
    whole = alone(prompt(0), 60)
    assert finished.token_ids + driver.streamed(again) == whole.token_ids


def test_a_queued_turn_and_one_in_its_prefill_can_be_cancelled_and_prefilled_tokens_are_kept():
    driver = Driver("dflash", lanes=1, images=2, prefill_chunk=32)
    running, queued = driver.submit(prompt(0), session="s"), driver.submit(prompt(1))
    driver.engine.step()
    driver.engine.execute(Cancel(queued))
    driver.engine.execute(Cancel(running))
    driver.engine.execute(Cancel("nobody"))
    driver.steps()
    assert driver.finished(queued).finish_reason == driver.finished(running).finish_reason == "cancelled"
    assert driver.streamed(running) == () and not driver.started_events(running)
    again = driver.submit(prompt(0), session="s", max_tokens=4, ignore_eos=True)
    driver.steps()
    assert driver.started(again).reused == 32
    assert driver.streamed(again) == alone(prompt(0), 20).token_ids[:4]


# ------------------------------------------------------------------------------------------------ memory


def test_idle_checkpoints_make_room_for_running_turns_and_nothing_fails():
    """Three sessions' states fit; ten sessions run. The least recently used lose theirs and are prefilled again."""
    driver = Driver("dflash2", lanes=1, images=3, context=256)
    for i in range(10):
        driver.run((290 + i, *prompt(0)), session=f"s{i}", max_tokens=6, ignore_eos=True)
    assert len(driver.engine.memory.checkpoints) == 3
    turn = driver.submit((290, *prompt(0)), session="s0", max_tokens=6, ignore_eos=True)
    driver.steps()
    assert driver.started(turn).hit == "none"
    for i in range(10):
        assert driver.call(Drop("d", f"s{i}")) == Dropped("d", f"s{i}")
    assert driver.call(Inspect("f")).facts["images_free"] == 4


def test_a_turn_larger_than_the_engine_is_refused_and_the_next_one_runs():
    driver = Driver("none", lanes=2, images=2, pages=4)
    large = driver.submit(prompt(0), max_tokens=1000)
    small = driver.submit(prompt(0), max_tokens=8, ignore_eos=True)
    driver.steps()
    assert driver.failed(large).code == errors.OVERLOADED
    assert len(driver.finished(small).token_ids) == 8


def test_turns_that_do_not_fit_together_run_one_after_another():
    driver = Driver("none", lanes=2, images=2, pages=4)
    turns = [driver.submit((290 + i, *prompt(0)), max_tokens=60, ignore_eos=True) for i in range(2)]
    driver.steps()
    assert [len(driver.finished(turn).token_ids) for turn in turns] == [60, 60]


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"sampling": Sampling(temperature=-0.5)}, "temperature"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": Sampling(top_k=-1)}, "top_k"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p"),
        ({"sampling": Sampling(top_p=1.5)}, "top_p"),
        ({"sampling": Sampling(seed=-1)}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stable_boundary": 10_000}, "stable_boundary"),
        ({"stop_ids": (5, -30)}, "stop_token_ids"),
        ({"stop_ids": (8192,)}, "stop_token_ids"),
        ({"stop_ids": tuple(range(8192)), "sampling": Sampling(min_tokens=1)}, "stop_token_ids"),
    ],
)
def test_bad_controls_are_refused_by_name_and_the_engine_goes_on(fields, param):
    driver = Driver("none", images=2)
    failed = driver.failed(driver.submit(prompt(0), **fields))
    assert (failed.code, failed.param) == (errors.INVALID_REQUEST, param)
    assert driver.run(prompt(0), max_tokens=2, ignore_eos=True).finish_reason == "length"


@pytest.mark.parametrize("ids", [(), (1, 2, 8192), (-1,)])
def test_bad_prompts_are_refused(ids):
    driver = Driver("none", images=2)
    assert driver.failed(driver.submit(ids)).param == "prompt"


def test_a_turn_id_in_use_and_an_unknown_session_are_refused():
    driver = Driver("none", images=2)
    driver.submit(prompt(0), turn="one", max_tokens=3)
    driver.submit(prompt(0), turn="one")
    assert driver.failed("one").param == "turn"
    answer = driver.call(Export("e", "nobody"))
    assert isinstance(answer, Failed) and answer.code == errors.UNKNOWN_SESSION


def test_a_fault_inside_a_round_fails_its_turns_publishes_nothing_of_it_and_frees_everything(monkeypatch):
    driver = Driver("dflash2", images=2)
    turn = driver.submit(prompt(0), session="s", max_tokens=50, ignore_eos=True)
    driver.engine.step()
    published = driver.streamed(turn)

    def broken(*_):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(driver.engine._executor, "commit", broken)
        driver.steps()
    failed = driver.failed(turn)
    assert failed.code == errors.INTERNAL_ERROR and "device lost" in failed.message
    assert driver.streamed(turn) == published
    driver.engine.memory.check_invariants()
    assert not driver.engine.memory.sequences
    # what had been committed is there: the turn goes on from it as if nothing had happened
    ledger = prompt(0) + published
    again = driver.submit(ledger, session="s", max_tokens=50 - len(published), ignore_eos=True)
    driver.steps()
    assert driver.started(again).reused == len(ledger) - 1
    whole = alone(prompt(0), 50)
    assert published + driver.streamed(again) == whole.token_ids


# ------------------------------------------------------------------------------------------------ the thread


async def collect(service: EngineService, **fields):
    from deployment.engine.commands import Submit

    return [event async for event in service.turn(Submit(prompt_ids=prompt(0), ignore_eos=True, **fields))]


def test_the_service_streams_turns_side_by_side_and_answers_calls_between_rounds():
    async def scenario():
        service = EngineService(models("dflash2"), options("dflash2", images=2))
        try:
            one, two, facts = await asyncio.gather(
                collect(service, turn="a", max_tokens=20),
                collect(service, turn="b", max_tokens=12),
                service.call(Inspect("i")),
            )
            with pytest.raises(EngineError, match="no state of session"):
                await service.call(Export("e", "nobody"))
        finally:
            service.close()
        return one, two, facts

    one, two, facts = asyncio.run(scenario())
    assert isinstance(facts, Facts)
    assert isinstance(one[-1], Finished) and len(one[-1].token_ids) == 20
    assert isinstance(two[-1], Finished) and two[-1].token_ids == one[-1].token_ids[:12]


def test_leaving_a_turn_early_cancels_it_and_a_closed_service_says_so():
    async def scenario():
        service = EngineService(models("none"), options("none", images=2))
        from deployment.engine.commands import Submit

        turn = service.turn(Submit("a", prompt(0), max_tokens=3000, ignore_eos=True))
        async for event in turn:
            if isinstance(event, Tokens):
                break
        await turn.aclose()
        for _ in range(200):
            facts = await service.call(Inspect("i"))
            assert isinstance(facts, Facts)
            if facts.facts["lanes_running"] == 0:
                break
            await asyncio.sleep(0.01)
        running = facts.facts["lanes_running"]
        waiting = asyncio.create_task(collect(service, turn="b", max_tokens=3000))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(service.close)
        last = (await waiting)[-1]
        with pytest.raises(EngineError, match="the engine has ended"):
            await service.call(Inspect("i"))
        return running, last

    running, last = asyncio.run(scenario())
    assert running == 0
    assert isinstance(last, Failed) and last.code == errors.INTERNAL_ERROR
