"""Structured output: what a grammar allows is all that comes, with drafting on and off, and it ends where it should."""

from __future__ import annotations

import functools
import json
import random
import re
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from deployment.engine import errors
from deployment.engine.commands import Cancel, Grammar, Sampling
from deployment.engine.events import Failed
from deployment.engine.grammar import Grammars, Masks
from kernels.masking import unpack
from tests.engine.driving import Driver, models, prompt, seeded

DRAFTERS = [("none", None), ("dflash", 5), ("dflash2", None)]
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "dark blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "good": {"type": "boolean"},
    },
    "required": ["colour", "sizes", "good"],
    "additionalProperties": False,
}
PATTERN = r"(yes|no), [0-9]{2,6}( and [a-f]{3,9}){1,3}\."


def schema(document: Any = SCHEMA) -> Grammar:
    return Grammar("json_schema", json.dumps(document))


def regex(pattern: str = PATTERN) -> Grammar:
    return Grammar("regex", pattern)


def text_of(driver: Driver, ids: tuple[int, ...]) -> str:
    return driver.engine.models.tokenizer.decode(ids)


def ids_of(text: str) -> list[int]:
    return models("none").tokenizer.encode(text)


def fits_schema(document: Any) -> bool:
    return (
        list(document) == ["colour", "sizes", "good"]
        and document["colour"] in ("red", "green", "dark blue")
        and len(document["sizes"]) <= 3
        and all(type(size) is int and 0 <= size <= 99 for size in document["sizes"])
        and type(document["good"]) is bool
    )


WARM = [Sampling(), *(seeded(seed, temperature=1.0, top_k=0, top_p=1.0) for seed in range(3))]


# ------------------------------------------------------------------------------------------------ what comes


@pytest.mark.parametrize("backend, draft_tokens", DRAFTERS)
def test_many_seeds_side_by_side_match_their_schema_and_their_expression(backend, draft_tokens):
    driver = Driver(backend, draft_tokens, lanes=4, images=4)
    turns = [
        (grammar, driver.submit(prompt(index), sampling=sampling, grammar=grammar, max_tokens=300))
        for index, sampling in enumerate(WARM)
        for grammar in (schema(), regex())
    ]
    free = driver.submit(prompt(0), max_tokens=8)
    driver.steps()
    assert driver.finished(free).token_ids == Driver("none", images=2).run(prompt(0), max_tokens=8).token_ids
    for grammar, turn in turns:
        finished = driver.finished(turn)
        text = text_of(driver, finished.token_ids)
        assert finished.finish_reason == "stop" and finished.stop_id in driver.engine.models.defaults.eos_ids
        if grammar.kind == "regex":
            assert re.fullmatch(PATTERN, text), text
        else:
            assert fits_schema(json.loads(text)), text


@pytest.mark.parametrize("backend", ["none", "dflash2"])
def test_a_json_object_is_one_or_its_beginning_where_the_budget_ends(backend):
    driver = Driver(backend, lanes=4, images=4)
    turns = [
        driver.submit(prompt(i), sampling=sampling, grammar=Grammar("json_object"), max_tokens=60)
        for i, sampling in enumerate(WARM)
    ]
    driver.steps()
    ends = []
    for turn in turns:
        finished = driver.finished(turn)
        text = text_of(driver, finished.token_ids)
        ends.append(finished.finish_reason)
        assert text.startswith("{")
        if finished.finish_reason == "stop":
            assert isinstance(json.loads(text), dict)
    assert "stop" in ends


@functools.cache
def without_drafting(sampling: Sampling, grammar: Grammar) -> tuple[tuple[int, ...], int | None]:
    finished = Driver("none", images=2).run(prompt(0), sampling=sampling, grammar=grammar, max_tokens=300)
    return finished.token_ids, finished.stop_id


