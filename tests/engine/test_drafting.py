"""K by the number of decoding lanes: the table is kept to, and changes no promise that does not depend on K."""

from __future__ import annotations

import re

import pytest

from deployment.engine.commands import Sampling
from deployment.engine.drafting import DraftTokens, read_steps
from deployment.engine.loading import load_models
from deployment.settings import AppArgs
from model.errors import ModelError
from tests.engine.driving import Driver, options, prompt, seeded

TABLE = ((1, 7), (2, 3), (3, 1), (4, 0))
BUDGETS = (50, 30, 20, 12)
"""Of four turns, each of them prefilled in one step: lanes come and go, so that every step of the table is used."""


def test_the_last_step_that_is_reached_counts_and_before_the_first_one_all_are_drafted():
    draft_tokens = DraftTokens(15, ((2, 7), (5, 0), (9, 3)))
    assert [draft_tokens.of(lanes) for lanes in (1, 2, 4, 5, 8, 9, 64)] == [15, 7, 7, 0, 0, 3, 3]
    assert [DraftTokens(7).of(lanes) for lanes in (1, 99)] == [7, 7]


# ------------------------------------------------------------------------------------------------ rounds


def watched(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(decoding lanes, drafts of the block) of each round that follows."""
    seen: list[tuple[int, int]] = []
    executor, drafter = driver.engine._executor, driver.engine.models.drafter
    assert drafter is not None
    run, propose = executor.run, drafter.propose

    def watching_run(lanes, meanwhile):
        seen.append((len(lanes), 0))
        return run(lanes, meanwhile)

    def watching_propose(anchors, frontier, columns, width, *more):
        proposal = propose(anchors, frontier, columns, width, *more)
        assert proposal.drafts.shape[1] == width - 1
        seen[-1] = (len(anchors), width - 1)
        return proposal

    monkeypatch.setattr(executor, "run", watching_run)
    monkeypatch.setattr(drafter, "propose", watching_propose)
    return seen


def four_turns(driver: Driver, sampling: Sampling) -> list[tuple[int, ...]]:
    turns = [
        driver.submit(prompt(i)[-60:], sampling=sampling, max_tokens=budget, ignore_eos=True)
        for i, budget in enumerate(BUDGETS)
    ]
    driver.steps()
    return [driver.finished(turn).token_ids for turn in turns]


@pytest.mark.parametrize(
    "backend, sampling",
    [
        ("dflash", Sampling()),
        ("dflash", seeded()),
        ("dflash2", Sampling()),
        ("dflash2", seeded(reproducible=True)),
    ],
    ids=["dflash-greedy", "dflash-seeded", "dflash2-greedy", "dflash2-reproducible"],
)
def test_tokens_that_do_not_depend_on_k_are_those_without_a_table(backend, sampling, monkeypatch):
    plain = four_turns(Driver(backend, 7), sampling)
    driver = Driver(backend, 7, draft_tokens_by_lanes=TABLE)
    seen = watched(driver, monkeypatch)
    assert four_turns(driver, sampling) == plain
    assert {lanes for lanes, _ in seen} == {1, 2, 3, 4}


def test_every_block_has_the_width_that_the_table_gives_its_round(monkeypatch):
    driver = Driver("dflash2", 7, draft_tokens_by_lanes=TABLE)
    seen = watched(driver, monkeypatch)
    four_turns(driver, seeded())
    # where one token is left to every turn, nothing is drafted whatever the table says
    assert {(lanes, drafts) for lanes, drafts in seen if drafts} == {(1, 7), (2, 3), (3, 1)}
    assert (4, 0) in seen


def test_a_dflash_block_is_cut_to_the_tables_width_and_to_what_its_turns_may_still_publish(monkeypatch):
    driver = Driver("dflash", 7, draft_tokens_by_lanes=TABLE)
    seen = watched(driver, monkeypatch)
    four_turns(driver, Sampling())
    widest = {lanes: max(drafts for n, drafts in seen if n == lanes) for lanes in (1, 2, 3, 4)}
    assert widest == dict(TABLE)


@pytest.mark.parametrize("lanes, draft_tokens", [(1, 3), (2, 3)])
def test_dflash2_rounds_are_those_of_an_engine_fixed_at_the_same_k_while_as_many_lanes_decode(lanes, draft_tokens):
    def last_of(driver: Driver) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A turn that is never without the others that began before it."""
        for i in range(1, lanes):
            driver.submit(prompt(i)[-60:], max_tokens=90, ignore_eos=True)
            driver.engine.step()
        sampling = Sampling(temperature=1.3, seed=3)  # high enough for a block cut from a wider one to show
        turn = driver.submit(prompt(2)[-80:], sampling=sampling, max_tokens=24, ignore_eos=True)
        driver.steps()
        finished = driver.finished(turn)
        return finished.token_ids, finished.rounds

    with_table = last_of(Driver("dflash2", 7, draft_tokens_by_lanes=((lanes, draft_tokens),)))
    assert with_table == last_of(Driver("dflash2", draft_tokens))
    assert with_table != last_of(Driver("dflash2", 7))


# ------------------------------------------------------------------------------------------------ the option


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        (((1, 16),), "16 tokens at 1 lanes"),
        (((2, -1),), "-1 tokens at 2 lanes"),
        (((0, 3),), "0 lanes after 0"),
        (((2, 3), (2, 1)), "2 lanes after 2"),
        (((4, 3), (2, 1)), "2 lanes after 4"),
    ],
)
def test_a_table_that_cannot_be_kept_to_is_refused_by_name(steps, named):
    for build in (lambda: options("dflash2", draft_tokens_by_lanes=steps), lambda: DraftTokens(15, steps)):
        with pytest.raises(ValueError, match=f"draft_tokens_by_lanes .*{re.escape(named)}"):
            build()


def test_more_tokens_than_the_engine_drafts_are_refused_before_weights_are_read():
    with pytest.raises(ModelError, match="draft_tokens_by_lanes drafts 7 tokens at 3 lanes, must be 0 to 5"):
        load_models(options("dflash2", 5, draft_tokens_by_lanes=((3, 7),)), dry=True)


def test_settings_take_a_table_as_text_or_as_a_mapping():
    steps = ((1, 15), (3, 7), (8, 0))
    assert read_steps("1:15,3:7, 8:0") == steps
    for given in ("1:15,3:7,8:0", {1: 15, 3: 7, 8: 0}, {"1": 15, "3": 7, "8": 0}):
        assert AppArgs.of(draft_tokens_by_lanes=given).engine_options().draft_tokens_by_lanes == steps
    assert AppArgs.of(draft_tokens_by_lanes=None).engine_options().draft_tokens_by_lanes == ()


@pytest.mark.parametrize("given", ["", "1", "1:2:3", "a:2", "3:7,1:2", "1:16", {1: "x"}, 15])
def test_settings_refuse_another_table_by_name(given):
    with pytest.raises(ValueError, match="draft_tokens_by_lanes"):
        AppArgs.of(draft_tokens_by_lanes=given)
    with pytest.raises(ValueError, match=r"draft_tokens_by_lanes: .* backend is none"):
        AppArgs.of(backend="none", draft_tokens_by_lanes="1:2")
