"""Calls in a text: read as they were written, however the text is cut, and never guessed."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deployment.parsing.tool_calls import Part, ToolCallReader, WrittenCall
from model import DEMO
from model.chat_template import ChatTemplate

PIECES = ["<tool_call>", "</tool_call>", "\n", "<function=f>", "</function>", "<parameter=a>", "<parameter=b>",
          "</parameter>", "x", " ", "<", "<function=", "ü", ">"]  # fmt: skip
TEMPLATE = ChatTemplate.load(DEMO / "target")
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def merged(parts: list[Part]) -> list[Part]:
    """Neighbouring texts as one."""
    whole: list[Part] = []
    for part in parts:
        if isinstance(part, str) and whole and isinstance(whole[-1], str):
            whole[-1] += part
        else:
            whole.append(part)
    return whole


def read(text: str, cuts: list[int] | None = None) -> list[Part]:
    reader, parts = ToolCallReader(), []
    ends = [*(cuts or []), len(text)]
    for begin, end in zip([0, *ends], ends, strict=False):
        parts += reader.push(text[begin:end])
    return merged([*parts, *reader.flush()])


@given(TEXTS, st.data())
@example(f"Well.\n\n{CALL}\n{CALL}\n", None)
def test_what_is_told_depends_on_the_characters_so_far_and_not_on_how_they_were_cut(text: str, data):
    whole = read(text, list(range(1, len(text))))
    cuts = [] if data is None else sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    assert read(text, cuts) == whole
    first, single = ToolCallReader(), ToolCallReader()
    end = cuts[0] if cuts else len(text)
    assert merged(first.push(text[:end])) == merged([part for c in text[:end] for part in single.push(c)])


@settings(max_examples=50)
@given(TEXTS)
def test_text_without_a_whole_call_comes_back_as_it_was(text: str):
    parts = read(text)
    if all(isinstance(part, str) for part in parts):
        assert "".join(str(part) for part in parts) == text


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("fgh"), st.dictionaries(st.sampled_from("abc"), st.text())), min_size=1))
def test_calls_as_the_chat_template_writes_them_are_read_again(calls: list[tuple[str, dict[str, str]]]):
    listed = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    asked = {"role": "user", "content": "x"}
    text = TEMPLATE.render([asked, {"role": "assistant", "content": "", "tool_calls": listed}])
    text = text.rpartition("<|im_start|>assistant\n<think>\n\n</think>\n\n")[0].partition("</think>\n\n")[2]
    values = [value for _, arguments in calls for value in arguments.values()]
    if not any(f"\n{value}".find("\n</parameter>") >= 0 for value in values):
        written = [WrittenCall(name, tuple(arguments.items())) for name, arguments in calls]
        assert [part for part in read(text) if not isinstance(part, str)] == written


def test_blanks_around_calls_belong_to_nobody_and_text_after_them_is_text():
    call = WrittenCall("f", (("a", "1"),))
    assert read(f" Well. \n\n{CALL}\n\n{CALL}\n\n ") == [" Well.", call, call]
    assert read(f"{CALL}\n\nDone. \n") == [call, "Done. \n"]
    assert read("Well. \n\n") == ["Well. \n\n"]


@pytest.mark.parametrize("value", ["", "\n", " x ", "a\n</tool_call>\n", CALL[:40], "a</parameter>b", "é\n\n"])
def test_a_value_ends_at_the_line_that_says_so_and_holds_anything_else(value: str):
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert read(text) == [WrittenCall("f", (("a", value),))]


def test_a_value_on_one_line_with_its_tags_ends_at_the_first_of_them():
    text = "<tool_call><function=f><parameter=a>1</parameter><parameter=b></parameter></function></tool_call>"
    assert read(text) == [WrittenCall("f", (("a", "1"), ("b", "")))]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        CALL.removesuffix("l>"),
        CALL.replace("<function=f>", "<function=>"),
        CALL.replace("<function=f>", f"<function={'f' * 129}>"),
        CALL.replace("<function=f>", "function f"),
        CALL.replace("</function>\n", ""),
        CALL.replace("</parameter>", "</parameter> and"),
        CALL.replace("</function>", "<parameter=a>\n2\n</parameter>\n</function>"),
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    ],
)
def test_what_is_no_whole_call_stays_text(text: str):
    assert read(text) == [text]


def test_after_something_that_is_no_call_the_next_one_is_found():
    assert read(f"<tool_call>{CALL}") == ["<tool_call>", WrittenCall("f", (("a", "1"),))]
    assert read(f"<tool_call>\n<function=f>\noops{CALL}")[1:] == [WrittenCall("f", (("a", "1"),))]


@pytest.mark.parametrize("text", ["<tool_call>\n<function=f>\n<parameter=a>\n", "<tool_call>", "\n"])
def test_a_hostile_text_costs_no_more_than_another_one(text: str):
    """Quadratic work would take minutes here."""
    text *= 200_000 // len(text)
    assert "".join(str(part) for part in read(text)) == text
