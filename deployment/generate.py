"""`dflash-serve generate`: one prompt through an engine of this process, without Ray and without a server."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployment.usage import one_sentence

# torch and the models' libraries take seconds to import: `--help` and a mistyped option should not wait for them.
if TYPE_CHECKING:
    from deployment.engine.loading import Models
    from deployment.engine.messages import Event, Grammar, Submit, TokenLogprob
    from deployment.engine.options import EngineOptions
    from model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Result:
    """What `--json` prints. `rounds` lists accepted drafts round by round; `acceptance_length` is published tokens
    after the first, divided by rounds; `seconds` covers prefill and decoding, `tokens_per_second` decoding only.
    `logprobs`: an entry a token, with the alternatives in `top`, best first; null unless asked for. `prompt_logprobs`:
    the same of the prompt's tokens, the first of which has null. `text`: with `--echo` the prompt's comes first."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    rounds: list[int]
    acceptance_length: float
    backend: str
    seed: int
    seconds: float
    tokens_per_second: float
    logprobs: list[dict[str, Any]] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


def generate(
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids to continue, as in 1,2,3.")] = None,
    chat: Annotated[str | None, typer.Option(help="A user message to answer, through the chat template.")] = None,
    model: Annotated[Path | None, typer.Option(help="Model directory; default: the embedded demo model.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft checkpoint's directory.")] = None,
    backend: Annotated[str, typer.Option(help="none, dflash or dflash2.")] = "dflash2",
    draft_tokens: Annotated[int | None, typer.Option(help="Drafted tokens a round, 1 to 15.")] = None,
    draft_causal: Annotated[str, typer.Option(help="auto, true or false.")] = "auto",
    proposal_head: Annotated[Path | None, typer.Option(help="Index file of the token ids that may be drafted.")] = None,
    yarn_factor: Annotated[float | None, typer.Option(help="Stretch the model's positions by YaRN, 1 to 4.")] = None,
    public_rows: Annotated[
        int | None, typer.Option(help="Vocabulary rows that may be chosen; default: all known.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at the most.")] = 128,
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
    logprobs: Annotated[int | None, typer.Option(help="With --json: log-probabilities, and this many others.")] = None,
    json_schema: Annotated[
        str | None, typer.Option(help="The answer is JSON that matches this schema: a file, or the schema itself.")
    ] = None,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
) -> None:
    """Generates from one prompt and prints the text as it comes, or one JSON object at the end."""
    with one_sentence():
        from deployment.engine.loading import load_models
        from deployment.engine.messages import Sampling, Submit
        from deployment.settings import AppArgs
        from deployment.turns import after_thinking
        from state.geometry import pages_for

        args = AppArgs.of(
            model=model,
            draft=draft,
            backend=backend,
            draft_tokens=draft_tokens,
            draft_causal=draft_causal,
            proposal_head=proposal_head,
            yarn_factor=yarn_factor,
            public_rows=public_rows,
            context=context,
            device=device,
            dtype=dtype,
            lanes=1,
            images=1,
        )
        if sum(given is not None for given in (prompt, prompt_ids, chat)) != 1:
            raise ValueError("give exactly one of --prompt, --prompt-ids and --chat")
        offered = _tools(tools)
        grammar = _grammar(json_schema, regex, offered, tool_choice)
        options = args.engine_options()
        models = load_models(options)
        ids = _encode(models, prompt, prompt_ids, chat, offered)
        options = replace(options, pages=pages_for(min(len(ids) + max(1, max_tokens), models.context)))
        submit = Submit(
            turn="generate",
            prompt_ids=ids,
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
                seed=secrets.randbits(64) if seed is None else seed,
                reproducible=reproducible,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            ),
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            stop_strings=tuple(stop or ()),
            grammar=grammar if chat is None else after_thinking(models.tokenizer, ids, grammar),
        )
        result = _run(models, options, submit, stream=not as_json, echo=echo)
        if as_json:
            print(json.dumps(asdict(result)))
            return
        typer.echo(
            f"[{len(result.token_ids)} tokens, {result.tokens_per_second:.0f} tokens/s, backend {result.backend}, "
            f"acceptance length {result.acceptance_length:.2f}, finish {result.finish_reason}, seed {result.seed}]",
            err=True,
        )


