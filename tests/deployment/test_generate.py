"""`dflash-serve generate`: what it prints, and its one sentence for every mistake."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner, Result

from deployment.cli import app
from model import DEMO
from tests.engine.driving import golden
from tests.engine.test_golden import compared_rounds


def generate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments])


@pytest.mark.parametrize("backend, draft_tokens, key", [("dflash", 15, "v1_k15"), ("dflash2", 7, "v2_k7")])
def test_json_holds_the_golden_tokens_and_rounds(backend, draft_tokens, key):
    case = golden()[10]
    ids = ",".join(map(str, case["prompt"]))
    result = generate(
        "--prompt-ids", ids, "--backend", backend, "--draft-tokens", str(draft_tokens), "--max-tokens", "128",
        "--ignore-eos", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["prompt_token_ids"] == case["prompt"]
    assert answer["token_ids"][:96] == case["greedy"] and len(answer["token_ids"]) == 128
    rounds = compared_rounds(case["accepted"][key], 112)
    assert answer["rounds"][: len(rounds)] == rounds
    assert answer["acceptance_length"] == pytest.approx(127 / len(answer["rounds"]))
    assert (answer["backend"], answer["finish_reason"]) == (backend, "length")
    assert answer["text"] and answer["seconds"] > 0 and answer["tokens_per_second"] > 0


def test_streamed_text_is_the_text_of_the_json_and_a_seed_repeats_itself():
    request = ("--chat", "Count from 3 to 7.", "--temperature", "0.8", "--seed", "5", "--max-tokens", "24")
    streamed, again = generate(*request), generate(*request, "--json")
    assert streamed.exit_code == again.exit_code == 0
    assert streamed.stdout == json.loads(again.stdout)["text"] + "\n"
    assert "acceptance length" in streamed.stderr and "seed 5" in streamed.stderr


def test_a_schema_comes_as_text_or_as_a_file(tmp_path):
    schema = (
        '{"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": false}'
    )
    file = tmp_path / "schema.json"
    file.write_text(schema)
    for argument in (schema, str(file)):
        result = generate("--chat", "Pick a number.", "--json-schema", argument, "--json", "--seed", "1")
        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout)
        assert json.loads(answer["text"])["n"] in (1, 2, 3)
        assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "arguments, named",
    [
        ((), "exactly one of --prompt, --prompt-ids, --chat and --batch"),
        (("--prompt", "a", "--chat", "b"), "exactly one of"),
        (("--prompt", ""), "prompt is empty"),
        (("--chat", "  "), "--chat is empty"),
        (("--prompt-ids", "1,x"), "--prompt-ids"),
        (("--prompt-ids", "1,9999"), "9999"),
        (("--prompt", "a", "--temperature", "-1"), "temperature is -1"),
        (("--prompt", "a", "--top-p", "0"), "top_p"),
        (("--prompt", "a", "--regex", "[a"), "unclosed character class"),
        (
            ("--prompt", "a", "--regex", "a", "--json-schema", "{}"),
            "at most one of --json-object, --json-schema, --regex",
        ),
        (("--prompt", "a", "--json-schema", "no-such-file"), "No such file"),
        (("--prompt", "a", "--json-schema", '{"type": "integr"}'), "Invalid type: integr"),
        (("--prompt", "a", "--max-tokens", "0"), "max_tokens"),
        (("--prompt", "a", "--seed", "-3"), "seed"),
        (("--prompt", "a", "--backend", "eagle"), "backend"),
        (("--prompt", "a", "--draft-tokens", "16"), "draft_tokens"),
        (("--prompt", "a", "--lanes", "0"), "lanes"),
        (("--prompt", "a", "--stop-token-ids=-5"), "stop_token_ids names token id -5"),
        (("--prompt", "a", "--device", "cuda"), "cuda"),
        (("--prompt", "a", "--logit-bias", "290"), "--logit-bias is '290'"),
        (("--prompt", "a", "--logit-bias", "9000:1"), "logit_bias names token id 9000"),
        (("--prompt", "a", "--min-p", "1.5"), "min_p"),
        (("--prompt", "a", "--repetition-penalty", "0"), "repetition_penalty"),
        (("--prompt", "a", "--presence-penalty", "inf"), "presence_penalty"),
        (("--prompt", "a", "--logit-bias", "5:1e39"), "logit_bias of token 5 is 1e+39"),
        (("--prompt", "a", "--min-tokens", "-1"), "min_tokens"),
        (("--prompt", "a", "--logprobs", "21"), "logprobs"),
        (("--prompt", "a", "--prompt-logprobs", "-1"), "prompt_logprobs is -1"),
        (("--prompt", "a", "--stop", ""), "stop: a string has 0 characters"),
        (("--prompt", "a", "--model", "/nowhere/at-all", "--backend", "none"), "/nowhere/at-all"),
        (("--prompt", "a", "--model", str(DEMO / "target")), ""),
        (("--prompt", "a " * 40, "--context", "16"), "16"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, named):
    result = generate(*arguments)
    if not named:  # the demo's own directory by its path: its drafter is the default as well
        assert result.exit_code == 0
        return
    assert result.exit_code == 2, result.output
    assert named in result.stderr and result.stderr.count("\n") == 1 and not result.stdout


def test_a_stop_string_ends_the_text_before_it_in_both_outputs():
    whole = json.loads(generate("--chat", "Count from 3 to 7.", "--json").stdout)["text"]
    stop = whole[7:10]
    request = ("--chat", "Count from 3 to 7.", "--stop", stop, "--stop", "never")
    streamed, answer = generate(*request), json.loads(generate(*request, "--json").stdout)
    assert streamed.stdout == answer["text"] + "\n" == whole[: whole.index(stop)] + "\n"
    assert answer["finish_reason"] == "stop"


def test_a_prompt_is_echoed_and_scored_in_both_outputs():
    request = ("--prompt", "The sun rises in the", "--max-tokens", "4", "--echo", "--prompt-logprobs", "2")
    streamed, answer = generate(*request), json.loads(generate(*request, "--json").stdout)
    assert streamed.stdout == answer["text"] + "\n" and answer["text"].startswith("The sun rises in the")
    first, *others = answer["prompt_logprobs"]
    assert first is None and [entry["token"] for entry in others] == answer["prompt_token_ids"][1:]
    assert all(entry["logprob"] <= entry["top"][0][1] <= 0 and len(entry["top"]) == 2 for entry in others)
    lines = streamed.stderr.splitlines()
    assert len(lines) == len(others) + 1 and lines[0].split()[0] == f"{others[0]['logprob']:.4f}"
    bare = json.loads(generate("--prompt", "The sun", "--max-tokens", "2", "--json").stdout)
    assert bare["prompt_logprobs"] is None and not bare["text"].startswith("The sun")


def test_tools_are_offered_and_called_as_raw_text(tmp_path):
    file = tmp_path / "tools.json"
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("weather", "time")]
    file.write_text(json.dumps(tools))
    for choice, name in (("required", "(weather|time)"), ("time", "time")):
        result = generate("--chat", "How is it in Rome?", "--tools", str(file), "--tool-choice", choice, "--json")
        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout)
        call = rf"<tool_call>\n<function={name}>\n<parameter=city>\n(?s:.{{0,20}})\n</parameter>\n"
        call += "</function>\n</tool_call>"
        assert re.fullmatch(call, answer["text"])
        assert answer["finish_reason"] == "stop"
    offered = json.loads(generate("--chat", "Hello", "--tools", str(file), "--json", "--max-tokens", "1").stdout)
    plain = json.loads(generate("--chat", "Hello", "--json", "--max-tokens", "1").stdout)
    assert len(offered["prompt_token_ids"]) > len(plain["prompt_token_ids"]) + 50
    for arguments, named in (
        (("--tools", str(file), "--tool-choice", "news"), "names the function 'news', but tools has 'weather', 'time'"),
        (("--tools", str(file), "--regex", "a"), "--tools without --json-object, --json-schema, --regex and --lark"),
        (("--tools", str(tmp_path / "none.json")), "No such file"),
        (("--tool-choice", "required"), "needs --tools"),
    ):
        result = generate("--chat", "Hello", *arguments)
        assert result.exit_code == 2 and named in result.stderr and result.stderr.count("\n") == 1


def test_controls_reach_the_engine_and_logprobs_come_with_the_json():
    plain = json.loads(generate("--chat", "Count from 3 to 7.", "--json", "--logprobs", "2").stdout)
    assert [entry["token"] for entry in plain["logprobs"]] == plain["token_ids"]
    for entry in plain["logprobs"]:
        (best, logprob), _ = entry["top"]
        assert (best, logprob) == (entry["token"], entry["logprob"]) and logprob <= 0
    first = plain["token_ids"][0]
    biased = json.loads(generate("--chat", "Count from 3 to 7.", "--json", "--logit-bias", f"{first}:-100").stdout)
    assert first not in biased["token_ids"] and biased["logprobs"] is None


def test_choices_are_printed_one_after_the_other_and_differ_in_their_draws():
    request = ("--chat", "Count from 3 to 7.", "--n", "3", "--temperature", "4", "--seed", "4", "--max-tokens", "12")
    answers = [json.loads(line) for line in generate(*request, "--json").stdout.splitlines()]
    assert [(answer["choice"], answer["seed"]) for answer in answers] == [(0, 4), (1, 4), (2, 4)]
    assert len({answer["text"] for answer in answers}) == 3
    shown = generate(*request)
    assert shown.stdout == "".join(answer["text"] + "\n" for answer in answers)
    assert shown.stderr.count("acceptance length") == 3


def test_stop_ids_and_an_included_stop_string_end_the_answer_and_are_its_stop_reason():
    request = ("--chat", "Count from 3 to 7.", "--json")
    whole = json.loads(generate(*request).stdout)
    ending = next(token for token in whole["token_ids"][3:] if token not in whole["token_ids"][:3])
    by_id = json.loads(generate(*request, "--stop-token-ids", f"1,{ending}").stdout)
    assert by_id["token_ids"] == whole["token_ids"][: whole["token_ids"].index(ending)]
    assert by_id["stop_reason"] == ending
    stop = whole["text"][7:10]
    by_text = json.loads(generate(*request, "--stop", stop, "--include-stop-str-in-output").stdout)
    assert by_text["text"] == whole["text"][: whole["text"].index(stop) + 3] and by_text["stop_reason"] == stop
    assert whole["stop_reason"] is None


def test_thinking_is_switched_on_and_kept_short():
    request = ("--chat", "Count from 3 to 7.", "--json", "--max-tokens", "60")
    free = json.loads(generate(*request, "--enable-thinking", "--ignore-eos").stdout)
    short = json.loads(generate(*request, "--enable-thinking", "--thinking-budget", "2").stdout)
    plain = json.loads(generate(*request, "--no-enable-thinking", "--thinking-budget", "2").stdout)
    assert len(free["prompt_token_ids"]) != len(plain["prompt_token_ids"])
    assert short["token_ids"][:2] == free["token_ids"][:2]
    assert "</think>" in short["text"][:24] and "</think>" not in plain["text"]


def test_decoding_without_the_drafter_gives_the_same_greedy_text():
    drafted, plain = (
        json.loads(generate("--chat", "Count from 3 to 7.", "--json", option).stdout)
        for option in ("--drafting", "--no-drafting")
    )
    assert drafted["token_ids"] == plain["token_ids"] and set(plain["rounds"]) == {0}
    assert max(drafted["rounds"]) > 0


def test_a_lark_grammar_comes_from_a_file_and_a_json_object_needs_none(tmp_path):
    file = tmp_path / "answer.lark"
    file.write_text('start: "yes" | "no"')
    answer = json.loads(generate("--chat", "Is it?", "--lark", str(file), "--json").stdout)
    assert answer["text"] in ("yes", "no") and answer["finish_reason"] == "stop"
    free = json.loads(generate("--chat", "Is it?", "--json-object", "--json", "--max-tokens", "8").stdout)
    assert free["text"].lstrip().startswith("{")
