"""Turns through an engine of this process, without Ray and without a server: what is asked, and what came of it."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from deployment.engine.commands import Grammar, Sampling, Submit
from deployment.engine.engine import Engine
from deployment.engine.events import Event, Failed, Finished, PromptLogprobs, Started, Tokens
from deployment.engine.loading import Models
from deployment.engine.options import EngineOptions
from deployment.shown_media import ShownMedia
from deployment.turns import Message, Prompt, after_thinking, choices, full_history, thinking_budget
from state.geometry import pages_for

MAX_CHOICES = 8


@dataclass(frozen=True)
class Asked:
    """How a prompt is continued; fields as in `Submit`. `seed` None: a random one for each prompt, in the place of
    `sampling.seed`. `n`: choices. `enable_thinking` and `preserve_thinking` are the chat template's switches, and
    `tools` are what it offers. `continues`: the answer goes on with the last message. `echo`: an answer's text begins
    with the prompt's."""

    sampling: Sampling
    max_tokens: int
    seed: int | None = None
    n: int = 1
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    drafting: bool = True
    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    thinking_budget: int | None = None
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    continues: bool = False
    grammar: Grammar | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_CHOICES:
            raise ValueError(f"n is {self.n}, must be 1 to {MAX_CHOICES}")


@dataclass(frozen=True)
class Source:
    """A prompt before it is tokenised: one of the three is given."""

    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True)
class Result:
    """One choice. `rounds` lists accepted drafts round by round; `acceptance_length` is published tokens after the
    first, divided by rounds; `seconds` covers prefill and decoding, `tokens_per_second` decoding only. `logprobs`: an
    entry a token, with the alternatives in `top`, best first; null unless asked for. `stop_reason`: the stop string, or
    the id of `stop_token_ids`, that ended it. `prompt_logprobs`: as `logprobs`, of the prompt's tokens, the first of
    which has null; the first choice tells them for all."""

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
    choice: int = 0
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


def submits_of(models: Models, turn: str, source: Source, asked: Asked) -> list[Submit]:
    """The turns of a prompt, one a choice; `turn` is the first one's name. Raises ValueError."""
    tokenizer = models.tokenizer
    prompt = _encoded(models, source, asked)
    grammar = asked.grammar if source.messages is None else after_thinking(tokenizer, prompt.opener, asked.grammar)
    submit = Submit(
        turn=turn,
        prompt_ids=prompt.ids,
        sampling=replace(asked.sampling, seed=secrets.randbits(64) if asked.seed is None else asked.seed),
        max_tokens=asked.max_tokens,
        stop_ids=asked.stop_ids,
        ignore_eos=asked.ignore_eos,
        drafting=asked.drafting,
        stop_strings=asked.stop_strings,
        include_stop_string=asked.include_stop_string,
        thinking=thinking_budget(tokenizer, prompt, asked.thinking_budget),
        grammar=grammar,
    )
    return choices(submit, asked.n)


def _encoded(models: Models, source: Source, asked: Asked) -> Prompt:
    """A prompt that is not rendered from messages is all opener: it may leave a think block open itself."""
    if source.messages is not None:
        return full_history(
            models.chat_template,
            models.tokenizer,
            source.messages,
            enable_thinking=asked.enable_thinking,
            preserve_thinking=asked.preserve_thinking,
            continues=asked.continues,
            tools=asked.tools,
            limit=models.context,
            shown=ShownMedia(models.vision),
        )
    ids = source.prompt_ids if source.prompt_ids is not None else models.tokenizer.encode(source.prompt or "")
    return Prompt(tuple(ids), 0)


def fitted(options: EngineOptions, models: Models, submits: Sequence[Submit]) -> EngineOptions:
    """`options` with pages for the longest turns side by side, and an image for each prompt that choices share."""
    sizes = sorted((_pages(models, submit) for submit in submits), reverse=True)
    shared = any(submit.followers for submit in submits)
    pages = sum(sizes[: options.lanes]) + (options.lanes if shared else 0)
    return replace(options, pages=max(1, pages), images=options.lanes if shared else 1)


def _pages(models: Models, submit: Submit) -> int:
    return pages_for(min(len(submit.prompt_ids) + max(1, submit.max_tokens or 0), models.context))


def run(models: Models, options: EngineOptions, submits: Sequence[Submit]) -> Iterator[tuple[Submit, Event]]:
    """Runs turns to their ends, each with every event of it, in the order in which they came."""
    if options.device == "cpu":
        torch.set_num_threads(1)  # a second thread makes a small model's products slower, not faster
    events: list[Event] = []
    engine = Engine(models, options, events.append)
    waiting = deque(submits)
    running: dict[str, Submit] = {}
    while waiting or running:
        while waiting and len(running) < 2 * options.lanes:  # enough to fill the next lane that is free
            submit = waiting.popleft()
            running[submit.turn] = submit
            engine.execute(submit)
        if not engine.step() and not events:
            raise RuntimeError("the engine ended a turn without a word")
        for event in events:
            turn = event.ref if isinstance(event, Failed) else getattr(event, "turn", "")
            if turn in running:
                yield running[turn], event
            if isinstance(event, Finished | Failed):
                del running[turn]
        events.clear()


@dataclass
class Answer:
    """What is known of one turn while its events come."""

    submit: Submit
    models: Models
    backend: str
    echo: bool = False
    decoding_since: float = field(default_factory=time.monotonic)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    scores: list[dict[str, Any] | None] = field(default_factory=lambda: [None])

    def take(self, event: Event) -> Result | None:
        """The result once the turn has finished."""
        match event:
            case Started():
                self.decoding_since = time.monotonic()
            case PromptLogprobs():
                self.scores.extend(asdict(entry) for entry in event.logprobs)
            case Tokens():
                self.logprobs.extend(asdict(entry) for entry in event.logprobs)
            case Finished():
                return self._result(event)
            case _:
                pass
        return None

    def _result(self, finished: Finished) -> Result:
        text = self.models.tokenizer.decode(finished.token_ids)
        before = self.models.tokenizer.decode(self.submit.prompt_ids) if self.echo else ""
        sampling = self.submit.sampling
        by_id = finished.stop_id in self.submit.stop_ids
        decoded = max(0, len(finished.token_ids) - 1)  # the first token comes with the prefill
        return Result(
            prompt_token_ids=list(self.submit.prompt_ids),
            token_ids=list(finished.token_ids),
            text=before + text[: len(text) - finished.text_cut],
            finish_reason=finished.finish_reason,
            rounds=list(finished.rounds),
            acceptance_length=finished.acceptance_length,
            backend=self.backend,
            seed=sampling.seed,
            seconds=finished.seconds,
            tokens_per_second=decoded / max(time.monotonic() - self.decoding_since, 1e-9),
            logprobs=None if sampling.logprobs is None else self.logprobs,
            choice=sampling.sub,
            stop_reason=finished.stop_id if by_id else finished.stop_string,
            prompt_logprobs=None if sampling.prompt_logprobs is None else self.scores,
        )