def _run(models: Models, options: EngineOptions, submit: Submit, stream: bool, echo: bool) -> Result:
    """One turn to its end; prints its text as it comes if `stream`, and what is told of its prompt on stderr. Raises
    ValueError where the engine refuses it."""
    import torch

    from deployment.engine.engine import Engine
    from deployment.engine.messages import Failed, Finished, PromptLogprobs, Started, Tokens
    from model.tokenizer import Detokenizer

    if options.device == "cpu":
        torch.set_num_threads(1)  # a second thread makes a small model's products slower, not faster
    events: list[Event] = []
    engine = Engine(models, options, events.append)
    detokenizer = Detokenizer(models.tokenizer)
    told: list[dict[str, Any]] = []
    scores: list[dict[str, Any] | None] = [None]
    begun = decoding = time.monotonic()
    engine.execute(submit)
    while events or engine.step():
        for event in events:
            match event:
                case Failed():
                    raise ValueError(event.message)
                case PromptLogprobs():
                    scores.extend(asdict(entry) for entry in event.logprobs)
                    if stream:
                        for entry in event.logprobs:
                            typer.echo(_score_line(models.tokenizer, entry), err=True)
                case Started():
                    decoding = time.monotonic()
                    if stream and echo:
                        print(models.tokenizer.decode(submit.prompt_ids), end="", flush=True)
                case Tokens():
                    told.extend(asdict(entry) for entry in event.logprobs)
                    if stream:
                        text = detokenizer.push(event.token_ids)
                        if event.text_cut:
                            text = (text + detokenizer.flush())[: -event.text_cut]
                        print(text, end="", flush=True)
                case Finished():
                    if stream:
                        print(detokenizer.flush())
                    now = time.monotonic()
                    text = models.tokenizer.decode(event.token_ids)
                    before = models.tokenizer.decode(submit.prompt_ids) if echo else ""
                    return Result(
                        prompt_token_ids=list(submit.prompt_ids),
                        token_ids=list(event.token_ids),
                        text=before + text[: len(text) - event.text_cut],
                        finish_reason=event.finish_reason,
                        rounds=list(event.rounds),
                        acceptance_length=event.acceptance_length,
                        backend=options.backend,
                        seed=submit.sampling.seed,
                        seconds=now - begun,
                        # the first token comes with the prefill
                        tokens_per_second=max(0, len(event.token_ids) - 1) / max(now - decoding, 1e-9),
                        logprobs=None if submit.sampling.logprobs is None else told,
                        prompt_logprobs=None if submit.sampling.prompt_logprobs is None else scores,
                    )
                case _:
                    pass
        events.clear()
    raise RuntimeError("the engine ended the turn without a word")


def _score_line(tokenizer: Tokenizer, entry: TokenLogprob) -> str:
    """A token of the prompt, its log-probability, and the alternatives."""

    def shown(token: int, logprob: float) -> str:
        return f"{logprob:9.4f} {tokenizer.spelled(token).decode(errors='replace')!r}"

    return "  ".join([shown(entry.token, entry.logprob), *(shown(*other) for other in entry.top)])


def _encode(
    models: Models, prompt: str | None, prompt_ids: str | None, chat: str | None, tools: list[Any] | None
) -> tuple[int, ...]:
    if prompt_ids is not None:
        try:
            return tuple(int(item) for item in prompt_ids.split(","))
        except ValueError:
            raise ValueError(f"--prompt-ids is {prompt_ids!r}, must be token ids as in 1,2,3") from None
    if chat is not None:
        if not chat.strip():
            raise ValueError("--chat is empty, must be a message")
        prompt = models.chat_template.render([{"role": "user", "content": chat}], tools=tools)
    return tuple(models.tokenizer.encode(prompt or ""))


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


def _grammar(json_schema: str | None, regex: str | None, tools: list[Any] | None, tool_choice: str) -> Grammar | None:
    from deployment.engine.messages import Grammar
    from deployment.engine.tool_grammar import tools_grammar

    if json_schema is not None and regex is not None:
        raise ValueError("give at most one of --json-schema and --regex")
    if tools is not None:
        if json_schema is not None or regex is not None:
            raise ValueError("give --tools without --json-schema and --regex")
        named = {"type": "function", "function": {"name": tool_choice}}
        return tools_grammar(tools, tool_choice if tool_choice in ("auto", "required") else named)
    if tool_choice != "auto":
        raise ValueError(f"--tool-choice is {tool_choice!r}, which needs --tools")
    if regex is not None:
        return Grammar("regex", regex)
    if json_schema is None:
        return None
    if not json_schema.lstrip().startswith("{"):
        try:
            json_schema = Path(json_schema).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"--json-schema is {json_schema!r}, must be a JSON object or a file: {reason}") from None
    return Grammar("json_schema", json_schema)