@pytest.mark.parametrize("grammar", [schema(), regex()], ids=["schema", "regex"])
@pytest.mark.parametrize(
    "backend, draft_tokens, sampling",
    [
        ("dflash", None, Sampling()),
        ("dflash", 4, Sampling()),
        ("dflash", None, seeded(5)),
        ("dflash", 4, seeded(6, temperature=1.0, top_k=0, top_p=1.0)),
        ("dflash2", None, Sampling()),
    ],
)
def test_drafting_changes_no_token_under_a_grammar(backend, draft_tokens, sampling, grammar):
    """For DFlash2 of greedy turns; of the others the law is tested with the operators."""
    drafted = Driver(backend, draft_tokens, images=2).run(prompt(0), sampling=sampling, grammar=grammar, max_tokens=300)
    assert (drafted.token_ids, drafted.stop_id) == without_drafting(sampling, grammar)
    assert sum(drafted.rounds) > 0


def test_drafts_are_accepted_under_a_grammar():
    """A grammar that allows all text leaves acceptance as it is: no draft is lost to the masks."""
    driver = Driver("dflash2", images=2)
    free = driver.run(prompt(10), max_tokens=40)
    bound = driver.run(prompt(10), max_tokens=40, grammar=regex(r"(?s:.*)"))
    assert (bound.token_ids, bound.rounds) == (free.token_ids, free.rounds) and sum(free.rounds) > 10


def test_a_lark_grammar_is_followed():
    source = 'start: line+\nline: NAME "=" INT "\\n"\nNAME: /[a-c]{2}/\nINT: /[0-9]/\n'
    driver = Driver("dflash", images=2)
    finished = driver.run(prompt(0), grammar=Grammar("lark", source), max_tokens=30, sampling=seeded(3))
    text = text_of(driver, finished.token_ids)
    assert text and re.fullmatch(r"([a-c]{2}=[0-9]\n)*([a-c]{0,2}|[a-c]{2}=[0-9]?)", text)


def test_the_grammar_waits_for_its_token_and_the_turn_cannot_end_before():
    driver = Driver("none", images=2)
    words = driver.run(prompt(0), max_tokens=20, ignore_eos=True).token_ids
    after = words[6]
    bound = driver.run(prompt(0), grammar=replace(regex(), after=after), max_tokens=300)
    cut = words.index(after) + 1
    assert bound.token_ids[:cut] == words[:cut]
    assert re.fullmatch(rf"\n{{0,2}}{PATTERN}", text_of(driver, bound.token_ids[cut:]))
    drafted = Driver("dflash2", images=2).run(prompt(0), grammar=replace(regex(), after=after), max_tokens=300)
    assert drafted.token_ids == bound.token_ids
    (one,) = ids_of("1")
    rows = mask_rows(replace(regex("[0-9]{2}"), after=5), [one, one], [one, 5, one, one])
    assert rows[0] == rows[1] == set(range(8192)) - {8178, 8180}
    digits = {token for digit in "0123456789" for token in ids_of(digit)}
    assert rows[2] == digits | {*ids_of("\n"), *ids_of("\n\n")} and rows[3] == digits and rows[4] == {8178, 8180}


def test_a_stop_id_ends_a_turn_where_an_end_token_would_and_nowhere_else():
    driver = Driver("none", images=2)
    stop = 8000
    free = driver.run(prompt(0), grammar=regex("[0-9]{3}"), max_tokens=20, stop_ids=(stop,))
    assert re.fullmatch("[0-9]{3}", text_of(driver, free.token_ids)) and free.finish_reason == "stop"
    (masks,) = mask_rows(regex("[0-9]{3}"), ids_of("123"), stop_ids=(stop,))
    assert masks == {8178, 8180, stop}


def test_a_cancelled_turn_goes_on_in_a_new_one_and_others_keep_their_place():
    driver = Driver("dflash2", lanes=2, images=2)
    cancelled = driver.submit(prompt(0), grammar=schema(), max_tokens=300)
    whole = driver.submit(prompt(1), grammar=regex(), max_tokens=300)
    for _ in range(3):
        driver.engine.step()
    driver.engine.execute(Cancel(cancelled))
    driver.steps()
    assert driver.finished(cancelled).finish_reason == "cancelled"
    assert re.fullmatch(PATTERN, text_of(driver, driver.finished(whole).token_ids))


# ------------------------------------------------------------------------------------------------ where it ends


