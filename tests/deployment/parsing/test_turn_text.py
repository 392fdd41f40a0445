"""Thinking, answer and calls of one turn: the same message for every way in which rounds cut its ids."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployment.parsing.turn_text import Said, TurnText
from model import DEMO
from model.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(DEMO / "target")
TOOLS = {"get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}, "stop": {}}
WEATHER = "<tool_call>\n<function=get_weather>\n<parameter=city>\nMálaga\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"  # noqa: E501
STOP = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
PIECES = ["One 🎈", "\n", "</think>", "<tool_call>", WEATHER, STOP, STOP[:-3], "<function=stop>", " it "]


def said(text: TurnText, ids: list[int], sizes: list[int]) -> list[Said]:
    parts, begin = [], 0
    for size in sizes:
        parts.append(text.push(ids[begin : begin + size]))
        begin += size
    return [*parts, text.push(ids[begin:]), text.flush()]


def message(parts: list[Said]) -> tuple[str, str, list[Any]]:
    """What a client that reads the parts one after another has in the end, calls at their places in the content."""
    calls, content = [], ""
    for part in parts:
        calls += [(call.id, call.index, call.name, call.arguments, len(content) + call.at) for call in part.calls]
        content += part.content
    return "".join(part.reasoning for part in parts), content, calls


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.booleans(), st.lists(st.integers(1, 16)))
def test_every_split_into_rounds_gives_the_same_message(written: str, thinking: bool, sizes: list[int]):
    opener, ids = TOKENIZER.encode("<think>\n" if thinking else ""), TOKENIZER.encode(written)
    whole = TurnText(TOKENIZER, opener, TOOLS, "t")
    expected = message(said(whole, ids, []))
    for cut in (sizes, [1] * len(ids)):
        text = TurnText(TOKENIZER, opener, TOOLS, "t")
        assert message(said(text, ids, cut)) == expected
        assert (text.message, text.reasoning_tokens) == (whole.message, whole.reasoning_tokens)


def test_a_delta_with_the_end_of_thinking_and_a_call_loses_neither():
    text = TurnText(TOKENIZER, TOKENIZER.encode("<think>\n"), TOOLS, "t")
    part = text.push(TOKENIZER.encode(f"Look it up.\n</think>\n\nSure.\n\n{WEATHER}\n{STOP}"))
    assert (part.reasoning, part.content) == ("Look it up.\n", "Sure.")
    assert [(call.index, call.name, call.at) for call in part.calls] == [(0, "get_weather", 5), (1, "stop", 5)]
    assert json.loads(part.calls[0].arguments) == {"city": "Málaga", "days": 3}
    assert text.flush() == Said() and text.message == {
        "role": "assistant", "content": "Sure.", "reasoning_content": "Look it up.\n",
        "tool_calls": [call.object for call in part.calls],
    }  # fmt: skip


def test_a_model_that_opens_its_thinking_itself_is_understood_at_the_beginning_only():
    ids = TOKENIZER.encode("<think>\nHm.\n</think>\n\nYes <think> no")
    text = TurnText(TOKENIZER, ())
    assert message(said(text, ids, [1, 1])) == ("Hm.\n", "Yes <think> no", [])
    assert text.reasoning_tokens == ids.index(TOKENIZER.encode("</think>")[0]) + 1


def test_without_tools_a_call_is_text():
    assert TurnText(TOKENIZER, ()).push(TOKENIZER.encode(WEATHER)).content == WEATHER


def test_a_function_that_nobody_offered_is_called_all_the_same_and_its_values_are_text():
    text = TurnText(TOKENIZER, (), {"stop": {}}, "t")
    (call,) = text.push(TOKENIZER.encode(WEATHER)).calls
    assert json.loads(call.arguments) == {"city": "Málaga", "days": "3"}
    assert text.message["content"] is None


def test_ids_of_calls_are_the_same_when_a_turn_is_told_again_and_others_in_another_turn():
    def ids(name: str) -> list[str]:
        return [call.id for call in TurnText(TOKENIZER, (), TOOLS, name).push(TOKENIZER.encode(WEATHER + STOP)).calls]

    assert ids("t.0") == ids("t.0") and len({*ids("t.0"), *ids("t.1")}) == 4


@pytest.mark.parametrize("cut", [1, len("</tool_call>")])
def test_a_call_that_a_stop_string_or_the_limit_cuts_is_text(cut: int):
    text = TurnText(TOKENIZER, (), TOOLS, "t")
    parts = [text.push(TOKENIZER.encode(f"So: {STOP}"), cut), text.flush()]
    assert message(parts) == ("", f"So: {STOP}"[:-cut], [])
