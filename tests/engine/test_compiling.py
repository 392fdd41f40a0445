"""Grammars are compiled while others decode; what is refused once is refused at once, and its place is soon found."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deployment.engine import errors
from deployment.engine.commands import Cancel, Grammar, Submit, Suspend
from deployment.engine.engine import LOOK_AGAIN_SECONDS, Engine
from deployment.engine.errors import EngineError
from deployment.engine.events import Event, Failed, Finished, Started, Suspended
from deployment.engine.grammar import Grammars
from deployment.engine.grammar_compiler import _KEPT, _TRIED_CHARACTERS, GrammarCompiler
from deployment.engine.service import EngineService
from tests.engine.driving import Driver, models, options, prompt, seeded

SLOW = Grammar("regex", "(slow)+")
QUICK = Grammar("regex", "(quick)+")
REFUSED: dict[str, Any] = {"type": "string", "contains": {"type": "string"}, "unevaluatedItems": False, "if": {}}


def turn(name: str, grammar: Grammar | None, tenant: str = "") -> Submit:
    return Submit(name, prompt(0), max_tokens=4, grammar=grammar, tenant=tenant)


async def collect(service: EngineService, submit: Submit) -> list[Event]:
    return [event async for event in service.turn(submit)]


def test_a_tenants_grammar_that_takes_long_holds_back_its_own_turns_and_nobody_elses(monkeypatch):
    compile, entered, leave = GrammarCompiler._compile, threading.Event(), threading.Event()

    def slow(self: GrammarCompiler, grammar: Grammar) -> Any:
        if grammar == SLOW:
            entered.set()
            assert leave.wait(60)
        return compile(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    service = EngineService(models("none"), options("none", lanes=3))

    async def scenario() -> tuple[list[Event], ...]:
        held = asyncio.create_task(collect(service, turn("held", SLOW, "a")))
        left = asyncio.create_task(collect(service, turn("left", SLOW, "a")))
        behind = asyncio.create_task(collect(service, turn("behind", QUICK, "a")))
        await asyncio.to_thread(entered.wait, 60)
        others = await collect(service, turn("plain", None, "a")) + await collect(service, turn("other", QUICK, "b"))
        service.send(Cancel("left"))
        gone = await left
        assert not (held.done() or behind.done())
        leave.set()
        return others, await held, gone, await behind

    others, held, left, behind = asyncio.run(scenario())
    service.close()
    assert [event.finish_reason for event in others if isinstance(event, Finished)] == ["length", "length"]
    assert isinstance(held[0], Started) and isinstance(held[-1], Finished) and isinstance(behind[-1], Finished)
    assert isinstance(left[0], Finished) and left[0].finish_reason == "cancelled"


def test_a_grammar_that_was_refused_is_not_compiled_again(monkeypatch):
    compile, tried = GrammarCompiler._compile, []

    def counted(self: GrammarCompiler, grammar: Grammar) -> Any:
        tried.append(grammar)
        return compile(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", counted)
    service = EngineService(models("none"), options("none", lanes=1))
    bad = Grammar("json_schema", json.dumps(REFUSED))

    async def scenario() -> list[list[Event]]:
        answers = [await collect(service, turn(name, bad)) for name in "abc"]
        return [*answers, await collect(service, turn("d", replace(bad, needed=False)))]

    *refused, without = asyncio.run(scenario())
    service.close()
    for (last,) in refused:
        assert isinstance(last, Failed) and last.code == errors.INVALID_REQUEST and last.param == "response_format"
    assert isinstance(without[-1], Finished)
    assert tried == [bad]


def test_the_place_of_a_fault_costs_no_more_than_a_few_compilations_of_the_schema():
    tokenizer = models("none").tokenizer
    compiler = GrammarCompiler(tokenizer, tokenizer.public_rows, (0,))
    compiler.warm("response_format")
    library, characters = compiler._library, []

    def counted(source: str, **more: Any) -> str:
        characters.append(len(source))
        return library.LLMatcher.grammar_from_json_schema(source, **more)

    matcher = SimpleNamespace(grammar_from_json_schema=counted, validate_grammar=library.LLMatcher.validate_grammar)
    compiler._library = SimpleNamespace(LLMatcher=matcher)
    document = {**REFUSED, "description": "x" * 10_000}
    for _ in range(60):
        document = {"type": "object", "properties": {"n": document}}
    source = json.dumps(document)
    reason = library.LLMatcher.validate_grammar(
        library.LLMatcher.grammar_from_json_schema(source), compiler._vocabulary
    )
    place = compiler._place(source, reason)
    assert place.startswith("#/properties/n/properties/n")
    assert sum(characters) <= _TRIED_CHARACTERS + 4 * len(source) < 60 * 10_000


def test_a_source_that_is_too_large_is_refused_by_its_field():
    tokenizer = models("none").tokenizer
    compiler = GrammarCompiler(tokenizer, tokenizer.public_rows, (0,))
    with pytest.raises(
        EngineError, match="response_format: the json_schema has 300000 characters, must be at most 262"
    ):
        compiler.prototype(Grammar("json_schema", " " * 300_000))


def test_a_turn_that_waits_for_a_lane_has_its_grammar_compiled_once_whatever_is_compiled_meanwhile(monkeypatch):
    compile, tried = GrammarCompiler._compile, []

    def counted(self: GrammarCompiler, grammar: Grammar) -> Any:
        tried.append(grammar)
        return compile(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", counted)
    driver = Driver(lanes=1)
    grammars = [Grammar("regex", f"(a{index})+") for index in range(_KEPT + 8)]
    waiting = [driver.submit(prompt(0), max_tokens=2, grammar=grammar) for grammar in grammars]
    driver.steps()
    assert all(driver.finished(turn).token_ids for turn in waiting)
    assert sorted(grammar.source for grammar in tried) == sorted(grammar.source for grammar in grammars)


class Blocked:
    """Compiling waits until `leave` is set. `tried`: the sources that were to be compiled, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compile, self.entered, self.leave = GrammarCompiler._compile, threading.Event(), threading.Event()
        self.tried: list[str] = []

        def slow(compiler: GrammarCompiler, grammar: Grammar) -> Any:
            self.tried.append(grammar.source)
            self.entered.set()
            assert self.leave.wait(60)
            return compile(compiler, grammar)

        monkeypatch.setattr(GrammarCompiler, "_compile", slow)


