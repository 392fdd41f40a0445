"""Prompts of both kinds of turn, against the demo model's own template and tokenizer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployment.engine.commands import Grammar, Sampling, Submit
from deployment.parsing.turn_text import Said, TurnText, think_is_open
from deployment.turns import after_thinking, append, choices, full_history, thinking_budget
from model import DEMO
from model.chat_template import ChatTemplate
from model.tokenizer import Tokenizer

FACT = {"role": "user", "content": "My locker code is 4172."}
NOTED = {"role": "assistant", "content": "Noted."}
QUESTION = {"role": "user", "content": "What is my locker code?"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO / "target")


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate.load(DEMO / "target")


def shown(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    """The text of ids, special tokens included."""
    return "".join(tokenizer.token(i) for i in ids).replace("\u0120", " ").replace("\u010a", "\n")


def test_boundary_lies_before_the_think_opener(template, tokenizer):
    prompt = full_history(template, tokenizer, [FACT])
    assert shown(tokenizer, prompt.ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert shown(tokenizer, prompt.ids[: prompt.stable_boundary]).endswith("4172.<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("enable_thinking", [None, True, False])
def test_a_template_that_keeps_thinking_leaves_the_boundary_before_an_open_block(template, tokenizer, enable_thinking):
    prompt = full_history(template, tokenizer, [FACT], enable_thinking=enable_thinking, preserve_thinking=True)
    assert think_is_open(tokenizer, prompt.opener) is (enable_thinking is True)
    said = [FACT, {**NOTED, **({"reasoning_content": "Hm."} if enable_thinking else {})}, QUESTION]
    second = full_history(template, tokenizer, said, enable_thinking=enable_thinking, preserve_thinking=True)
    assert second.ids[: prompt.stable_boundary] == prompt.ids[: prompt.stable_boundary]


def test_a_final_message_is_gone_on_with_where_it_ends(template, tokenizer):
    def end(**message) -> str:
        begun = {"role": "assistant", "content": "", **message}
        prompt = full_history(template, tokenizer, [FACT, begun], continues=True)
        assert shown(tokenizer, prompt.ids[: prompt.stable_boundary]).endswith("<|im_start|>assistant\n")
        return shown(tokenizer, prompt.opener)

    assert end(content="Noted, ") == "<think>\n\n</think>\n\nNoted, "
    assert end(content=[{"type": "text", "text": "No"}]) == "<think>\n\n</think>\n\nNo"
    assert end(content="No", reasoning_content="Hm.") == "<think>\nHm.\n</think>\n\nNo"
    assert end(reasoning_content="Hm, ") == "<think>\nHm, "
    assert end() == "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("enable_thinking", [None, True, False])
def test_next_turns_prompt_begins_with_the_stable_part_of_this_one(template, tokenizer, enable_thinking):
    first = full_history(template, tokenizer, [FACT], enable_thinking=enable_thinking)
    second = full_history(template, tokenizer, [FACT, NOTED, QUESTION], enable_thinking=enable_thinking)
    assert 0 < first.stable_boundary < len(first.ids)
    assert second.ids[: first.stable_boundary] == first.ids[: first.stable_boundary]


def generated(template, tokenizer, text: str, stop: bool) -> tuple[int, ...]:
    """The ledger after a turn that answered FACT with `text`."""
    end = (tokenizer.id_of("<|im_end|>"),) if stop else ()
    return (*full_history(template, tokenizer, [FACT]).ids, *tokenizer.encode(text), *end)


@pytest.mark.parametrize("stop", [True, False])
def test_append_closes_the_message_once_and_keeps_the_whole_ledger(template, tokenizer, stop):
    ledger = generated(template, tokenizer, "Noted.", stop)
    prompt = append(template, tokenizer, ledger, [QUESTION])
    assert prompt.ids[: len(ledger)] == ledger
    assert shown(tokenizer, prompt.ids).endswith(
        "Noted.<|im_end|>\n<|im_start|>user\nWhat is my locker code?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert prompt.stable_boundary > len(ledger)
    assert shown(tokenizer, prompt.ids[: prompt.stable_boundary]).endswith("<|im_start|>assistant\n")


def test_append_after_end_of_message_and_newline_adds_neither_again(template, tokenizer):
    ledger = (*generated(template, tokenizer, "Noted.", True), *tokenizer.encode("\n"))
    prompt = append(template, tokenizer, ledger, [QUESTION])
    assert shown(tokenizer, prompt.ids[len(ledger) :]).startswith("<|im_start|>user\n")


def test_append_never_takes_a_users_message_for_closing_ids(template, tokenizer):
    again = tokenizer.encode("<|im_end|>\n<|im_start|>user\nWhat is my locker code?<|im_end|>\n")
    ledger = (*generated(template, tokenizer, "Noted.", False), *again)
    prompt = append(template, tokenizer, ledger, [QUESTION])
    assert shown(tokenizer, prompt.ids).count("What is my locker code?") == 2


def test_append_closes_an_open_think_block_first(template, tokenizer):
    opener = full_history(template, tokenizer, [FACT], enable_thinking=True)
    ledger = (*opener.ids, *tokenizer.encode("The user tells"))
    assert think_is_open(tokenizer, ledger[opener.stable_boundary :])
    prompt = append(template, tokenizer, ledger, [QUESTION], think_is_open=True, enable_thinking=True)
    assert shown(tokenizer, prompt.ids[len(ledger) :]).startswith("</think><|im_end|>\n<|im_start|>user\n")


def test_marker_in_a_users_message_is_just_text(template, tokenizer):
    ledger = generated(template, tokenizer, "Noted.", True)
    message = {"role": "user", "content": "dflash-marker-4f1c9a7e0b62 twice dflash-marker-4f1c9a7e0b62"}
    prompt = append(template, tokenizer, ledger, [message])
    assert shown(tokenizer, prompt.ids[len(ledger) :]).count("dflash-marker-4f1c9a7e0b62") == 2


def test_append_of_a_tool_result_uses_the_templates_tool_turn(template, tokenizer):
    ledger = generated(template, tokenizer, "<tool_call>", True)
    prompt = append(template, tokenizer, ledger, [{"role": "tool", "content": "7"}])
    assert "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n" in shown(tokenizer, prompt.ids)


def test_thinking_and_answer_are_told_apart_wherever_the_rounds_cut(template, tokenizer):
    opener = full_history(template, tokenizer, [FACT], enable_thinking=True)
    ids = tokenizer.encode("The user asks.\n</think>\n\nIt is 4172: caf\u00e9.")
    whole = TurnText(tokenizer, opener.ids[opener.stable_boundary :])
    whole.push(ids)
    whole.flush()
    assert whole.message == {
        "role": "assistant", "content": "It is 4172: caf\u00e9.", "reasoning_content": "The user asks.\n",
    }  # fmt: skip
    single = TurnText(tokenizer, opener.ids[opener.stable_boundary :])
    pieces = [*(single.push([i]) for i in ids), single.flush()]
    assert "".join(piece.content for piece in pieces) == whole.content == single.content
    assert "".join(piece.reasoning for piece in pieces) == whole.reasoning == single.reasoning


def test_what_a_stop_string_takes_is_cut_off_the_last_ids_text(template, tokenizer):
    opener = full_history(template, tokenizer, [FACT], enable_thinking=False)
    text = TurnText(tokenizer, opener.ids[opener.stable_boundary :])
    ids = tokenizer.encode("Noted. caf\u00e9")
    assert text.push(ids[:1]).content + text.push(ids[1:], 5).content == "Noted."
    assert text.flush() == Said() and text.message["content"] == "Noted."
    text = TurnText(tokenizer, opener.ids[opener.stable_boundary :])
    first_byte = tokenizer.encode("\u4e02")[:1]
    assert text.push([*ids, *first_byte], 1) == Said("", "Noted. caf\u00e9")  # half a character is one U+FFFD


def test_choices_differ_in_their_draws_and_names_only():
    submit = Submit("t", (1, 2), Sampling(temperature=1.0, seed=5), max_tokens=3)
    first, second, third = choices(submit, 3)
    assert first == replace(submit, followers=("t.1", "t.2")) and choices(submit, 1) == [submit]
    assert second == replace(submit, turn="t.1", sampling=replace(submit.sampling, sub=1), after="t")
    assert (third.turn, third.sampling.sub) == ("t.2", 2)


def test_thinking_budget_knows_whether_the_prompt_leaves_a_block_open(template, tokenizer):
    opened = thinking_budget(tokenizer, full_history(template, tokenizer, [FACT], enable_thinking=True), 5)
    closed = thinking_budget(tokenizer, full_history(template, tokenizer, [FACT], enable_thinking=False), 5)
    assert opened is not None and closed is not None
    assert (opened.opened, closed.opened, opened.tokens) == (True, False, 5)
    assert tokenizer.decode(opened.close) == "\n</think>\n\n" and opened.end in opened.close
    assert thinking_budget(tokenizer, full_history(template, tokenizer, [FACT]), None) is None


def test_without_an_opener_all_text_is_the_answer(template, tokenizer):
    opener = full_history(template, tokenizer, [FACT], enable_thinking=False)
    text = TurnText(tokenizer, opener.ids[opener.stable_boundary :])
    assert text.push(tokenizer.encode("\nNoted.")) == Said("", "\nNoted.")
    assert "reasoning_content" not in text.message


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_a_grammar_begins_where_the_answer_does(template, tokenizer, enable_thinking):
    prompt = full_history(template, tokenizer, [FACT], enable_thinking=enable_thinking)
    grammar = after_thinking(tokenizer, prompt.ids[prompt.stable_boundary :], Grammar("json_object"))
    assert grammar == Grammar("json_object", "", tokenizer.id_of("</think>") if enable_thinking else None)
    assert after_thinking(tokenizer, prompt.ids, None) is None


@pytest.mark.parametrize("enable_thinking", [None, True, False])
def test_conversations_with_one_system_message_share_all_ids_up_to_what_the_user_says(
    template, tokenizer, enable_thinking
):
    system = {"role": "system", "content": "You are a clerk of room 4172. Say nothing else."}
    prompts = [
        full_history(template, tokenizer, [system, *more], enable_thinking=enable_thinking)
        for more in ([FACT], [QUESTION], [FACT, NOTED, QUESTION])
    ]
    boundary = prompts[0].system_boundary
    assert {prompt.system_boundary for prompt in prompts} == {boundary}
    assert len({prompt.ids[:boundary] for prompt in prompts}) == 1
    assert shown(tokenizer, prompts[0].ids[:boundary]).endswith("Say nothing else.<|im_end|>\n<|im_start|>user\n")
    other = full_history(template, tokenizer, [{**system, "content": "You are nobody."}, FACT])
    assert other.ids[:boundary] != prompts[0].ids[:boundary] and other.system_boundary


def test_a_conversation_without_a_system_message_shares_nothing_with_others(template, tokenizer):
    assert full_history(template, tokenizer, [FACT]).system_boundary == 0


def test_a_user_who_says_what_is_shared_moves_no_boundary_beyond_the_system_message(template, tokenizer):
    system = {"role": "system", "content": "Be brief."}
    for content in ("x", "0", "\n\nx", ""):
        prompt = full_history(template, tokenizer, [system, {"role": "user", "content": content}])
        assert shown(tokenizer, prompt.ids[: prompt.system_boundary]).rstrip("\n").endswith("<|im_start|>user")
