"""What does a choice of a turn say? Its text, before the first word, made anew for whoever begins in the middle; and
what stays of it in the transcript."""

from __future__ import annotations

from deployment.parsing.turn_text import TurnText, assistant_message
from deployment.turns import Message, Prompt, text_of
from deployment.wire import TurnRequest
from model.tokenizer import Tokenizer


def turn_text(tokenizer: Tokenizer, request: TurnRequest, prompt: Prompt, choice: int) -> TurnText:
    tools = request.tools.schemas if request.tools is not None else None
    return TurnText(tokenizer, prompt.opener, tools, f"{request.turn}.{choice}")


def told_in_all(request: TurnRequest, text: TurnText) -> tuple[Message, ...]:
    """The messages that a turn brought, and its answer as the client saw it: one message with what it went on with."""
    if not request.continues:
        return (*request.messages, text.message)
    *before, begun = request.messages
    reasoning = (begun.get("reasoning_content") or "") + text.reasoning
    content = text_of(begun.get("content")) + text.content
    return (*before, {**begun, **assistant_message(reasoning, content, text.calls)})
