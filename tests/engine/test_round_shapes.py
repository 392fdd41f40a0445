"""Rounds of few shapes, with rows of padding and whole blocks, choose what rounds of their own shapes choose.

On a card that is how every round runs (captured: `tests/engine/test_graphs.py`); here the same segments run on a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deployment.engine import segments
from deployment.engine.commands import Sampling, Submit
from deployment.engine.drafting import DraftTokens
from deployment.engine.events import Finished, Tokens
from deployment.engine.round import Executor
from deployment.engine.round_shape import EXACT_ROWS, Shapes, Traits, bucketed
from tests.engine.tiny import DRAFT_TOKENS, PUBLIC, TinyDriver

LANES = 5
STEPS = ((2, 3), (3, 2), (5, 1))
"""K by lanes, so that blocks of several widths are computed."""


def padded(lanes: int) -> int:
    return lanes + 1 + lanes % 2


def executor_of(driver: TinyDriver, steps: Any = ()) -> Executor:
    """The driver's executor, from now on one of few shapes with padding; its places for padding hold NaN."""
    engine = driver.engine
    shapes = Shapes(DraftTokens(engine.models.draft_tokens, steps), padded, few=True)
    executor = engine._executor = Executor(engine.models, engine.memory, LANES, shapes, media_bytes=0)
    images, dead = engine.memory.images, engine.memory.images.dead
    for plane in (images.gdn, images.conv, images.hidden, images.rings.keys, images.rings.values):
        plane[dead] = float("nan")
    executor._buffers.pending.fill_(float("nan"))
    return executor


def ramp() -> list[Submit]:
    """Turns of different lengths, drawn in every way: more than there are lanes, so that they join as others leave."""
    seeded = Sampling(temperature=0.9, seed=3, logprobs_mode="processed_logprobs")
    ways = [
        Sampling(),
        seeded,
        replace(seeded, reproducible=True, min_p=0.05, logprobs=2, logprobs_mode="raw_logprobs"),
        replace(seeded, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=0),
        replace(seeded, top_k=4, top_p=0.9, logit_bias=((1, 1.5), (6, -100.0)), min_tokens=4, logprobs=3),
    ]
    prompts = [tuple((7 * i + 3 * j) % 8 for j in range(5 + 9 * i)) for i in range(9)]
    return [
        Submit(f"turn-{i}", ids, ways[i % len(ways)], max_tokens=14 + 7 * (i % 4), stop_ids=(5,) if i % 3 else ())
        for i, ids in enumerate(prompts)
    ]


def outcomes(driver: TinyDriver, submits: list[Submit]) -> dict[str, Any]:
    """What became of turns that come one after another, a step apart."""
    for submit in submits:
        driver.engine.execute(submit)
        driver.engine.step()
    driver.steps()
    return {submit.turn: outcome(driver, submit.turn) for submit in submits}


def outcome(driver: TinyDriver, turn: str) -> Any:
    last = driver.of(turn)[-1]
    assert isinstance(last, Finished), last
    told = [entry for event in driver.of(turn) if isinstance(event, Tokens) for entry in event.logprobs]
    return last.token_ids, last.rounds, last.finish_reason, told


@pytest.mark.parametrize("backend", ["none", "dflash", "dflash2"])
@pytest.mark.parametrize("steps", [(), STEPS], ids=["one K", "K by lanes"])
def test_lanes_that_join_and_leave_rounds_with_poisoned_padding_are_what_they_are_without(backend, steps):
    if backend == "none" and steps:
        pytest.skip("nothing is drafted")
    options = {"lanes": LANES, "images": 0, "check_invariants": True, "draft_tokens_by_lanes": steps}
    plain = outcomes(TinyDriver(backend, **options), ramp())
    driver = TinyDriver(backend, **options)
    executor = executor_of(driver, steps)
    widths = set()
    run = executor.run

    def watched(lanes, meanwhile):
        done = run(lanes, meanwhile)
        assert done.shape.rows == padded(len(lanes))
        widths.add((len(lanes), done.shape.width))
        return done

    executor.run = watched  # pyright: ignore[reportAttributeAccessIssue]
    found = outcomes(driver, ramp())
    for turn, (tokens, rounds, reason, told) in plain.items():
        assert found[turn][:3] == (tokens, rounds, reason), turn
        for one, other in zip(told, found[turn][3], strict=True):
            assert one.token == other.token and [id for id, _ in one.top] == [id for id, _ in other.top], turn
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert {lanes for lanes, _ in widths} == set(range(1, LANES + 1))
    assert all(width in (1, executor._shapes.draft_tokens.of(lanes) + 1) for lanes, width in widths)
    images, dead = driver.engine.memory.images, driver.engine.memory.images.dead
    assert images.gdn[dead].isnan().all() and not images.gdn[:dead].isnan().any()
    assert images.rings.keys[dead].isnan().all() and not images.rings.keys[:dead].isnan().any()