def waits(index: int) -> Submit:
    return turn(f"t{index}", Grammar("regex", f"(a{index})+"))


def test_turns_whose_grammar_is_compiled_are_under_the_limits_of_every_turn_that_waits(monkeypatch):
    blocked = Blocked(monkeypatch)
    service = EngineService(models("none"), options("none", lanes=4, queue_turns=2))

    async def scenario() -> list[Event]:
        held = asyncio.create_task(collect(service, waits(0)))
        await asyncio.sleep(0)  # it is submitted
        late = await collect(service, replace(waits(1), queue_seconds=0.2))
        suspended = asyncio.create_task(collect(service, waits(2)))
        await asyncio.sleep(0)
        full = await collect(service, waits(3))
        answer = await service.call(Suspend("s", "t2"))
        left = asyncio.create_task(collect(service, waits(4)))
        await asyncio.sleep(0)
        service.send(Cancel("t4"))
        ends = [late[-1], full[-1], answer, (await suspended)[-1], (await left)[-1]]
        assert not held.done()
        blocked.leave.set()
        return [*ends, (await held)[-1]]

    late, full, answer, suspended, left, held = asyncio.run(scenario())
    service.close()
    assert isinstance(late, Failed) and late.code == errors.QUEUE_TIMEOUT and "grammar was not compiled" in late.message
    assert isinstance(full, Failed) and full.code == errors.OVERLOADED
    assert isinstance(answer, Suspended) and isinstance(suspended, Suspended)
    assert isinstance(left, Finished) and left.finish_reason == "cancelled"
    assert isinstance(held, Finished) and held.finish_reason == "length"
    assert blocked.tried == ["(a0)+"], "who left was compiled for all the same"


def test_an_engine_whose_turns_all_wait_for_their_grammar_rests(monkeypatch):
    blocked, steps = Blocked(monkeypatch), []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: steps.append(None) or step(engine))
    service = EngineService(models("none"), options("none", lanes=1))

    async def scenario() -> tuple[int, list[Event]]:
        held = asyncio.create_task(collect(service, replace(waits(0), queue_seconds=60.0)))
        await asyncio.to_thread(blocked.entered.wait, 60)
        await asyncio.sleep(0.2)
        rested = len(steps)
        blocked.leave.set()
        return rested, await held

    rested, events = asyncio.run(scenario())
    service.close()
    assert isinstance(events[-1], Finished) and rested <= 2


