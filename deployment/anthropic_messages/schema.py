"""A request of the Anthropic Messages interface, and the same as a chat completion's.

`cache_control` is a hint that changes nothing here, where every prefix is kept while there is room.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationInfo, field_validator, model_validator

from deployment.content_parts import anthropic_part, checked
from deployment.schemas import AnswerBody, StopString

_LENIENT = ConfigDict(extra="ignore")


class TextBlock(BaseModel):
    model_config = _LENIENT

    type: Literal["text"]
    text: str


class ImageBlock(BaseModel):
    model_config = _LENIENT

    type: Literal["image"]
    source: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _image(cls, block: Any) -> Any:
        return checked(anthropic_part, block)

    @property
    def url(self) -> str:
        if self.source.get("type") == "base64":
            return f"data:{self.source.get('media_type')};base64,{self.source.get('data')}"
        return str(self.source.get("url"))


class ToolUseBlock(BaseModel):
    model_config = _LENIENT

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(BaseModel):
    model_config = _LENIENT

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] = ""


class ThinkingBlock(BaseModel):
    """The signature, which is ours, says nothing that we need."""

    model_config = _LENIENT

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(BaseModel):
    """Thinking of another server, which nobody can read here."""

    model_config = _LENIENT

    type: Literal["redacted_thinking"]


Block = Annotated[
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedBlock, Field(discriminator="type")
]


_BLOCKS = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Which blocks a message may have, by its role."""


class MessageBody(BaseModel):
    """A system message may come in mid-conversation."""

    model_config = _LENIENT

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @field_validator("content")
    @classmethod
    def _of_its_role(cls, content: str | list[Block], info: ValidationInfo) -> str | list[Block]:
        role = info.data.get("role", "")
        known = _BLOCKS.get(role)
        for index, block in enumerate(content if known and not isinstance(content, str) else ()):
            if known and not isinstance(block, str) and block.type not in known:
                named = f"block {index} of a message of role {role!r}"
                raise ValueError(f"{named} must be one of {', '.join(known)}, not {block.type}")
        return content

    @property
    def blocks(self) -> list[Block]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class Tool(BaseModel):
    """One that the client runs. Those that Anthropic's servers run have other types."""

    model_config = _LENIENT

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: StrictBool | None = None

    @property
    def function(self) -> dict[str, Any]:
        given = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        strict = {"strict": True} if self.strict else {}
        return {
            "type": "function",
            "function": {name: value for name, value in given.items() if value is not None} | strict,
        }


class ToolChoice(BaseModel):
    model_config = _LENIENT

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool = False

    @property
    def openai(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type


class Thinking(BaseModel):
    """Off where nobody asks for it. A model that knows no degrees takes `adaptive` for on."""

    model_config = _LENIENT

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(default=None, strict=True, ge=1024)


class OutputFormat(BaseModel):
    model_config = _LENIENT

    type: Literal["json_schema"]
    document: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    model_config = _LENIENT

    format: OutputFormat | None = None


class PromptBody(BaseModel):
    """What `count_tokens` counts."""

    model_config = _LENIENT

    model: str
    messages: list[MessageBody] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    @field_validator("messages")
    @classmethod
    def _no_open_call(cls, messages: list[MessageBody]) -> list[MessageBody]:
        if any(isinstance(block, ToolUseBlock) for block in messages[-1].blocks):
            raise ValueError("the last one has tool_use blocks, whose tool_result blocks must follow")
        return messages

    @property
    def continues(self) -> bool:
        """Whether the answer has been begun, by an assistant's message at the end."""
        return self.messages[-1].role == "assistant"

    @property
    def media_places(self) -> list[str]:
        """What holds each image, in the order in which `chat` has them."""
        return [
            f"{place}.source.{'data' if block.source['type'] == 'base64' else 'url'}"
            for number, message in enumerate(self.messages)
            for place, block in _images(message.blocks, f"messages[{number}].content")
        ]

    @property
    def chat(self) -> dict[str, Any]:
        """The same as a chat completion's body."""
        system = self.system if isinstance(self.system, str) else "\n\n".join(block.text for block in self.system or ())
        messages = [{"role": "system", "content": system}] if system else []
        for message in self.messages:
            messages += _assistant(message) if message.role == "assistant" else _given(message)
        thinking = self.thinking or Thinking(type="disabled")
        return {
            "messages": messages,
            "tools": [tool.function for tool in self.tools or ()],
            "tool_choice": self.tool_choice.openai if self.tool_choice else None,
            "parallel_tool_calls": not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            "chat_template_kwargs": {"enable_thinking": thinking.type != "disabled"},
            "thinking_budget": thinking.budget_tokens if thinking.type == "enabled" else None,
            "continue_final_message": self.continues,
        }


class MessagesBody(PromptBody, AnswerBody):
    max_tokens: int = Field(strict=True, ge=1)
    stop_sequences: list[StopString] | None = Field(default=None, max_length=64)
    stream: StrictBool = False
    temperature: float | None = Field(default=None, strict=True, ge=0)
    top_p: float | None = Field(default=None, strict=True, gt=0, le=1)
    top_k: int | None = Field(default=None, strict=True, ge=-1)
    output_config: OutputConfig | None = None
    mcp_servers: list[Any] | None = Field(default=None, max_length=0)
    container: None = None

    @field_validator("stop_sequences")
    @classmethod
    def _of_ink(cls, stop: list[str] | None) -> list[str] | None:
        """As Anthropic's own server has it."""
        if any(not string.strip() for string in stop or ()):
            raise ValueError("each stop sequence must contain non-whitespace")
        return stop

    @property
    def chat(self) -> dict[str, Any]:
        asked = self.output_config.format if self.output_config else None
        schema = {"type": "json_schema", "json_schema": {"schema": asked.document}} if asked else None
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        given = {name: getattr(self, name) for name in names}
        return {**super().chat, **given, "response_format": schema}


def _assistant(message: MessageBody) -> list[dict[str, Any]]:
    text = "".join(block.text for block in message.blocks if isinstance(block, TextBlock))
    thought = "\n".join(block.thinking for block in message.blocks if isinstance(block, ThinkingBlock))
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": _json(one.input)}}
        for one in message.blocks
        if isinstance(one, ToolUseBlock)
    ]
    said: dict[str, Any] = {"role": "assistant", "content": text}
    return [said | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})]


def _given(message: MessageBody) -> Iterator[dict[str, Any]]:
    """A user's message: results of calls are messages of their own, and come first, as the calls are waiting."""
    for block in message.blocks:
        if isinstance(block, ToolResultBlock):
            parts = block.content if isinstance(block.content, str) else [_part(one) for one in block.content]
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": parts}
    shown = [block for block in message.blocks if isinstance(block, TextBlock | ImageBlock)]
    if shown:
        texts = [block.text for block in shown if isinstance(block, TextBlock)]
        plain = len(texts) == len(shown)
        yield {"role": message.role, "content": "\n".join(texts) if plain else [_part(one) for one in shown]}


def _images(blocks: Sequence[Block], place: str) -> Iterator[tuple[str, ImageBlock]]:
    """As `_given` has them: those of results of calls first."""
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
            yield from _images(block.content, f"{place}[{index}].content")
    for index, block in enumerate(blocks):
        if isinstance(block, ImageBlock):
            yield f"{place}[{index}]", block


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    return {"type": "image_url", "image_url": {"url": block.url}}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