class _Lane:
    """What masks need to know of a lane."""

    def __init__(self, grammars: Grammars, grammar: Grammar, generated: list[int], **more: Any) -> None:
        self.submit = type("S", (), {"sampling": Sampling(min_tokens=more.pop("min_tokens", 0))})()
        self.matcher = grammars.matcher(grammar)
        self.generated = self.published = generated
        self.stop_ids = frozenset({8178, 8180, *more.pop("stop_ids", ())})


def grammars_of(public_rows: int = 8192) -> Grammars:
    return Grammars(models("none").tokenizer, public_rows, (8180, 8178))


def forbidden_by(masks: Masks, vocabulary: int = 8192) -> torch.Tensor:
    """Bool [G, W, V]."""
    return ~unpack(torch.from_numpy(masks.bits.view(np.uint8)), vocabulary)


def mask_rows(grammar: Grammar, generated: list[int], drafts: list[int] | None = None, **more: Any) -> list[set[int]]:
    """What each column allows."""
    grammars, drafts = grammars_of(), drafts or []
    lane: Any = _Lane(grammars, grammar, generated, **more)
    masks = grammars.masks([lane], [drafts], len(drafts) + 1)
    assert masks is not None and not masks.dead
    return [set(row.nonzero()[:, 0].tolist()) for row in ~forbidden_by(masks)[0]]


def test_each_column_has_the_mask_of_the_drafts_before_it_and_none_after_a_forbidden_one():
    one, a, two = *ids_of("1"), *ids_of("a"), *ids_of("2")
    digits = {token for digit in "0123456789" for token in ids_of(digit)}
    rows = mask_rows(regex("[0-9]{4}"), [one], [two, a, one])
    assert rows[0] == digits and rows[1] == digits
    assert len(rows[2]) == len(rows[3]) == 8192


def test_a_grammar_that_completes_inside_a_block_allows_only_end_tokens_there():
    (one,) = ids_of("1")
    digits = {token for digit in "0123456789" for token in ids_of(digit)}
    rows = mask_rows(regex("[0-9]{3}"), [one], [one, one, one, 8180])
    assert rows[:3] == [digits, digits, {8178, 8180}]
    assert mask_rows(regex("[0-9]{2,3}"), [one, one], [8180, one])[0] == digits | {8178, 8180}


def test_nothing_is_fed_to_a_matcher_beyond_its_end():
    """Drafts that go on after a complete grammar, or after an end token, leave the matcher where it was."""
    grammars = grammars_of()
    (one,) = ids_of("1")
    lane: Any = _Lane(grammars, regex("[0-9]{3}"), [one])
    for drafts in ([one, one, one, one], [one, one, 8180, one], [8180, one, one, one]):
        for _ in range(2):
            masks = grammars.masks([lane], [drafts], 5)
            assert masks is not None and not masks.dead and not lane.matcher.inner.is_error()
            assert int((~forbidden_by(masks)[0, 0]).sum()) == 10
    lane.generated = [one, one, one]
    for _ in range(3):
        masks = grammars.masks([lane], [[one, 8180]], 3)
        assert masks is not None and (~forbidden_by(masks)[0, 0]).nonzero()[:, 0].tolist() == [8178, 8180]


def test_a_matcher_given_another_history_replays_it():
    grammars = grammars_of()
    (one,), (two,) = ids_of("1"), ids_of("2")
    lane: Any = _Lane(grammars, regex("12?|21"), [one])
    for generated, expected in (([one], {two, 8178, 8180}), ([two], {one}), ([], {one, two}), ([two], {one})):
        lane.generated = generated
        masks = grammars.masks([lane], [[]], 1)
        assert masks is not None
        allowed = set((~forbidden_by(masks)[0, 0]).nonzero()[:, 0].tolist())
        assert expected <= allowed and allowed - expected <= set(ids_of("12")) | set(ids_of("21"))


def test_min_tokens_longer_than_the_grammar_is_a_dead_end():
    grammars = grammars_of()
    (one,) = ids_of("1")
    lane: Any = _Lane(grammars, regex("[0-9]{2}"), [one], min_tokens=4)
    masks = grammars.masks([lane], [[one]], 2)
    assert masks is not None and masks.dead[0][0] == 1 and masks.dead[0][1].code == errors.GRAMMAR_DEAD_END