def test_a_round_that_another_one_has_overwritten_can_not_be_committed():
    driver = TinyDriver("dflash2", lanes=1, images=0)
    driver.submit((1, 2, 3), max_tokens=20, ignore_eos=True)
    driver.engine.step()
    (lane,) = driver.engine._lanes
    executor = driver.engine._executor
    frontier = lane.frontier
    done = executor.run([lane])
    executor.run([lane])
    with pytest.raises(RuntimeError, match="can not be committed any more"):
        executor.commit(done, [1])
    assert lane.frontier == frontier and lane.memory.gdn == frontier


# ------------------------------------------------------------------------------------------------ shapes


def test_up_to_sixteen_lanes_have_a_row_each_and_above_that_buckets_waste_less_than_a_fifth():
    assert [bucketed(lanes) for lanes in range(1, EXACT_ROWS + 1)] == list(range(1, EXACT_ROWS + 1))
    assert sorted({bucketed(lanes) for lanes in range(17, 65)}) == [20, 24, 28, 32, 40, 48, 56, 64]
    for lanes in range(1, 257):
        assert lanes <= bucketed(lanes) and bucketed(bucketed(lanes)) == bucketed(lanes)
        assert bucketed(lanes) - lanes < 0.2 * bucketed(lanes)


def test_few_shapes_are_those_that_are_expected_but_for_rounds_without_drafts():
    shapes = Shapes(DraftTokens(7, ((3, 2), (20, 0))), bucketed, few=True)
    expected = shapes.expected(33)
    seen = {
        shapes.of([extent] + [0] * (lanes - 1), [0] * lanes, whole_block=True)
        for lanes in range(1, 34)
        for extent in range(shapes.draft_tokens.of(lanes) + 1)
    }
    assert {shape for shape in seen if shape.drafts or shape.rows >= 20} <= set(expected)
    assert max(shape.rows for shape in seen) == shapes.most_rows(33) == 40
    assert max(shape.rows * shape.width for shape in seen) == shapes.most_cells(33) == 20 * 3
    assert all(shape.width in (1, 3, 8) for shape in seen)


def test_a_shape_of_its_own_computes_no_column_that_nobody_needs():
    shapes = Shapes(DraftTokens(7))
    assert shapes.of([2, 0, 1], [0, 3, 1], whole_block=False) == replace(shapes.of([2], [3], False), rows=3)
    assert shapes.of([2, 0, 1], [0, 0, 0], whole_block=True).drafts == 7
    assert shapes.of([0], [0], whole_block=True).drafts == 0


def test_among_few_traits_there_is_one_that_covers_what_is_wanted():
    few, own = (Shapes(DraftTokens(3), few=few) for few in (True, False))
    wanted = Traits(greedy=False, min_p=False, reproducible=True, penalised=False, masks=2, told=3, alternatives=1)
    assert own.traits(wanted, 5, 100) == wanted
    assert few.traits(wanted, 5, 100) == replace(wanted, min_p=True, masks=5, told=4, alternatives=20)
    assert few.traits(wanted, 3, 8) == replace(wanted, min_p=True, masks=3, told=3, alternatives=8)


def test_padding_never_writes_where_a_lane_is():
    """One round with a padding row: only the lane's image, pages and pending features change."""
    driver = TinyDriver("dflash2", lanes=2, images=2)
    executor = executor_of(driver)
    driver.submit((1, 2, 3, 4), max_tokens=DRAFT_TOKENS + 4, ignore_eos=True)
    driver.engine.step()
    (lane,) = driver.engine._lanes
    images = driver.engine.memory.images
    others = [slot for slot in range(images.slots) if slot != lane.memory.slot]
    before = [plane[others].clone() for plane in (images.gdn, images.conv, images.hidden)]
    done = executor.run([lane])
    executor.commit(done, [len(done.licensed[0])])
    after = [plane[others] for plane in (images.gdn, images.conv, images.hidden)]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("rows", [1, 2])
def test_verdicts_of_a_few_rows_at_a_time_are_those_of_the_whole_round(rows, monkeypatch):
    """Logits of more columns than fit together are made and judged in slices; log-probabilities too."""
    options: Any = {"lanes": LANES, "images": 0}
    whole = outcomes(TinyDriver("dflash2", **options), ramp())
    width = DRAFT_TOKENS + 1
    monkeypatch.setattr(segments, "LOGIT_BYTES", rows * width * PUBLIC * 4)
    batches = set()
    judge = segments.accept

    def watched(logits, *more):
        batches.add(len(logits))
        return judge(logits, *more)

    monkeypatch.setattr(segments, "accept", watched)
    found = outcomes(TinyDriver("dflash2", **options), ramp())
    assert max(size for size in batches) <= max(rows * width, rows) and rows in batches
    for turn, (*facts, told) in whole.items():
        assert list(found[turn][:3]) == facts, turn
        assert [entry.token for entry in found[turn][3]] == [entry.token for entry in told]
        assert [e.logprob for e in found[turn][3]] == pytest.approx([e.logprob for e in told], abs=1e-6)
