"""`dflash-serve generate --batch`: many prompts, one engine, answers in the order of the file."""

from __future__ import annotations

import inspect
import io
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from deployment.batch import NOT_IN_A_BATCH, Line, LineBody, Records, read_lines
from deployment.cli import app
from deployment.engine.commands import Grammar, Sampling, Submit
from deployment.engine.round import Executor
from deployment.generate import generate
from deployment.offline import Asked, Source

DEFAULTS = Asked(Sampling(temperature=0.5, top_k=7), max_tokens=9, seed=3, stop_strings=("x",))


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments], input=stdin)


def written(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def message(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_answers_come_in_the_order_of_the_file_and_are_those_of_each_prompt_alone(tmp_path, monkeypatch):
    rounds: list[int] = []
    execute = Executor.run
    monkeypatch.setattr(
        Executor, "run", lambda self, lanes, *more: (rounds.append(len(lanes)), execute(self, lanes, *more))[1]
    )
    batch = written(
        tmp_path / "in.jsonl",
        {"id": "long", "prompt": "Once upon a time", "max_tokens": 48},
        "",
        {"id": 7, **message("Count from 3 to 7.")},
        {"prompt_ids": [290, 291, 292], "max_tokens": 20, "ignore_eos": True},
    )
    output = tmp_path / "out.jsonl"
    done = run("--batch", batch, "--output", str(output), "--max-tokens", "24")
    assert done.exit_code == 0, done.output
    assert not done.stdout and done.stderr == "[3 lines, 0 errors]\n"
    answers = records(output.read_text())
    assert [(a["id"], a["line"], a["choice"]) for a in answers] == [("long", 1, 0), (7, 3, 0), (None, 4, 0)]
    assert max(rounds) == 3, "the lines do not decode together"
    alone = [
        run("--prompt", "Once upon a time", "--max-tokens", "48", "--json"),
        run("--chat", "Count from 3 to 7.", "--max-tokens", "24", "--json"),
        run("--prompt-ids", "290,291,292", "--max-tokens", "20", "--ignore-eos", "--json"),
    ]
    for answer, one in zip(answers, alone, strict=True):
        same = ("prompt_token_ids", "token_ids", "text", "finish_reason", "rounds")
        assert {name: answer[name] for name in same} == {name: json.loads(one.stdout)[name] for name in same}


def test_a_line_that_the_engine_refuses_is_an_error_with_its_number_and_field_and_the_others_go_on(tmp_path):
    lines = (
        {"id": "a", "prompt": "Once", "max_tokens": 2},
        {"id": "b", "prompt_ids": [9000]},
        {"id": "c", "prompt": "Once", "regex": "[a", "n": 2},
        {"id": "d", "prompt_ids": [5] * 70_000},
        {"id": "e", "prompt": "Once", "max_tokens": 2},
    )
    done = run("--batch", "-", stdin=b"\n".join(json.dumps(line).encode() for line in lines))
    assert done.exit_code == 1 and done.stderr == "[5 lines, 4 errors]\n"
    answers = records(done.stdout)
    assert [(a["id"], a["line"]) for a in answers] == [("a", 1), ("b", 2), ("c", 3), ("c", 3), ("d", 4), ("e", 5)]
    assert answers[0]["token_ids"] == answers[-1]["token_ids"] and len(answers[0]["token_ids"]) == 2
    out_of_vocabulary, grammar, again, too_long = (answer["error"] for answer in answers[1:5])
    assert (out_of_vocabulary["code"], out_of_vocabulary["param"]) == ("invalid_request", "prompt")
    assert "9000" in out_of_vocabulary["message"] and "unclosed character class" in grammar["message"]
    assert grammar == again and too_long["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ({"prompt": "a", "colour": "red"}, "colour: 'red' is not supported"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"type": "function"}]}]},
            "messages[0].tool_calls[0].function: field required",
        ),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "stream": False}, "stream: has no meaning in a batch"),
        ({"prompt": "a", "priority": "background"}, "priority: has no meaning"),
        ({"prompt": "a", "queue_seconds": 1}, "queue_seconds: has no meaning"),
        ({"prompt": "a", "prompt_ids": [1]}, "exactly one of prompt, prompt_ids and messages"),
        ({"id": "x"}, "exactly one of prompt, prompt_ids and messages"),
        ({"prompt_ids": [1, -1]}, "prompt_ids[1]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,"}}]}]},
            "messages[0].content[0].image_url.url: images and videos are not supported in a batch",
        ),
        ({"prompt": 3}, "prompt"),
        ({"id": 1.5, "prompt": "a"}, "id"),
        ({"prompt": "a", "n": 9}, "n"),
        ({"prompt": "a", "regex": "a", "lark": "b"}, "at most one of response_format, regex and lark"),
        ({"prompt": "a", "chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs: needs messages"),
    ],
)
def test_a_malformed_line_is_named_before_anything_runs_or_is_written(line, named, tmp_path, monkeypatch):
    monkeypatch.setattr("deployment.engine.loading.load_models", lambda options: pytest.fail("models were loaded"))
    batch, output = written(tmp_path / "in.jsonl", {"prompt": "a"}, "", line), tmp_path / "out.jsonl"
    output.write_text("what was there")
    done = run("--batch", batch, "--output", str(output))
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"dflash-serve: {batch}, line 3: ") and named in done.stderr
    assert output.read_text() == "what was there"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--batch", "no-such-file"), "--batch is 'no-such-file'"),
        (("--batch", "FILE", "--prompt", "a"), "exactly one of"),
        (("--batch", "FILE", "--output", "FILE"), "must be another file than --batch"),
        (("--batch", "FILE", "--output", "no/such/directory"), "--output is 'no/such/directory'"),
        (("--batch", "EMPTY"), "at least one line"),
        (("--prompt", "a", "--output", "b"), "--output and --progress need --batch"),
        (("--prompt", "a", "--progress"), "--output and --progress need --batch"),
        (("--prompt", "a", "--enable-thinking"), "--enable-thinking needs --chat or --batch"),
        (("--prompt", "a", "--n", "9"), "n is 9"),
        (("--prompt", "a", "--stop-token-ids", "1;2"), "--stop-token-ids is '1;2'"),
        (("--prompt", "a", "--lark", "no-such-file"), "--lark is 'no-such-file'"),
        (("--prompt", "a", "--json-object", "--regex", "a"), "at most one of --json-object"),
    ],
)
def test_options_that_contradict_each_other_are_one_sentence(arguments: tuple[str, ...], named: str, tmp_path: Path):
    files: dict[str, str] = {
        "FILE": written(tmp_path / "in.jsonl", {"prompt": "a"}),
        "EMPTY": written(tmp_path / "empty.jsonl"),
    }
    done = run(*[files.get(argument, argument) for argument in arguments])
    assert done.exit_code == 2 and named in done.stderr and done.stderr.count("\n") == 1
    assert records(Path(files["FILE"]).read_text()) == [{"prompt": "a"}]