def test_an_engine_rests_whose_lanes_all_wait_for_a_lexer_while_another_turn_waits_for_one_of_them(monkeypatch):
    blocked, steps = Blocked(monkeypatch), []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: steps.append(None) or step(engine))
    monkeypatch.setattr("deployment.engine.grammar_compiler._MAX_LEXER_STATES", 50)
    blocked.leave.set()
    service = EngineService(models("none"), options("none", lanes=1))
    full = replace(turn("full", Grammar("regex", "[ab]*a[ab]{20}")), max_tokens=12, sampling=seeded(2))

    async def scenario() -> tuple[int, list[Event]]:
        await collect(service, replace(full, turn="first"))
        blocked.entered.clear()
        blocked.leave.clear()
        held = asyncio.create_task(collect(service, full))
        assert await asyncio.to_thread(blocked.entered.wait, 60), "no lexer was full"
        waits = asyncio.create_task(collect(service, turn("waits", None)))
        await asyncio.sleep(0.1)
        before = len(steps)
        await asyncio.sleep(0.5)
        rested = len(steps) - before
        assert not held.done() and not waits.done()
        blocked.leave.set()
        return rested, [(await held)[-1], (await waits)[-1]]

    rested, ends = asyncio.run(scenario())
    service.close()
    assert rested <= 0.5 / LOOK_AGAIN_SECONDS + 2
    assert all(isinstance(end, Finished) for end in ends), ends


def test_a_turn_that_waits_has_the_matcher_that_was_compiled_for_it_though_the_cache_has_lost_it(monkeypatch):
    monkeypatch.setattr("deployment.engine.grammar_compiler._KEPT", 0)
    blocked, where = Blocked(monkeypatch), []
    blocked.leave.set()
    compile = GrammarCompiler._compile
    monkeypatch.setattr(
        GrammarCompiler, "_compile", lambda *given: where.append(threading.current_thread().name) or compile(*given)
    )
    service = EngineService(models("none"), options("none", lanes=1))

    async def scenario() -> list[list[Event]]:
        return await asyncio.gather(*(collect(service, waits(index)) for index in range(3)))

    events = asyncio.run(scenario())
    service.close()
    assert all(isinstance(some[-1], Finished) for some in events)
    assert len(where) == 3 and all(name.startswith("grammars") for name in where)


def test_a_lexer_that_is_full_is_replaced_while_others_decode_and_the_answers_stay_what_they_were(monkeypatch):
    blocked = Blocked(monkeypatch)
    blocked.leave.set()
    grammar = Grammar("regex", "[ab]*a[ab]{20}")

    async def answers(service: EngineService, meanwhile: bool) -> list[tuple[int, ...]]:
        turns = [replace(turn(f"t{seed}", grammar), max_tokens=12, sampling=seeded(seed)) for seed in (1, 2, 3)]
        first = [(await collect(service, turns[0]))[-1]]
        blocked.entered.clear()
        if meanwhile:
            blocked.leave.clear()
        others = [asyncio.create_task(collect(service, other)) for other in turns[1:]]
        if meanwhile:
            assert await asyncio.to_thread(blocked.entered.wait, 60), "no lexer was full"
            assert isinstance((await collect(service, turn("plain", None)))[-1], Finished)
            assert not all(other.done() for other in others)
            blocked.leave.set()
        ends = [*first, *[(await other)[-1] for other in others]]
        assert all(isinstance(end, Finished) for end in ends), ends
        return [end.token_ids for end in ends if isinstance(end, Finished)]

    service = EngineService(models("none"), options("none", lanes=3))
    expected = asyncio.run(answers(service, False))
    service.close()
    assert len(blocked.tried) == 1
    monkeypatch.setattr("deployment.engine.grammar_compiler._MAX_LEXER_STATES", 50)
    service = EngineService(models("none"), options("none", lanes=3))
    assert asyncio.run(answers(service, True)) == expected
    service.close()


def test_a_lexer_that_replaces_a_full_one_is_its_turns_own_until_it_was_used():
    grammars = Grammars(models("none").tokenizer, 8192, (8180,))
    one, other = (grammars.matcher(QUICK) for _ in range(2))
    assert one is not None and other is not None
    one.follow(())
    other.follow(())
    renewed = one.renewed()
    assert renewed.own is not None and other.renewed().own not in (None, renewed.own)
    shared = renewed.own
    renewed.share()
    again = other.renewed()
    again.follow(())
    assert again.own is None and again._source is shared