# a lexeme that no text matches, after text that leads there
DEAD = Grammar("lark", 'start: "go" NEVER | "stay"\nNEVER: /x/ & /y/')


@pytest.mark.parametrize("backend", ["none", "dflash", "dflash2"])
@pytest.mark.parametrize("sampling", [Sampling(), seeded(1)])
def test_a_dead_end_ends_its_turn_by_name_and_no_other(backend, sampling):
    driver = Driver(backend, lanes=3, images=4)
    dead = Grammar("lark", 'start: "12345678" NEVER\nNEVER: /x/ & /y/')
    first = Grammar("lark", "start: NEVER\nNEVER: /x/ & /y/")
    turn = driver.submit(prompt(0), session="s", grammar=dead, max_tokens=50, sampling=sampling)
    at_once = driver.submit(prompt(2), grammar=first, max_tokens=50, sampling=sampling)
    other = driver.submit(prompt(1), grammar=regex(), max_tokens=300, sampling=sampling)
    driver.steps()
    failed = driver.failed(turn)
    assert (failed.code, failed.param) == (errors.GRAMMAR_DEAD_END, "response_format")
    assert text_of(driver, driver.streamed(turn)) == "12345678"
    assert f"after {len(driver.streamed(turn))} tokens" in failed.message
    assert driver.failed(at_once).code == errors.GRAMMAR_DEAD_END and driver.streamed(at_once) == ()
    assert re.fullmatch(PATTERN, text_of(driver, driver.finished(other).token_ids))
    # what was committed is whole: the session goes on from it
    again = driver.submit((*prompt(0), *driver.streamed(turn)), session="s", max_tokens=3, ignore_eos=True)
    driver.steps()
    assert driver.started(again).reused == len(prompt(0)) + len(driver.streamed(turn)) - 1


def test_a_dead_end_that_only_a_rejected_draft_reaches_harms_nobody():
    grammars = grammars_of()
    lane: Any = _Lane(grammars, DEAD, [])
    (go,), stay = ids_of("go"), ids_of("stay")
    masks = grammars.masks([lane], [[go, 5]], 3)
    assert masks is not None and masks.dead[0][0] == 1
    assert not bool(forbidden_by(masks)[0, 0, [stay[0], go]].any())
    lane.generated = stay
    masks = grammars.masks([lane], [[5]], 2)
    assert masks is not None and not masks.dead
    assert (~forbidden_by(masks)[0, 0]).nonzero()[:, 0].tolist() == [8178, 8180]


def test_a_vocabulary_without_the_tokens_that_a_grammar_needs_is_a_dead_end():
    grammars = grammars_of(public_rows=20)
    lane: Any = _Lane(grammars, regex("[a-z]+"), [])
    masks = grammars.masks([lane], [[]], 1)
    assert masks is not None and masks.dead[0][0] == 0 and forbidden_by(masks, 20).shape == (1, 1, 20)
    assert not bool(forbidden_by(masks, 20).any())


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "grammar, words",
    [
        (Grammar("json_schema", '{"type": '), "not JSON: Expecting value: line 1 column 10"),
        (Grammar("json_schema", "[1]"), "must be a JSON object"),
        (Grammar("json_schema", '{"type": "integr"}'), "at #: Invalid type: integr"),
        (
            schema({"$defs": {"x": {"type": "nope"}}, "properties": {"a": {"$ref": "#/$defs/x"}}}),
            "at #/.*: Invalid type: nope",
        ),
        (
            schema({"properties": {"a": {"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": True}]}}}),
            "at #/properties/a/anyOf/1: Unimplemented keys: .*uniqueItems",
        ),
        (schema({"$ref": "http://example.com/x.json"}), "example.com/x.json"),
        (regex("[0-9"), "unclosed character class"),
        (regex("(?=x)y"), "look-around"),
        (Grammar("lark", "start: foo\nbar"), r"2\(4\): Expected token"),
        (Grammar("regex", "a" * 300_000), "300000 characters, must be at most 262144"),
        (Grammar("xml", ""), "kind is 'xml', must be one of json_object"),  # pyright: ignore
    ],
)
def test_bad_grammars_are_refused_with_their_place_and_the_engine_goes_on(grammar, words):
    driver = Driver("none", images=2)
    failed = driver.failed(driver.submit(prompt(0), grammar=grammar))
    assert (failed.code, failed.param) == (errors.INVALID_REQUEST, "response_format")
    assert re.search(words, failed.message), failed.message
    assert "\n" not in failed.message
    assert driver.run(prompt(0), max_tokens=2, ignore_eos=True).finish_reason == "length"


