"""From messages to token ids: the two ways to continue a session (decision 18), and what the engine is told of a turn.

`full_history` is for a request that carries everything, `append` for one that carries only what is new.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deployment.common_prefix import common_prefix
from deployment.engine.commands import Grammar, Submit, ThinkingBudget
from deployment.parsing.turn_text import THINK_CLOSE, THINK_OPEN, think_is_open
from deployment.shown_media import NO_MEDIA, ShownMedia
from model.chat_template import ChatTemplate
from model.tokenizer import Tokenizer
from state.media import Placed

Message = dict[str, Any]

_MARKER = "dflash-marker-4f1c9a7e0b62"
"""Stands for an assistant's answer; what a template writes after it is what closes a message."""


@dataclass(frozen=True)
class Prompt:
    """Token ids of a turn's prompt. The next turn's prompt will begin with the first `stable_boundary` of them, and
    those of other conversations with the same tools and system message with the first `system_boundary`; 0: none.
    `media`: all that stand in `ids`, in their order, also those of a ledger that an append turn goes on from."""

    ids: tuple[int, ...]
    stable_boundary: int
    system_boundary: int = 0
    media: Placed = ()

    @property
    def opener(self) -> tuple[int, ...]:
        """What stands between the stable part and the answer: it says whether a think block is open."""
        return self.ids[self.stable_boundary :]


def full_history(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    enable_thinking: bool | None = None,
    preserve_thinking: bool | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
    limit: int | None = None,
    continues: bool = False,
    shown: ShownMedia = NO_MEDIA,
) -> Prompt:
    """Renders the whole conversation. The boundary is decision 17's: before the generation prompt's think opener.
    `continues`: the answer goes on with the last message, which is the assistant's.

    A prompt of `limit` tokens or more, which will be refused, has no boundary: finding one takes as long as the prompt.
    Raises ChatTemplateError where the template refuses the messages, MediaError where they and `shown` do not match.
    """
    render = partial(
        template.render,
        tools=list(tools) if tools else None,
        enable_thinking=enable_thinking,
        preserve_thinking=preserve_thinking,
    )
    text = _unfinished(render, messages) if continues else render(list(messages))
    ids = tokenizer.encode(shown.written(text))
    if limit is not None and len(ids) >= limit:
        return Prompt(tuple(ids), 0)
    asked = messages[:-1] if continues else messages
    later = tokenizer.encode(shown.written(render([*asked, *_NEXT], add_generation_prompt=False)))
    shared = _system_text(text, render, messages, bool(tools))
    system_boundary = common_prefix(ids, tokenizer.encode(shared)) if shared else 0
    boundary = _before_thinking(tokenizer, ids, _boundary(ids, later))
    return Prompt(tuple(ids), boundary, min(system_boundary, len(ids) - 1), shown.placed(ids))


def _unfinished(render: Callable[..., str], messages: Sequence[Message]) -> str:
    """The conversation up to where the last message ends now: inside its thinking, if it has said nothing yet."""
    *before, last = messages
    said = text_of(last.get("content"))
    part = "content" if said or not last.get("reasoning_content") else "reasoning_content"
    begun = said if part == "content" else last["reasoning_content"]
    text, marker, _ = render([*before, {**last, part: f"{begun}{_MARKER}"}], add_generation_prompt=False).rpartition(
        _MARKER
    )
    if not marker:
        raise ValueError("the model's chat template does not show the last message, so that nothing can go on with it")
    return text


def text_of(content: Any) -> str:
    """The text of a message's content, which may come in parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _system_text(text: str, render: Callable[..., str], messages: Sequence[Message], tools: bool) -> str:
    """How a conversation's text begins whatever its first user says; empty without tools and a system message."""
    system = list(itertools.takewhile(lambda message: message.get("role") in _SYSTEM_ROLES, messages))
    if not system and not tools:
        return ""
    others = [render([*system, {"role": "user", "content": content}]) for content in ("x", "0")]
    return text[: min(common_prefix(text, other) for other in others)]


