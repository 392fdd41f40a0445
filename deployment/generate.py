"""`dflash-serve generate`: prompts through an engine of this process, without Ray and without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from deployment.usage import one_sentence

# torch and the models' libraries take seconds to import: `--help` and a mistyped option should not wait for them.
if TYPE_CHECKING:
    from deployment.engine.commands import Grammar, LogprobsMode, Submit, TokenLogprob
    from deployment.engine.loading import Models
    from deployment.engine.options import EngineOptions
    from deployment.offline import Result, Source
    from model.tokenizer import Tokenizer

BATCH_LANES = 8
"""Lines of a batch that decode together, unless told otherwise."""


def generate(
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids to continue, as in 1,2,3.")] = None,
    chat: Annotated[str | None, typer.Option(help="A user message to answer, through the chat template.")] = None,
    batch: Annotated[
        str | None, typer.Option(help="A JSONL file of prompts, or - for stdin; the other options are its defaults.")
    ] = None,
    output: Annotated[str | None, typer.Option(help="With --batch: the file for its records; default: stdout.")] = None,
    progress: Annotated[
        bool | None, typer.Option("--progress/--no-progress", help="With --batch; default: on a terminal.")
    ] = None,
    lanes: Annotated[
        int | None, typer.Option(help=f"Turns that decode together; default: --n, of a batch {BATCH_LANES}.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Directory, or name on the Hugging Face hub; default: the embedded demo model.")
    ] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft checkpoint's directory.")] = None,
    backend: Annotated[str, typer.Option(help="none, dflash or dflash2.")] = "dflash2",
    draft_tokens: Annotated[int | None, typer.Option(help="Drafted tokens a round, 1 to 15.")] = None,
    draft_tokens_by_lanes: Annotated[
        str | None, typer.Option(help="Another K from so many decoding lanes on, as in 3:7,8:0.")
    ] = None,
    drafting: Annotated[bool, typer.Option("--drafting/--no-drafting", help="Decode with the drafter.")] = True,
    draft_causal: Annotated[str, typer.Option(help="auto, true or false.")] = "auto",
    proposal_head: Annotated[Path | None, typer.Option(help="Index file of the token ids that may be drafted.")] = None,
    yarn_factor: Annotated[float | None, typer.Option(help="Stretch the model's positions by YaRN, 1 to 4.")] = None,
    public_rows: Annotated[
        int | None, typer.Option(help="Vocabulary rows that may be chosen; default: all known.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at the most.")] = 128,
    n: Annotated[int, typer.Option("--n", help="Choices, 1 to 8: printed one after the other.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the smallest set of this mass; 1 keeps all.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens of this share of the best one's probability.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Of prompt and answer; 1 is none.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Off the logits of tokens that were generated.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, times their number.")] = 0.0,
    logit_bias: Annotated[list[str] | None, typer.Option(help="ID:VALUE, added to a logit; repeatable.")] = None,
    min_tokens: Annotated[int, typer.Option(help="No end token before that many.")] = 0,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="A seed's tokens depend on the target alone, also with DFlash2.")
    ] = False,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.")] = None,
    include_stop_str_in_output: Annotated[
        bool, typer.Option("--include-stop-str-in-output", help="End with the stop text instead of before it.")
    ] = False,
    stop_token_ids: Annotated[str | None, typer.Option(help="End at one of these token ids, as in 1,2,3.")] = None,
    thinking_budget: Annotated[
        int | None, typer.Option(help="Close a think block after that many tokens in think blocks.")
    ] = None,
    enable_thinking: Annotated[
        bool | None,
        typer.Option("--enable-thinking/--no-enable-thinking", help="The chat template's switch; default: its own."),
    ] = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log-probabilities, and this many others.")] = None,
    logprobs_mode: Annotated[
        str, typer.Option(help="raw_logprobs, or processed_logprobs: after penalties, temperature and filters.")
    ] = "raw_logprobs",
    json_schema: Annotated[
        str | None, typer.Option(help="The answer is JSON that matches this schema: a file, or the schema itself.")
    ] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="The answer is a JSON object.")] = False,
    lark: Annotated[str | None, typer.Option(help="The answer matches the Lark grammar in this file.")] = None,
    regex: Annotated[str | None, typer.Option(help="The answer matches this regular expression as a whole.")] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt's text before the answer.")] = False,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities of the prompt's tokens, and this many others of each.")
    ] = None,
    tools: Annotated[Path | None, typer.Option(help="JSON file: a list of functions that may be called.")] = None,
    tool_choice: Annotated[str, typer.Option(help="With --tools: auto, required, or a function's name.")] = "auto",
    seed: Annotated[int | None, typer.Option(help="Seed of the draws; default: a random one, told.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end tokens.")] = False,
    context: Annotated[int | None, typer.Option(help="Limit of prompt and answer; default: the model's.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a choice instead of text.")] = False,
) -> None:
    """Generates from one prompt and prints the text as it comes, or from each line of a batch."""
    with one_sentence():
        from deployment.batch import opened, read_lines, run_batch
        from deployment.engine.commands import Sampling
        from deployment.engine.loading import load_models
        from deployment.offline import Asked, fitted, submits_of
        from deployment.settings import AppArgs

        args = AppArgs.of(
            model=model,
            draft=draft,
            backend=backend,
            draft_tokens=draft_tokens,
            draft_tokens_by_lanes=draft_tokens_by_lanes,
            draft_causal=draft_causal,
            proposal_head=proposal_head,
            yarn_factor=yarn_factor,
            public_rows=public_rows,
            context=context,
            device=device,
            dtype=dtype,
            lanes=lanes if lanes is not None else max(1, n) if batch is None else BATCH_LANES,
        )
        if sum(given is not None for given in (prompt, prompt_ids, chat, batch)) != 1:
            raise ValueError("give exactly one of --prompt, --prompt-ids, --chat and --batch")
        offered = _tools(tools)
        asked = Asked(
            sampling=Sampling(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                logit_bias=tuple(_bias(entry) for entry in logit_bias or ()),
                min_tokens=min_tokens,
                reproducible=reproducible,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                logprobs_mode=cast("LogprobsMode", logprobs_mode),
            ),
            max_tokens=max_tokens,
            seed=seed,
            n=n,
            stop_ids=() if stop_token_ids is None else _ids("--stop-token-ids", stop_token_ids),
            ignore_eos=ignore_eos,
            drafting=drafting,
            stop_strings=tuple(stop or ()),
            include_stop_string=include_stop_str_in_output,
            thinking_budget=thinking_budget,
            enable_thinking=enable_thinking,
            grammar=_grammar(json_object, json_schema, regex, lark, offered, tool_choice),
            tools=None if offered is None else tuple(offered),
            echo=echo,
        )
        options = args.engine_options()
        if batch is not None:
            lines = read_lines(batch, asked)
            with opened(output, batch) as out:
                failed = run_batch(load_models(options), options, lines, out, progress)
            typer.echo(f"[{len(lines)} lines, {failed} errors]", err=True)
            raise typer.Exit(1 if failed else 0)
        if output is not None or progress is not None:
            raise ValueError("--output and --progress need --batch")
        if enable_thinking is not None and chat is None:
            raise ValueError("--enable-thinking needs --chat or --batch")
        source = _source(prompt, prompt_ids, chat)
        models = load_models(options)
        submits = submits_of(models, "generate", source, asked)
        _run(models, fitted(options, models, submits), submits, as_json, echo)


def _run(models: Models, options: EngineOptions, submits: Sequence[Submit], as_json: bool, echo: bool) -> None:
    """Prints a single answer as it comes, several one after the other, and the scores of prompts on stderr. Raises
    ValueError for a turn that fails."""
    from deployment.engine.events import Failed, Finished, PromptLogprobs, Started, Tokens
    from deployment.offline import Answer, run
    from model.tokenizer import Detokenizer

    streamed = len(submits) == 1 and not as_json
    detokenizer = Detokenizer(models.tokenizer)
    answers = {submit.turn: Answer(submit, models, options.backend, echo) for submit in submits}
    results: dict[str, Result] = {}
    for submit, event in run(models, options, submits):
        if isinstance(event, Failed):
            raise ValueError(event.message)
        if isinstance(event, PromptLogprobs) and not as_json:
            for entry in event.logprobs:
                typer.echo(_score_line(models.tokenizer, entry), err=True)
        if isinstance(event, Started) and streamed and echo:
            print(models.tokenizer.decode(submit.prompt_ids), end="", flush=True)
        if isinstance(event, Tokens) and streamed:
            text = detokenizer.push(event.token_ids)
            if event.text_cut:
                text = (text + detokenizer.flush())[: -event.text_cut]
            print(text, end="", flush=True)
        if isinstance(event, Finished) and streamed:
            print(detokenizer.flush())
        result = answers[submit.turn].take(event)
        if result is not None:
            results[submit.turn] = result
    for result in (results[submit.turn] for submit in submits):
        if as_json:
            print(json.dumps(asdict(result)))
            continue
        if not streamed:
            print(result.text)
        typer.echo(
            f"[{len(result.token_ids)} tokens, {result.tokens_per_second:.0f} tokens/s, backend {result.backend}, "
            f"acceptance length {result.acceptance_length:.2f}, finish {result.finish_reason}, seed {result.seed}]",
            err=True,
        )


def _source(prompt: str | None, prompt_ids: str | None, chat: str | None) -> Source:
    from deployment.offline import Source

    if chat is not None and not chat.strip():
        raise ValueError("--chat is empty, must be a message")
    ids = None if prompt_ids is None else _ids("--prompt-ids", prompt_ids)
    return Source(prompt, ids, None if chat is None else ({"role": "user", "content": chat},))


def _ids(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise ValueError(f"{option} is {text!r}, must be token ids as in 1,2,3") from None


def _score_line(tokenizer: Tokenizer, entry: TokenLogprob) -> str:
    """A token of the prompt, its log-probability, and the alternatives."""

    def shown(token: int, logprob: float) -> str:
        return f"{logprob:9.4f} {tokenizer.spelled(token).decode(errors='replace')!r}"

    return "  ".join([shown(entry.token, entry.logprob), *(shown(*other) for other in entry.top)])


def _bias(entry: str) -> tuple[int, float]:
    token, _, added = entry.partition(":")
    try:
        return int(token), float(added)
    except ValueError:
        raise ValueError(f"--logit-bias is {entry!r}, must be a token id and a value as in 290:-5") from None


def _tools(path: Path | None) -> list[Any] | None:
    if path is None:
        return None
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"--tools is {str(path)!r}, must be a JSON file: {reason}") from None
    if not isinstance(tools, list):
        raise ValueError(f"--tools: {path} must hold a list of functions")
    return tools


def _grammar(
    json_object: bool,
    json_schema: str | None,
    regex: str | None,
    lark: str | None,
    tools: list[Any] | None,
    tool_choice: str,
) -> Grammar | None:
    from deployment.engine.commands import Grammar
    from deployment.engine.tool_grammar import tools_grammar

    given = json_object + sum(text is not None for text in (json_schema, regex, lark))
    if given > 1:
        raise ValueError("give at most one of --json-object, --json-schema, --regex and --lark")
    if tools is not None:
        if given:
            raise ValueError("give --tools without --json-object, --json-schema, --regex and --lark")
        named = {"type": "function", "function": {"name": tool_choice}}
        return tools_grammar(tools, tool_choice if tool_choice in ("auto", "required") else named)
    if tool_choice != "auto":
        raise ValueError(f"--tool-choice is {tool_choice!r}, which needs --tools")
    if json_object:
        return Grammar("json_object")
    if regex is not None:
        return Grammar("regex", regex)
    if lark is not None:
        return Grammar("lark", _read("--lark", lark, "a file"))
    if json_schema is None:
        return None
    if not json_schema.lstrip().startswith("{"):
        json_schema = _read("--json-schema", json_schema, "a JSON object or a file")
    return Grammar("json_schema", json_schema)


def _read(option: str, path: str, wanted: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{option} is {path!r}, must be {wanted}: {reason}") from None
