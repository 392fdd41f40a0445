"""`dflash-serve generate`: one prompt through an engine of this process, without Ray and without a server."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from deployment.engine.loading import Models
    from deployment.engine.messages import Event


class UsageError(Exception):
    """A mistake on the command line, said in one sentence."""


@dataclass(frozen=True)
class Result:
    """What `--json` prints. `acceptance_length`: published tokens after the first, divided by rounds; `rounds` lists
    accepted drafts round by round; `tokens_per_second` counts from the end of the prefill."""

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


def generate(
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids to continue, as in 1,2,3.")] = None,
    chat: Annotated[str | None, typer.Option(help="A user message to answer, through the chat template.")] = None,
    model: Annotated[Path | None, typer.Option(help="Target directory (default: the embedded demo).")] = None,
    draft: Annotated[
        Path | None, typer.Option(help="Drafter directory (default: the demo's for this backend).")
    ] = None,
    backend: Annotated[str, typer.Option(help="none, dflash or dflash2.")] = "dflash2",
    draft_tokens: Annotated[int | None, typer.Option(help="K, 1 to 15 (default: the drafter's block - 1).")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to publish at the most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the smallest set of this mass; 1 keeps all.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws (default: a random one, reported).")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end tokens.")] = False,
    context: Annotated[int | None, typer.Option(help="Limit of prompt + answer (default: the model's).")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    draft_causal: Annotated[str, typer.Option(help="auto, true or false.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
) -> None:
    """Generates from one prompt and prints the text as it comes, or one JSON object at the end."""
    from model.errors import ChatTemplateError, ModelError

    try:
        options = _options(locals())
        if sum(given is not None for given in (prompt, prompt_ids, chat)) != 1:
            raise UsageError("give exactly one of --prompt, --prompt-ids and --chat")
        _run(options, prompt, prompt_ids, chat, _request(locals()), as_json)
    except (UsageError, ModelError, ChatTemplateError) as error:
        print(f"dflash-serve generate: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _options(given: dict[str, Any]) -> Any:
    """EngineOptions of the command's arguments, the embedded demo model where no directory is named."""
    from deployment.engine.options import EngineOptions
    from model import DEMO

    backend, model, draft = given["backend"], given["model"], given["draft"]
    if backend not in ("none", "dflash", "dflash2"):
        raise UsageError(f"--backend is {backend!r}, must be none, dflash or dflash2")
    if given["draft_causal"] not in ("auto", "true", "false"):
        raise UsageError(f"--draft-causal is {given['draft_causal']!r}, must be auto, true or false")
    if draft is None and backend != "none":
        if model is not None:
            raise UsageError(f"--draft is required with --model and --backend {backend}")
        draft = DEMO / backend
    return EngineOptions(
        model=model or DEMO / "target",
        draft=draft if backend != "none" else None,
        backend=backend,
        draft_tokens=given["draft_tokens"],
        device=given["device"],
        dtype=given["dtype"],
        lanes=1,
        images=1,
        context=given["context"],
        draft_causal=given["draft_causal"],
    )


def _request(given: dict[str, Any]) -> dict[str, Any]:
    from deployment.engine.messages import Sampling

    seed = secrets.randbits(63) if given["seed"] is None else given["seed"]
    return {
        "sampling": Sampling(given["temperature"], given["top_k"], given["top_p"], seed),
        "max_tokens": given["max_tokens"],
        "ignore_eos": given["ignore_eos"],
    }


def _run(
    options: Any,
    prompt: str | None,
    prompt_ids: str | None,
    chat: str | None,
    request: dict[str, Any],
    as_json: bool,
) -> None:
    import time

    import torch

    from deployment.engine.engine import Engine
    from deployment.engine.loading import load_models
    from deployment.engine.messages import Failed, Finished, Started, Submit, Tokens
    from model.tokenizer import Detokenizer

    if options.device == "cpu":
        torch.set_num_threads(1)  # a second thread makes the demo's small products slower, not faster
    models = load_models(options)
    ids = _encode(models, prompt, prompt_ids, chat)
    events: list[Event] = []
    engine = Engine(models, options, events.append)
    detokenizer = Detokenizer(models.tokenizer)
    engine.execute(Submit("generate", tuple(ids), **request))
    started = time.monotonic()
    finished: Finished | None = None
    while events or engine.step():
        for event in events:
            if isinstance(event, Failed):
                raise UsageError(event.message)
            if isinstance(event, Started):
                started = time.monotonic()
            if isinstance(event, Tokens) and not as_json:
                print(detokenizer.push(event.token_ids), end="", flush=True)
            if isinstance(event, Finished):
                finished = event
        events.clear()
    assert finished is not None
    decoding = max(time.monotonic() - started, 1e-9)
    result = Result(
        prompt_token_ids=list(ids),
        token_ids=list(finished.token_ids),
        text=models.tokenizer.decode(finished.token_ids),
        finish_reason=finished.finish_reason,
        rounds=list(finished.rounds),
        acceptance_length=finished.acceptance_length,
        backend=options.backend,
        seed=request["sampling"].seed,
        seconds=finished.seconds,
        tokens_per_second=len(finished.token_ids) / decoding,
    )
    if as_json:
        print(json.dumps(result.__dict__))
        return
    print(detokenizer.flush())
    print(
        f"[{len(result.token_ids)} tokens, {result.tokens_per_second:.0f} tokens/s, {options.backend}, acceptance "
        f"length {result.acceptance_length:.2f}, finished by {result.finish_reason}, seed {result.seed}]",
        file=sys.stderr,
    )


def _encode(models: Models, prompt: str | None, prompt_ids: str | None, chat: str | None) -> list[int]:
    if prompt_ids is not None:
        try:
            return [int(item) for item in prompt_ids.split(",")]
        except ValueError:
            raise UsageError(f"--prompt-ids is {prompt_ids!r}, must be token ids as in 1,2,3") from None
    if chat is not None:
        if not chat.strip():
            raise UsageError("--chat is empty, must be a message")
        prompt = models.chat_template.render([{"role": "user", "content": chat}], add_generation_prompt=True)
    assert prompt is not None
    try:
        return models.tokenizer.encode(prompt)
    except ValueError as error:
        raise UsageError(f"the prompt cannot be encoded: {error}") from None