def test_a_bar_is_shown_where_it_is_asked_for_and_never_among_the_records(tmp_path):
    batch = written(tmp_path / "in.jsonl", {"prompt": "Once", "max_tokens": 1})
    shown, hidden = run("--batch", batch, "--progress"), run("--batch", batch, "--no-progress")
    assert shown.exit_code == hidden.exit_code == 0
    assert "100%" in shown.stderr and "100%" not in hidden.stderr
    assert [len(records(done.stdout)) for done in (shown, hidden)] == [1, 1]


# ------------------------------------------------------------------------------------------------ lines


def asked_by(tmp_path: Path, **line: Any) -> Asked:
    (read,) = read_lines(written(tmp_path / "in.jsonl", {"prompt": "a", **line}), DEFAULTS)
    assert read.source == Source(prompt="a")
    return read.asked


def test_what_a_line_leaves_out_or_gives_as_null_is_as_the_options_say(tmp_path):
    nothing = {"temperature": None, "max_tokens": None, "seed": None, "stop": None, "top_k": None, "n": None}
    assert asked_by(tmp_path) == asked_by(tmp_path, **nothing) == DEFAULTS


def test_every_field_of_a_line_reaches_the_turn(tmp_path):
    asked = asked_by(
        tmp_path, temperature=1.5, top_k=-1, top_p=0.5, min_p=0.25, repetition_penalty=1.25, presence_penalty=-0.5,
        frequency_penalty=0.75, logit_bias={"5": -3}, min_tokens=2, seed=-1, reproducible=True, logprobs=True,
        top_logprobs=4, max_tokens=5, max_completion_tokens=6, n=2, stop_token_ids=[8, 9], ignore_eos=True,
        drafting=False, stop=["a", "b"], include_stop_str_in_output=True, thinking_budget=11,
        response_format={"type": "json_object"}, logprobs_mode="processed_logprobs",
    )  # fmt: skip
    assert asked == Asked(
        Sampling(
            temperature=1.5, top_p=0.5, min_p=0.25, repetition_penalty=1.25, presence_penalty=-0.5,
            frequency_penalty=0.75, logit_bias=((5, -3),), min_tokens=2, reproducible=True, logprobs=4,
            logprobs_mode="processed_logprobs",
        ),
        max_tokens=6, seed=2**64 - 1, n=2, stop_ids=(8, 9), ignore_eos=True, drafting=False, stop_strings=("a", "b"),
        include_stop_string=True, thinking_budget=11, grammar=Grammar("json_object"),
    )  # fmt: skip
    assert asked_by(tmp_path, regex="a+").grammar == Grammar("regex", "a+")
    assert asked_by(tmp_path, lark="start: /a/").grammar == Grammar("lark", "start: /a/")


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
SAID = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}

