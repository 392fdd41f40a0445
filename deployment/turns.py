"""From messages to token ids and back: the two ways to continue a session (decision 18), and a turn's text.

`full_history` is for a request that carries everything, `append` for one that carries only what is new.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deployment.engine.messages import Grammar, Submit, ThinkingBudget
from deployment.shown_media import NO_MEDIA, ShownMedia
from model.chat_template import ChatTemplate
from model.tokenizer import Detokenizer, Tokenizer
from state.media import Placed

Message = dict[str, Any]

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

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


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


def full_history(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    enable_thinking: bool | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
    limit: int | None = None,
    shown: ShownMedia = NO_MEDIA,
) -> Prompt:
    """Renders the whole conversation. The boundary is decision 17's: before the generation prompt's think opener.

    A prompt of `limit` tokens or more, which will be refused, has no boundary: finding one takes as long as the prompt.
    Raises ChatTemplateError where the template refuses the messages, MediaError where they and `shown` do not match.
    """
    render = partial(template.render, tools=list(tools) if tools else None, enable_thinking=enable_thinking)
    text = render(list(messages))
    ids = tokenizer.encode(shown.written(text))
    if limit is not None and len(ids) >= limit:
        return Prompt(tuple(ids), 0)
    later = tokenizer.encode(shown.written(render([*messages, *_NEXT], add_generation_prompt=False)))
    shared = _system_text(text, render, messages, bool(tools))
    system_boundary = common_prefix(ids, tokenizer.encode(shared)) if shared else 0
    return Prompt(tuple(ids), _boundary(ids, later), min(system_boundary, len(ids) - 1), shown.placed(ids))


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


def _boundary(ids: Sequence[int], later: Sequence[int]) -> int:
    """At least one token stays to be prefilled: a turn start has no anchor."""
    return min(common_prefix(ids, later), len(ids) - 1)


def think_is_open(tokenizer: Tokenizer, generated: Sequence[int]) -> bool:
    """Whether a think block is open at the end of `generated`: the ids of the generation prompt and after."""
    opened, closed = tokenizer.id_of(THINK_OPEN), tokenizer.id_of(THINK_CLOSE)
    for token in reversed(generated):
        if token == closed:
            return False
        if token == opened:
            return True
    return False


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


class TurnText:
    """Turns a turn's ids into what the client sees, and splits thinking from the answer.

    `opener`: the prompt's ids from the stable boundary on, which say whether the template opened a think block.
    """

    def __init__(self, tokenizer: Tokenizer, opener: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._close = tokenizer.id_of(THINK_CLOSE)
        self._thinking = think_is_open(tokenizer, opener)
        self._strip = False
        self.reasoning = ""
        self.content = ""

    def push(self, ids: Sequence[int], text_cut: int = 0) -> tuple[str, str]:
        """New (reasoning, content) text of these ids; incomplete characters wait for the next ones.

        `text_cut`: that many characters at the end do not count, and nothing comes after them.
        """
        reasoning = ""
        if self._thinking and self._close is not None and self._close in ids:
            at = list(ids).index(self._close)
            reasoning = self._detokenizer.push(ids[:at]) + self._detokenizer.flush()
            self._detokenizer = Detokenizer(self._tokenizer)
            self._thinking, self._strip = False, True
            ids = ids[at + 1 :]
        text = self._detokenizer.push(ids)
        if text_cut:
            text = (text + self._detokenizer.flush())[:-text_cut]
        return self._add(reasoning, text)

    def flush(self) -> tuple[str, str]:
        """What was held back, when the turn is over."""
        return self._add("", self._detokenizer.flush())

    def _add(self, reasoning: str, text: str) -> tuple[str, str]:
        content = ""
        if self._thinking:
            reasoning += text
        else:
            # The blank line between </think> and the answer belongs to the template, not to the answer.
            content = text.lstrip("\n") if self._strip else text
            self._strip = self._strip and not content
        self.reasoning += reasoning
        self.content += content
        return reasoning, content

    @property
    def message(self) -> Message:
        """The assistant's message as the client saw it."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message
