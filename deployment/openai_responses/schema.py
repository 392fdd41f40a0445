"""A request of the Responses interface, and the same as a chat completion's."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationInfo, field_validator

from deployment.openai_responses.items import Item, media_places, messages_of
from deployment.schemas import AnswerBody, Effort

_LENIENT = ConfigDict(extra="ignore")


class FunctionTool(BaseModel):
    """One that the client runs. Those that OpenAI's servers run have other types."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None

    @property
    def function(self) -> dict[str, Any]:
        given = self.model_dump(exclude_none=True, include={"name", "description", "parameters", "strict"})
        return {"type": "function", "function": given}


class NamedFunction(BaseModel):
    model_config = _LENIENT

    type: Literal["function"]
    name: str


class Format(BaseModel):
    """What the answer must be."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"] = "text"
    document: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(BaseModel):
    model_config = _LENIENT

    format: Format = Format()
    verbosity: Literal["medium"] | None = None


class Reasoning(BaseModel):
    model_config = _LENIENT

    effort: Effort | None = None


class PromptBody(BaseModel):
    """What `input_tokens` counts."""

    model_config = _LENIENT

    model: str | None = None
    input: str | list[Item] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: StrictBool = True
    reasoning: Reasoning = Reasoning()
    text: TextOptions = TextOptions()
    truncation: Literal["disabled"] = "disabled"
    conversation: None = None
    prompt: None = None

    @property
    def given(self) -> list[dict[str, Any]]:
        """The new messages, in the form of a chat completion's."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else messages_of(self.input)

    @property
    def media_places(self) -> list[str]:
        """What holds each image of the new messages."""
        return [] if isinstance(self.input, str) else media_places(self.input)

    def chat(self, before: list[dict[str, Any]]) -> dict[str, Any]:
        """The body of a chat completion that carries all of it. `before`: messages of the responses that this one
        follows."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        choice = self.tool_choice
        named = isinstance(choice, NamedFunction)
        return {
            "messages": [*system, *before, *self.given],
            "tools": [tool.function for tool in self.tools],
            "tool_choice": {"type": "function", "function": {"name": choice.name}} if named else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort,
            # so that the next prompt begins with all of this one and of its answer
            "chat_template_kwargs": {"preserve_thinking": True},
            "response_format": self._response_format,
        }

    @property
    def _response_format(self) -> dict[str, Any]:
        asked = self.text.format
        schema = {"json_schema": {"schema": asked.document}} if asked.document is not None else {}
        return {"type": asked.type, **schema}


class ResponsesBody(PromptBody, AnswerBody):
    """Thinking is told as it is, so that who wants it encrypted has it anyway."""

    max_output_tokens: int | None = Field(default=None, strict=True, ge=1)
    temperature: float | None = Field(default=None, strict=True, ge=0)
    top_p: float | None = Field(default=None, strict=True, gt=0, le=1)
    stream: StrictBool = False
    store: StrictBool = True
    metadata: dict[str, str] = Field(default_factory=dict)
    background: StrictBool = False
    max_tool_calls: None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    top_logprobs: Literal[0] | None = None

    @field_validator("background")
    @classmethod
    def _stored(cls, background: bool, info: ValidationInfo) -> bool:
        if background and info.data.get("store") is False:
            raise ValueError("a response in the background is asked for by its id, so that store must be true")
        return background

    def chat(self, before: list[dict[str, Any]]) -> dict[str, Any]:
        given = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_output_tokens}
        return {**super().chat(before), **given}

    @property
    def facts(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        asked = self.text.format.model_dump(exclude_none=True, by_alias=True)
        choice = self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.model_dump()
        return {
            "background": self.background,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "store": self.store,
            "text": {"format": asked},
            "tool_choice": choice,
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools],
            "truncation": "disabled",
        }