EACH: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.5},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 3},
    "seed": {"seed": 5},
    "min_p": {"min_p": 0.25},
    "repetition_penalty": {"repetition_penalty": 1.25},
    "presence_penalty": {"presence_penalty": 1},
    "frequency_penalty": {"frequency_penalty": 1},
    "logit_bias": {"logit_bias": {"5": 1}},
    "min_tokens": {"min_tokens": 2},
    "reproducible": {"reproducible": True},
    "logprobs_mode": {"logprobs": True, "logprobs_mode": "processed_logprobs"},
    "max_tokens": {"max_tokens": 5},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "stop_token_ids": {"stop_token_ids": [5]},
    "stop": {"stop": "a"},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "n": {"n": 2},
    "ignore_eos": {"ignore_eos": True},
    "drafting": {"drafting": False},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "thinking_budget": {"thinking_budget": 5},
    "chat_template_kwargs": {"chat_template_kwargs": {"preserve_thinking": True}},
    "reasoning_effort": {"reasoning_effort": "none"},
    "response_format": {"response_format": {"type": "json_object"}},
    "tools": {"tools": TOOLS},
    "tool_choice": {"tools": TOOLS, "tool_choice": "required"},
    "parallel_tool_calls": {"tools": TOOLS, "parallel_tool_calls": False},
    "continue_final_message": {"continue_final_message": True},
    "add_generation_prompt": {"add_generation_prompt": False},
    "regex": {"regex": "a+"},
    "lark": {"lark": "start: /a/"},
}
"""Something that each field of a line may say."""


def read(tmp_path: Path, **line: Any) -> Line:
    (one,) = read_lines(written(tmp_path / "in.jsonl", line), DEFAULTS)
    return one


def refusal(tmp_path: Path, source: dict[str, Any], name: str) -> str:
    """Nothing where the field is taken."""
    try:
        read(tmp_path, **source, **EACH[name])
    except ValueError as error:
        return str(error)
    return ""


def changes(tmp_path: Path, source: dict[str, Any], name: str) -> bool:
    """Whether the field makes another request."""
    without = {field: value for field, value in EACH[name].items() if field != name}
    return read(tmp_path, **source, **EACH[name]).asked != read(tmp_path, **source, **without).asked


def test_every_field_of_a_line_is_among_those_that_are_tried():
    told = {"id", "prompt", "prompt_ids", "messages"}
    assert EACH.keys() | told | {*NOT_IN_A_BATCH} == {*LineBody.model_fields}


@pytest.mark.parametrize("name", EACH)
def test_no_field_of_a_line_is_accepted_and_ignored(name: str, tmp_path: Path):
    assert name in refusal(tmp_path, SAID, name) or changes(tmp_path, SAID, name)


@pytest.mark.parametrize("name", EACH)
def test_what_only_the_template_shows_is_refused_where_none_renders(name: str, tmp_path: Path):
    prompt = {"prompt": "a"}
    assert "needs messages" in refusal(tmp_path, prompt, name) or changes(tmp_path, prompt, name)