def test_ignore_eos_with_a_grammar_is_refused():
    driver = Driver("none", images=2)
    assert driver.failed(driver.submit(prompt(0), grammar=regex(), ignore_eos=True)).param == "ignore_eos"


def test_a_missing_library_is_named_and_other_turns_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    driver = Driver("none", images=2)
    failed = driver.failed(driver.submit(prompt(0), grammar=regex()))
    assert isinstance(failed, Failed) and failed.code == errors.INVALID_REQUEST
    assert "llguidance" in failed.message and "dflash-serve[grammar]" in failed.message
    assert driver.run(prompt(0), max_tokens=2, ignore_eos=True).finish_reason == "length"


def test_penalties_min_tokens_and_logprobs_go_with_a_grammar():
    sampling = seeded(4, presence_penalty=0.5, min_tokens=12, logprobs=2)
    for backend in ("none", "dflash2"):
        driver = Driver(backend, images=2)
        turn = driver.submit(prompt(0), sampling=sampling, grammar=regex(), max_tokens=300)
        driver.steps()
        finished = driver.finished(turn)
        assert re.fullmatch(PATTERN, text_of(driver, finished.token_ids)) and len(finished.token_ids) >= 12
    dead = driver.submit(prompt(0), sampling=replace(sampling, min_tokens=30), grammar=regex("[0-9]{6}"))
    driver.steps()
    assert driver.failed(dead).code == errors.GRAMMAR_DEAD_END and len(driver.streamed(dead)) >= 1


def test_a_grammar_that_grows_beyond_its_limits_ends_its_own_turn_and_says_so(monkeypatch):
    monkeypatch.setattr("deployment.engine.grammar_compiler._MAX_LEXER_STATES", 60)
    driver = Driver("dflash2", lanes=2, images=2)
    large = driver.submit(prompt(0), grammar=regex("(a|b)*a(a|b){200}"), max_tokens=200, sampling=seeded(1))
    small = driver.submit(prompt(1), max_tokens=10, ignore_eos=True)
    driver.steps()
    failed = driver.failed(large)
    assert (failed.code, failed.param) == (errors.INVALID_REQUEST, "response_format")
    assert re.search("after [0-9]+ tokens of the answer: .*too many states", failed.message), failed.message
    assert len(driver.finished(small).token_ids) == 10


def test_a_turn_outlives_a_lexer_that_it_and_others_have_filled(monkeypatch):
    """50 states are enough for the text so far, not for all that was tried on the way or by another turn."""
    monkeypatch.setattr("deployment.engine.grammar_compiler._MAX_LEXER_STATES", 50)
    grammars, draw = grammars_of(), random.Random(1)
    a, b = ids_of("a")[0], ids_of("b")[0]
    lanes: list[Any] = [_Lane(grammars, regex("[ab]*a[ab]{20}"), []) for _ in range(2)]
    prototype = grammars._compiler.prototype(regex("[ab]*a[ab]{20}")).matcher
    for _ in range(12):
        for lane in lanes:
            masks = grammars.masks([lane], [[a, b]], 3)
            while lane.matcher.full:
                lane.matcher = lane.matcher.renewed()
                masks = grammars.masks([lane], [[a, b]], 3)
            assert masks is not None and not masks.dead
            forbidden = forbidden_by(masks)[0]
            assert not bool(forbidden[:, [a, b]].any()) and bool(forbidden[:, ids_of("c")].all())
            lane.generated = [*lane.generated, draw.choice((a, b))]
    assert grammars._compiler.prototype(regex("[ab]*a[ab]{20}")).matcher is not prototype, "the limit was never reached"