def append(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    ledger: Sequence[int],
    messages: Sequence[Message],
    *,
    think_is_open: bool = False,
    enable_thinking: bool | None = None,
    shown: ShownMedia = NO_MEDIA,
) -> Prompt:
    """Continues `ledger` as it was generated: closes the open message as the template would, then adds `messages`.

    The whole ledger stays a prefix of the prompt, so the session's turn end is reused. Of media the prompt has those of
    `messages` alone. Raises ChatTemplateError where the template refuses the messages, MediaError where they and
    `shown` do not match.
    """
    history: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARKER}]

    def after_marker(*more: Message, add_generation_prompt: bool) -> str:
        text = template.render(
            [*history, *more], add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
        )
        return text.partition(_MARKER)[2]

    closing = tokenizer.encode(after_marker(add_generation_prompt=False))
    new = tokenizer.encode(shown.written(after_marker(*messages, add_generation_prompt=True)))
    later = tokenizer.encode(shown.written(after_marker(*messages, *_NEXT, add_generation_prompt=False)))
    # Only the closing ids may already be there: an overlap beyond them would swallow part of the new message.
    already = 0
    if not think_is_open:
        for length in range(common_prefix(closing, new), 0, -1):
            if tuple(ledger[-length:]) == tuple(new[:length]):
                already = length
                break
    close = tokenizer.id_of(THINK_CLOSE) if think_is_open else None
    kept = [*ledger, *([close] if close is not None else [])]
    media = shown.placed(new[already:], after=len(kept))
    return Prompt((*kept, *new[already:]), len(kept) + _boundary(new, later) - already, media=media)


_SYSTEM_ROLES = ("system", "developer")

_NEXT: tuple[Message, ...] = ({"role": "assistant", "content": "x"}, {"role": "user", "content": "x"})


def _before_thinking(tokenizer: Tokenizer, ids: Sequence[int], boundary: int) -> int:
    """A template that keeps the thinking of earlier turns opens it alike in all of them. The boundary stays before the
    opener, by which it is known whether a block is open; nothing that a user wrote is so close to it."""
    opened = tokenizer.id_of(THINK_OPEN)
    return next((place for place in range(boundary - 2, boundary) if place >= 0 and ids[place] == opened), boundary)


def _boundary(ids: Sequence[int], later: Sequence[int]) -> int:
    """At least one token stays to be prefilled: a turn start has no anchor."""
    return min(common_prefix(ids, later), len(ids) - 1)


def thinking_budget(tokenizer: Tokenizer, prompt: Prompt, tokens: int | None) -> ThinkingBudget | None:
    """What the engine has to know to keep thinking short. Nothing for a model without think blocks: it has none."""
    end = tokenizer.id_of(THINK_CLOSE)
    if tokens is None or end is None:
        return None
    return ThinkingBudget(
        tokens=tokens,
        close=tuple(tokenizer.encode(f"\n{THINK_CLOSE}\n\n")),
        end=end,
        begin=tokenizer.id_of(THINK_OPEN),
        opened=think_is_open(tokenizer, prompt.opener),
    )


def top_k_of(asked: int) -> int:
    """The engine's top-k: 0 or less keeps all, and so does more than there are tokens; it counts in 32 bits."""
    return min(max(0, asked), 2**31 - 1)


def seed_of(asked: int | None) -> int:
    """64 bits. A negative seed names the same ones as its two's complement; None: random ones."""
    return secrets.randbits(64) if asked is None else asked % 2**64


def choices(submit: Submit, n: int) -> list[Submit]:
    """`n` turns that differ in their draws only. The first one prefills the prompt for all, scores it if asked, and
    leaves the state that is to be kept."""
    names = tuple(f"{submit.turn}.{i}" for i in range(1, n))
    sampling = replace(submit.sampling, prompt_logprobs=None)
    others = [
        replace(submit, turn=name, sampling=replace(sampling, sub=i), after=submit.turn, session=None)
        for i, name in enumerate(names, start=1)
    ]
    return [replace(submit, followers=names), *others]


def after_thinking(tokenizer: Tokenizer, opener: Sequence[int], grammar: Grammar | None) -> Grammar | None:
    """A grammar is that of the answer: where the prompt has opened a think block, it begins after its end."""
    if grammar is None or not think_is_open(tokenizer, opener):
        return grammar
    return replace(grammar, after=tokenizer.id_of(THINK_CLOSE))