@pytest.mark.parametrize(
    "neutral",
    [{"add_generation_prompt": True}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": []},
     {"continue_final_message": False}, {"parallel_tool_calls": True}, {"chat_template_kwargs": {}}],
)  # fmt: skip
def test_what_asks_for_nothing_of_the_template_may_stand_beside_a_prompt(neutral: dict[str, Any], tmp_path: Path):
    assert asked_by(tmp_path, **neutral) == DEFAULTS


@pytest.mark.parametrize(
    ("options", "enable", "preserve"),
    [
        ({"reasoning_effort": "none"}, False, None),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, True, None),
        ({"chat_template_kwargs": {"reasoning_strength": "none", "preserve_thinking": True}}, False, True),
    ],
)
def test_thinking_is_asked_for_in_a_line_as_in_a_chat(
    options: Any, enable: bool, preserve: bool | None, tmp_path: Path
):
    asked = read(tmp_path, **SAID, **options).asked
    assert (asked.enable_thinking, asked.preserve_thinking) == (enable, preserve)


def test_a_line_has_tools_of_its_own_or_those_of_the_options(tmp_path: Path):
    offered = replace(DEFAULTS, tools=({"x": 1},), grammar=Grammar("tools", "x"))

    def asked(**line: Any) -> Asked:
        (one,) = read_lines(written(tmp_path / "in.jsonl", {**SAID, **line}), offered)
        return one.asked

    assert asked() == offered
    assert asked(tools=[]) == replace(offered, tools=None, grammar=None)
    own = asked(tools=TOOLS, response_format={"type": "text"})
    assert own.tools == tuple(TOOLS) and own.grammar is not None and '"add"' in own.grammar.source
    for wrong in ({"tool_choice": "none"}, {"tools": TOOLS, "regex": "a"}, {"tools": TOOLS, "tool_choice": {
            "type": "function", "function": {"name": "other"}}}):  # fmt: skip
        with pytest.raises(ValueError, match="tool"):
            asked(**wrong)


def test_the_last_message_of_a_line_is_gone_on_with(tmp_path: Path):
    ask = {"role": "user", "content": "Count from 3 to 7."}
    begun = [ask, {"role": "assistant", "content": "3, 4,"}]
    batch = written(
        tmp_path / "in.jsonl", {"messages": [ask]},
        {"messages": begun, "continue_final_message": True, "add_generation_prompt": False},
    )  # fmt: skip
    done = run("--batch", batch, "--max-tokens", "24", "--no-enable-thinking")
    whole, rest = (answer["text"] for answer in records(done.stdout))
    assert whole.strip().startswith("3, 4,") and ("3, 4," + rest).split(",") == whole.split(",")


def test_every_control_of_the_engine_has_an_option():
    """But those that are for many users of one engine, or for sessions; and media, which come over HTTP alone."""
    options = set(inspect.signature(generate).parameters)
    not_here = {"turn", "session", "stable_boundary", "system_boundary", "tenant", "priority"}
    not_here |= {"queue_seconds", "followers", "after", "resumed", "media"}
    named = {
        "stop_ids": "stop_token_ids", "stop_strings": "stop", "include_stop_string": "include_stop_str_in_output",
        "thinking": "thinking_budget", "grammar": "json_schema", "sub": "n", "sampling": "temperature",
    }  # fmt: skip
    controls = {field.name for field in (*fields(Submit), *fields(Sampling))} - not_here
    assert {named.get(control, control) for control in controls} <= options


def test_records_wait_for_those_before_them_and_for_all_choices_of_their_line():
    out = io.StringIO()
    lines = [Line(i, f"id{i}", Source(), Asked(Sampling(), 1, n=n)) for i, n in ((1, 1), (2, 2), (4, 1))]
    kept = Records(out, lines)
    assert kept.add(lines[2], 0, {}) == kept.add(lines[1], 1, {"error": {}}) == 0 and not out.getvalue()
    assert kept.add(lines[0], 0, {}) == 1 and len(records(out.getvalue())) == 1
    assert kept.add(lines[1], 0, {}) == 2 and kept.failed == 1
    assert [(r["line"], r["choice"]) for r in records(out.getvalue())] == [(1, 0), (2, 0), (2, 1), (4, 0)]
