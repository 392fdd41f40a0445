"""The answers of OpenAI's Responses and of Anthropic's messages, for the description of the interface."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from deployment.openapi.answers import Cached, Reasoned

_EXACT = ConfigDict(extra="forbid")


# ------------------------------------------------------------------------------------------------ Responses


class OutputText(BaseModel):
    model_config = _EXACT

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class InputText(BaseModel):
    model_config = _EXACT

    type: Literal["input_text"]
    text: str


class InputImage(BaseModel):
    """Of an image that was sent its digest is kept, which is not shown."""

    model_config = _EXACT

    type: Literal["input_image"]
    image_url: None
    detail: Literal["auto"]


class OutputThinking(BaseModel):
    model_config = _EXACT

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    model_config = _EXACT

    id: str
    type: Literal["reasoning"]
    status: str
    summary: list[Any]
    content: list[OutputThinking]


class ToldMessage(BaseModel):
    model_config = _EXACT

    id: str
    type: Literal["message"]
    status: str
    role: Literal["user", "assistant", "system", "developer"]
    content: list[Annotated[OutputText | InputText | InputImage, Field(discriminator="type")]]


class OutputCall(BaseModel):
    model_config = _EXACT

    id: str
    type: Literal["function_call"]
    status: str
    call_id: str
    name: str
    arguments: str


class CallResult(BaseModel):
    model_config = _EXACT

    id: str
    type: Literal["function_call_output"]
    status: str
    call_id: str
    output: str | list[Annotated[InputText | InputImage, Field(discriminator="type")]]


OutputItem = Annotated[OutputReasoning | ToldMessage | OutputCall, Field(discriminator="type")]
InputItem = Annotated[OutputReasoning | ToldMessage | OutputCall | CallResult, Field(discriminator="type")]


class ResponseUsage(BaseModel):
    model_config = _EXACT

    input_tokens: int
    input_tokens_details: Cached
    output_tokens: int
    output_tokens_details: Reasoned
    total_tokens: int


class Incomplete(BaseModel):
    model_config = _EXACT

    reason: Literal["max_output_tokens"]


class Effort(BaseModel):
    model_config = _EXACT

    effort: str | None
    summary: None


class Response(BaseModel):
    """With what it was asked for. `usage` is null while it is not complete."""

    model_config = _EXACT

    id: str
    object: Literal["response"]
    status: Literal["completed", "incomplete", "failed", "cancelled", "in_progress"]
    background: bool
    created_at: int
    error: None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float
    frequency_penalty: float
    previous_response_id: str | None
    reasoning: Effort
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class InputItems(BaseModel):
    model_config = _EXACT

    object: Literal["list"]
    data: list[InputItem]
    has_more: bool
    first_id: str | None
    last_id: str | None


class InputTokens(BaseModel):
    model_config = _EXACT

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(BaseModel):
    model_config = _EXACT

    id: str
    object: Literal["response"]
    deleted: Literal[True]


# ------------------------------------------------------------------------------------------------ messages


class AnswerText(BaseModel):
    model_config = _EXACT

    type: Literal["text"]
    text: str


class AnswerThinking(BaseModel):
    model_config = _EXACT

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnswerToolUse(BaseModel):
    model_config = _EXACT

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    """`input_tokens`: those of the prompt that were computed; `cache_read_input_tokens`: those that were not again."""

    model_config = _EXACT

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(BaseModel):
    model_config = _EXACT

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[AnswerText | AnswerThinking | AnswerToolUse, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    model_config = _EXACT

    input_tokens: int


class MessageFault(BaseModel):
    model_config = _EXACT

    type: str
    message: str


class MessageError(BaseModel):
    """The form that errors have in this interface."""

    model_config = _EXACT

    type: Literal["error"]
    error: MessageFault
    request_id: str
