"""Tools as grammars: what is generated is text or calls as the chat template writes them, and every call validates."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
import torch

from deployment.engine import errors
from deployment.engine.commands import Grammar, Sampling
from deployment.engine.grammar import Grammars, TurnMatcher
from deployment.engine.grammar_compiler import GrammarCompiler
from deployment.engine.tool_grammar import tools_grammar
from deployment.turns import Prompt, thinking_budget
from kernels.acceptance import accept
from kernels.penalties import adjust_logits
from model.tokenizer import Tokenizer
from tests.engine.driving import Driver, models, prompt, seeded
from tests.engine.test_grammar import forbidden_by, ids_of, text_of
from tests.kernels import oracles
from tests.kernels.masks import masks_of
from tests.kernels.test_acceptance_law import COLUMNS, TEMPERATURE, TOP_K, controls, drafts, target_logits

TOOL_CALL, THINK_END = 8185, 8190


def function(name: str, properties: dict[str, Any], required: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required), **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


WEATHER = function(
    "get_weather",
    {"city": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"}, "unit": {"enum": ["celsius", "kelvin"]}},
    ["city"],
)
PLAN = function(
    "plan",
    {
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        "note": {"anyOf": [{"type": "string", "maxLength": 12}, {"type": "null"}]},
        "exact": {"type": "boolean"},
    },
    ["days", "exact"],
)
TOOLS = [WEATHER, PLAN]
T1 = [seeded(seed, temperature=1.0, top_k=0, top_p=1.0) for seed in range(3)]


# ------------------------------------------------------------------------------------------------ a parser of its own


def parsed(text: str) -> list[tuple[str, dict[str, str]]]:
    """The calls of a text that is nothing but calls, values as they are written; ValueError for anything else."""
    place = 0

    def take(literal: str) -> bool:
        nonlocal place
        found = text.startswith(literal, place)
        place += len(literal) * found
        return found

    def until(literal: str) -> str:
        nonlocal place
        end = text.index(literal, place)
        part, place = text[place:end], end + len(literal)
        return part

    calls: list[tuple[str, dict[str, str]]] = []
    while not calls or take("\n"):
        if not take("<tool_call>\n<function="):
            raise ValueError(text[place:])
        name, arguments = until(">\n"), dict[str, str]()
        while take("<parameter="):
            key = until(">\n")
            assert key not in arguments
            arguments[key] = until("\n</parameter>\n")
        if not take("</function>\n</tool_call>"):
            raise ValueError(text[place:])
        calls.append((name, arguments))
    if place != len(text):
        raise ValueError(text[place:])
    return calls


def is_valid(name: str, arguments: dict[str, str]) -> bool:
    if name == "get_weather":
        known = set(arguments) <= {"city", "unit"} and arguments.get("unit", "kelvin") in ("celsius", "kelvin")
        return known and re.fullmatch("[A-Z][a-z]{2,8}", arguments["city"]) is not None
    days = json.loads(arguments["days"])
    return (
        name == "plan"
        and set(arguments) <= {"days", "note", "exact"}
        and len(days) <= 3
        and all(type(day) is int and 0 <= day <= 9 for day in days)
        and len(arguments.get("note", "")) <= 12
        and arguments["exact"] in ("true", "false")
    )


# ------------------------------------------------------------------------------------------------ what a grammar takes


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(models("none").tokenizer, 8192, (8180, 8178))


def takes(grammar: Grammar, text: str) -> bool:
    """Whether a text can be written, and can end there."""
    matcher = compiler().prototype(grammar).matcher.deep_copy()
    return all(matcher.try_consume_tokens([token]) for token in ids_of(text)) and matcher.is_accepting()


def rendered(content: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """An assistant's message as the demo's chat template writes it, after the think block."""
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }
    text = models("none").chat_template.render([{"role": "user", "content": "?"}, message], add_generation_prompt=False)
    return text.partition("</think>\n\n")[2].removesuffix("<|im_end|>\n")


def called(value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"


PARIS = ("get_weather", {"city": "Paris"})
TRIP = ("plan", {"days": [1, 2], "note": "by train", "exact": True})


def test_what_the_chat_template_writes_is_what_the_grammar_takes():
    auto, required = tools_grammar(TOOLS), tools_grammar(TOOLS, "required")
    for calls in ([PARIS], [TRIP], [PARIS, TRIP, PARIS]):
        assert takes(auto, rendered("", *calls)) and takes(required, rendered("", *calls))
        assert takes(auto, rendered("I look\nit up.", *calls)) and not takes(required, rendered("I look", *calls))
    assert takes(auto, "Nothing to call.") and takes(auto, "") and takes(auto, "a < b <tool")
    assert not takes(required, "") and not takes(required, "Nothing to call.")
    assert takes(auto, rendered("", ("plan", {"days": [], "exact": False})))


def test_only_the_shape_of_a_call_may_follow_its_opening_and_nothing_its_end():
    auto, whole = tools_grammar(TOOLS), rendered("", PARIS)
    for wrong in (
        whole + "\n", whole + " done", whole.replace("Paris", "paris"), whole.replace("city", "town"),
        whole.replace("get_weather", "get_whether"), rendered("", ("get_weather", {})), "<tool_call>",
        "<tool_call>\nwhat?",
        rendered("", ("get_weather", {"unit": "kelvin", "city": "Paris"})),
        rendered("", ("get_weather", {"city": "Paris", "unit": "rankine"})),
    ):  # fmt: skip
        assert not takes(auto, wrong), wrong
    spelled = models("none").tokenizer.encode("<tool")
    assert takes(auto, "<tool") and TOOL_CALL not in spelled


def test_one_call_only_and_one_function_only_where_that_was_asked_for():
    single, only = tools_grammar(TOOLS, "required", parallel=False), tools_grammar(TOOLS, named("plan"))
    assert takes(single, rendered("", PARIS)) and not takes(single, rendered("", PARIS, TRIP))
    assert takes(only, rendered("", TRIP)) and not takes(only, rendered("", PARIS))
    assert not takes(only, rendered("", TRIP, TRIP)) and not takes(only, "text")


DEFS = {"$defs": {"Colour": {"enum": ["red", "dark blue"]}, "Point": {"type": "object", "properties": {"x": {}}}}}
VALUES = [
    ({"type": "string"}, ["", "x", "two\nlines", "a </parameter> b", " é "], ["</parameter> b", "a\n</parameter>b"]),
    ({}, ["text", '{"a": 1}'], []),
    ({"type": ["string", "null"]}, ["text", "null"], []),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "\né."], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a/b+$"}, ["a/b", "a/bb"], ["xa/b", "a/bc", "a"]),
    ({"type": "string", "pattern": "b|^c$"}, ["abc", "c"], ["cc", "a"]),
    ({"type": "string", "pattern": r"^[\\/x]\d$", "maxLength": 2}, ["/1", r"\1"], ["y1"]),
    ({"type": "string", "format": "date"}, ["2024-12-31"], ["2024-13-01", "2024-02-30", "today"]),
    ({"type": "string", "format": "date-time"}, ["2024-12-31T23:59:00Z"], ["2024-12-31"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    ({"type": "string", "format": "email"}, ["a.b@c.de"], ["a.b", "a@b@c.de"]),
    ({"type": "string", "format": "uri"}, ["https://a.b/c?d=1"], ["a b"]),
    ({"$ref": "#/$defs/Colour"}, ["red", "dark blue"], ["blue", '"red"']),
    ({"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]}, ["red", "null"], ["none"]),
    ({"allOf": [{"$ref": "#/$defs/Colour"}], "description": "x"}, ["red"], ["blue"]),
    ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]}, ["ab", "-120"], ["abc", "1.5"]),
    ({"anyOf": [{"enum": ["all"]}, {"type": "array", "items": {"type": "integer"}}]}, ["all", "[1, 2]"], ["[1,2]"]),
    ({"enum": ["a", 1, None]}, ["a", "1", "null"], ["2"]),
    ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c"]),
    ({"type": "integer", "minimum": 1, "maximum": 12}, ["3", "12"], ["13", "3.0", '"3"']),
    ({"type": "boolean"}, ["true"], ["True", "1"]),
    ({"type": "array", "items": {"$ref": "#/$defs/Colour"}}, ["[]", '["red", "dark blue"]'], ['["blue"]', "red"]),
    ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, ['{"x": [1, {}]}', "null"], ["x"]),
    ({"properties": {"x": {"type": "integer"}}, "additionalProperties": False}, ['{"x": 1}', "{}"], ['{"y": 1}']),
]  # fmt: skip


@pytest.mark.parametrize("schema, right, wrong", VALUES, ids=[json.dumps(schema)[:50] for schema, _, _ in VALUES])
def test_a_string_stands_as_it_is_and_every_other_value_as_json(schema, right, wrong):
    grammar = tools_grammar([function("f", {"a": schema}, ["a"], **DEFS)], "required")
    assert [takes(grammar, called(value)) for value in right] == [True] * len(right)
    assert [takes(grammar, called(value)) for value in wrong] == [False] * len(wrong)


# ------------------------------------------------------------------------------------------------ what is generated


@pytest.mark.parametrize("backend, draft_tokens", [("none", None), ("dflash", 5), ("dflash2", None)])
def test_every_call_of_many_seeds_side_by_side_parses_back_and_validates(backend, draft_tokens):
    driver = Driver(backend, draft_tokens, lanes=4, images=4)
    required, only = tools_grammar(TOOLS, "required", parallel=False), tools_grammar(TOOLS, named("plan"))
    turns = [
        (grammar, driver.submit(prompt(index), sampling=sampling, grammar=grammar, max_tokens=200))
        for index, sampling in zip((0, 8, 9), T1, strict=True)
        for grammar in (required, only)
    ]
    driver.steps()
    for grammar, turn in turns:
        finished = driver.finished(turn)
        ((name, arguments),) = parsed(text_of(driver, finished.token_ids))
        assert is_valid(name, arguments) and (grammar is required or name == "plan")
        assert finished.finish_reason == "stop" and finished.stop_id in driver.engine.models.defaults.eos_ids


@pytest.mark.parametrize("backend", ["none", "dflash2"])
def test_auto_is_free_text_until_a_call_begins(backend):
    """A bias towards the opening token, so that some of the texts hold calls."""
    driver = Driver(backend, lanes=4, images=4)
    biased = [replace(sampling, logit_bias=((TOOL_CALL, 13.5),)) for sampling in T1]
    turns = [driver.submit(prompt(4), sampling=s, grammar=tools_grammar([WEATHER]), max_tokens=90) for s in biased]
    driver.steps()
    calls, leads = 0, 0
    for turn in turns:
        finished = driver.finished(turn)
        lead, opening, rest = text_of(driver, finished.token_ids).partition("<tool_call>")
        leads += bool(lead)
        if finished.finish_reason == "length":
            continue
        found = parsed(opening + rest) if opening else []
        calls += len(found)
        assert all(is_valid(name, arguments) for name, arguments in found)
    assert calls and leads


@pytest.mark.parametrize("index", [8, 10])
@pytest.mark.parametrize("backend", ["dflash", "dflash2"])
def test_auto_changes_nothing_about_a_call_that_is_right_anyway_or_about_a_plain_answer(backend, index):
    driver = Driver(backend, images=2)
    free = driver.run(prompt(index), max_tokens=60)
    bound = driver.run(prompt(index), max_tokens=60, grammar=tools_grammar(TOOLS))
    assert (bound.token_ids, bound.rounds, bound.stop_id) == (free.token_ids, free.rounds, free.stop_id)
    assert sum(free.rounds) > 5 and free.finish_reason == "stop"


@functools.cache
def without_drafting(sampling: Sampling) -> tuple[int, ...]:
    grammar = tools_grammar(TOOLS, named("plan"))
    return Driver("none", images=2).run(prompt(8), sampling=sampling, grammar=grammar, max_tokens=200).token_ids


@pytest.mark.parametrize(
    "backend, sampling", [("dflash", Sampling()), ("dflash", T1[1]), ("dflash2", Sampling())]
)  # fmt: skip
def test_drafting_changes_no_token_of_a_call(backend, sampling):
    grammar = tools_grammar(TOOLS, named("plan"))
    drafted = Driver(backend, images=2).run(prompt(8), sampling=sampling, grammar=grammar, max_tokens=200)
    assert drafted.token_ids == without_drafting(sampling) and sum(drafted.rounds) > 0


@pytest.mark.parametrize("budget", [0, 4, 200])
@pytest.mark.parametrize("backend", ["none", "dflash2"])
def test_a_call_is_forced_after_thinking_whoever_ends_it(backend, budget):
    tokenizer = models("none").tokenizer
    thinking = thinking_budget(tokenizer, Prompt(prompt(11), 0), budget)
    call = replace(tools_grammar(TOOLS, named("plan")), after=THINK_END)
    schema = Grammar("json_schema", '{"enum": [[1], [2]]}', after=THINK_END)
    driver = Driver(backend, lanes=2, images=2)
    turns = [driver.submit(prompt(11), grammar=g, thinking=thinking, max_tokens=200) for g in (call, schema)]
    driver.steps()
    (thought, answer), (_, document) = (
        text_of(driver, driver.finished(turn).token_ids).split("</think>") for turn in turns
    )
    assert (len(tokenizer.encode(thought)) <= budget + 1) and "<tool_call>" not in thought
    ((name, arguments),) = parsed(answer.removeprefix("\n\n"))
    assert name == "plan" and is_valid(name, arguments)
    assert json.loads(document) in ([1], [2])


# ------------------------------------------------------------------------------------------------ the law


HEADER, X, CLOSING, OPENED, CLOSED, END = 0, 1, 4, 5, 6, 7
"""Ids of a small vocabulary; x, y and z have 1 to 3."""
WORDS = [a + b + c for a in "xyz" for b in ("", *"xyz") for c in ("", *"xyz") if (a, b + c) != ("y", "x") and b >= c]


@functools.cache
def small() -> Grammars:
    """Grammars of a vocabulary in which a call is a few tokens. Its encoder knows them too: the library encodes text
    that can only be one, and forces the first token of it."""
    spelled = ["\n<function=f>\n<parameter=a>\n", "x", "y", "z", "\n</parameter>\n</function>\n"]
    vocabulary = {text.replace("\n", "Ċ"): i for i, text in enumerate(spelled)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], ignore_merges=True))
    splits = [tokenizers.pre_tokenizers.Split(text, "isolated") for text in spelled]
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*splits, bytes_])
    inner.decoder = tokenizers.decoders.ByteLevel()
    source = json.loads(inner.to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    source["added_tokens"] = [
        {"id": i, "content": text, "special": i == END, **flags}
        for i, text in ((OPENED, "<tool_call>"), (CLOSED, "</tool_call>"), (END, "<end>"))
    ]
    return Grammars(Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(source)), "small"), 8, (END,))


class _Lane:
    """What masks need to know of a lane."""

    def __init__(self, matcher: TurnMatcher | None, generated: Sequence[int], ends: Sequence[int]) -> None:
        self.submit = type("S", (), {"sampling": Sampling()})()
        self.matcher = matcher
        self.generated = self.published = list(generated)
        self.stop_ids = frozenset(ends)


@functools.cache
def forbidden(generated: tuple[int, ...], proposed: tuple[int, ...]) -> torch.Tensor:
    """bool [COLUMNS + 1, 8], as the engine has it."""
    grammar = tools_grammar([function("f", {"a": {"enum": WORDS}}, ["a"])], "required", parallel=False)
    lane: Any = _Lane(small().matcher(grammar), generated, (END,))
    masks = small().masks([lane], [proposed], COLUMNS + 1)
    assert masks is not None and not masks.dead
    return forbidden_by(masks, 8)[0]


def allowed_after(generated: Sequence[int]) -> list[int]:
    """Without the code under test."""
    value = "".join("xyz"[token - X] for token in generated if X <= token < CLOSING)
    if CLOSED in generated:
        return [END]
    if CLOSING in generated:
        return [CLOSED]
    going_on = [X + i for i, letter in enumerate("xyz") if any(word.startswith(value + letter) for word in WORDS)]
    return going_on + [CLOSING] * (value in WORDS)


@pytest.mark.parametrize("kind", ["good", "adversarial"])
@pytest.mark.parametrize("fault", [False, True])
def test_three_tokens_inside_a_call_have_exactly_the_masked_targets_law(kind, fault):
    """Through the engine's masks and dflash2's acceptance. Drafts that end before one that no call can hold bend it."""
    logits, sampling, source = target_logits(), controls(), drafts(kind)
    rows = len(sampling.seeds)
    ledgers = [[OPENED, HEADER] for _ in range(rows)]
    while any(unfinished := [len(ledger) < 5 for ledger in ledgers]):
        frontier = torch.tensor([len(ledger) - 2 for ledger in ledgers])
        anchors = torch.tensor([ledger[-1] for ledger in ledgers])
        extents = (torch.arange(rows) + frontier) % (COLUMNS + 1)
        proposal = source.propose(anchors, frontier, sampling)
        proposed = [tuple(row[:p]) for row, p in zip(proposal.drafts.tolist(), extents.tolist(), strict=True)]
        masks = torch.stack([forbidden(tuple(ledger), live) for ledger, live in zip(ledgers, proposed, strict=True)])
        if fault:
            possible = ~masks[:, :-1].gather(-1, proposal.drafts[..., None])[..., 0]
            extents = torch.minimum(extents, possible.int().cumprod(-1).sum(-1))
        inputs = torch.cat((anchors[:, None], proposal.drafts), dim=1)
        masked = adjust_logits(logits[inputs], proposal.drafts, masks=masks_of(masks))
        verdict = accept(masked, proposal, extents, frontier, sampling)
        accepted = verdict.accepted.tolist()
        for row, licensed in enumerate(verdict.licensed.tolist()):
            if unfinished[row]:
                ledgers[row] += licensed[: accepted[row] + 1]
    joint = torch.zeros(8, 8, 8, dtype=torch.float64)

    def spread(ledger: list[int], mass: float) -> None:
        if len(ledger) == 5:
            joint[tuple(ledger[2:])] = mass
            return
        follow = allowed_after(ledger)
        law = oracles.processed(logits[ledger[-1], follow].tolist(), TEMPERATURE, TOP_K, 1.0)
        for token, p in zip(follow, law, strict=True):
            if p > 0:
                spread([*ledger, token], mass * p)

    spread([OPENED, HEADER], 1.0)
    tokens = torch.tensor([ledger[2:5] for ledger in ledgers])
    cells = (tokens[:, 0] * 8 + tokens[:, 1]) * 8 + tokens[:, 2]
    p_value = oracles.chi_square(torch.bincount(cells, minlength=512), joint)
    assert p_value < 1e-6 if fault else p_value > 1e-4


# ------------------------------------------------------------------------------------------------ refusals and ends


def of(schema: Any, **more: Any) -> Grammar:
    return tools_grammar([WEATHER, function("search", {"query": schema}, **more)])


@pytest.mark.parametrize(
    "grammar, words",
    [
        (tools_grammar([]), "at least one function"),
        (tools_grammar([WEATHER, WEATHER]), r"tools\[1\].*'get_weather', which another tool has"),
        (tools_grammar([{"type": "code"}]), r"tools\[0\] must be"),
        (tools_grammar([function("a>b", {})]), r"tools\[0\].function.name is 'a>b'"),
        (tools_grammar([WEATHER], named("plan")), "names the function 'plan', but tools has 'get_weather'"),
        (tools_grammar([WEATHER], "any"), "tool_choice must be none, auto, required, or a function"),
        (Grammar("tools", "[]"), "must be JSON"),
        (tools_grammar([function("search", {"a\n": {}})]), r"'search' has 'a\\n'"),
        (of({}, required=["q"]), "'search': 'q' is required, but properties does not have it"),
        (of({}, minProperties=1), "'search': minProperties is not supported"),
        (of({"type": "integr"}), "'query' of function 'search' at #: Invalid type: integr"),
        (of({"type": "array", "items": {"type": "array", "uniqueItems": True}}), "'search' at #/items: .*uniqueItems"),
        (of({"type": "string", "pattern": "(?=a)"}), "'query' of function 'search': .*look-around"),
        (of({"type": "string", "format": "path"}), "'query' of function 'search': format is 'path', must be one"),
        (of({"type": "string", "format": []}), "'search': format is \\[\\], must be one"),
        (of({"type": "string", "pattern": {}}), "'search': pattern is {}, must be a regular expression"),
        (of({"type": "string", "maxLength": -1}), "'query' of function 'search': maxLength is -1"),
        (of({"type": "string", "not": {"const": "a"}}), "'search': not is not supported"),
        (of({"oneOf": [{"type": "string"}, {"const": "a"}]}), "'search': oneOf has several parts"),
        (of({"$ref": "#/$defs/x"}), r"'search': \$ref is '#/\$defs/x', which leads nowhere"),
        (of({"$ref": "#"}), r"'search': \$ref is '#', must lead to"),
        (of({"enum": ["a\n</parameter>"]}), "'search': the value .* begins with </parameter>"),
        (of({"$ref": "#/$defs/x"}, **{"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * 2}}}), "in a circle"),
        (of(3), "'search': a schema is 3, must be an object"),
    ],
)  # fmt: skip
def test_what_no_grammar_can_be_made_of_is_refused_and_the_tool_is_named(grammar, words):
    driver = Driver("none", images=2)
    failed = driver.failed(driver.submit(prompt(0), grammar=grammar))
    assert (failed.code, failed.param) == (errors.INVALID_REQUEST, "tools")
    assert re.search(words, failed.message), failed.message
    assert "\n" not in failed.message


def test_a_model_without_the_tokens_of_calls_is_refused_them():
    source = json.loads(models("none").tokenizer.serialized)
    source["added_tokens"] = [token for token in source["added_tokens"] if token["content"] != "</tool_call>"]
    other = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(source)), "other")
    with pytest.raises(errors.EngineError, match="no token </tool_call>"):
        GrammarCompiler(other, 8192, (8180,)).prototype(tools_grammar(TOOLS))


def test_a_call_that_a_vocabulary_cannot_spell_is_a_dead_end_and_names_tools():
    grammars = Grammars(models("none").tokenizer, 20, (8180, 8178))
    lane: Any = _Lane(grammars.matcher(tools_grammar(TOOLS, "required")), [], (8180, 8178))
    masks = grammars.masks([lane], [[]], 1)
    assert masks is not None
    column, error = masks.dead[0]
    assert (column, error.code, error.param) == (0, errors.GRAMMAR_DEAD_END, "tools")


def test_drafts_beyond_the_last_call_are_not_fed_and_only_an_end_follows():
    grammars = Grammars(models("none").tokenizer, 8192, (8180, 8178))
    grammar, ids = tools_grammar(TOOLS, "required", parallel=False), ids_of(rendered("", PARIS))
    lane: Any = _Lane(grammars.matcher(grammar), ids[:-1], (8180, 8178))
    for _ in range(2):
        masks = grammars.masks([lane], [[ids[-1], 8180, 290, TOOL_CALL]], 5)
        assert masks is not None and not masks.dead
        assert (~forbidden_by(masks)[0, 1]).nonzero()[:, 0].tolist() == [8178, 8180]
        assert not lane.matcher.inner.is_error()
