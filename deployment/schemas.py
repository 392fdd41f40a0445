"""Request bodies. A field that would change the answer and is not supported is refused by name, never ignored."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticUndefined

from deployment.engine.commands import Grammar, LogprobsMode
from deployment.engine.tool_grammar import functions_of
from deployment.json_reading import json_type, shown
from deployment.tool_schemas import CalledBefore, NamedTool

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "typical_p": (1,),
    "top_a": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
    "logits_processors": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "regex": (),
    "ebnf": (),
    "documents": ([],),
    "chat_template": (),
    "lora_path": (),
    "cache_salt": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "verbosity": (),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "n": (1,),
    "priority": (0,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "chat_template_kwargs": ({},),
    "response_format": ({"type": "text"},),
}
"""Fields of these interfaces, and of servers that speak them, that would change the answer where they are not
supported, with the values that ask for nothing. null is always one, and so is what a field of a turn is where it is
left out. What nobody knows is ignored, as clients expect of these interfaces."""


NEUTRAL_WITHOUT_TOOLS: dict[str, tuple[Any, ...]] = {"parallel_tool_calls": (False,)}
"""Beside those, where a request offers no tools."""


class Message(BaseModel):
    """One message. Content is a string or a list of parts (`deployment/content_parts.py`)."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[CalledBefore] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_or_parts(cls, content: Any) -> Any:
        """What a part says is read later, with its place."""
        if content is None or isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise ValueError("content must be a string or a list of parts")
        for part in content:
            if not isinstance(part, dict):
                raise ValueError(f"a part must be an object, not {json_type(part)}")
        return content


UsageTold = Literal["never", "end", "always"]
"""Where a stream says what it used: in a chunk of its own at the end, or in each chunk too."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False

    @property
    def usage_told(self) -> UsageTold:
        if not self.include_usage:
            return "never"
        return "always" if self.continuous_usage_stats else "end"


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateOptions(BaseModel):
    """`reasoning_strength` is what some models' templates call their effort."""

    model_config = ConfigDict(extra="forbid")

    enable_thinking: StrictBool | None = None
    preserve_thinking: StrictBool | None = None
    reasoning_effort: Effort | None = None
    reasoning_strength: Effort | None = None


class JsonSchema(BaseModel):
    """`name`, `description` and `strict` change nothing: a schema is always kept to."""

    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)

    name: str | None = None
    description: str | None = None
    strict: StrictBool | None = None
    document: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """What the answer must be: any `text`, a `json_object`, or what a `json_schema` describes."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            wanted = "must have" if self.json_schema is None else "must not have"
            raise ValueError(f"a response_format of type {self.type!r} {wanted} a json_schema")
        return self

    @property
    def grammar(self) -> Grammar | None:
        if self.json_schema is not None:
            return Grammar("json_schema", json.dumps(self.json_schema.document, ensure_ascii=False))
        return Grammar("json_object") if self.type == "json_object" else None


TokenId = Annotated[int, Field(ge=0, strict=True)]
StopString = Annotated[str, Field(strict=True, min_length=1, max_length=1024)]
StopStrings = Annotated[list[StopString], Field(max_length=4)]
MAX_DIGITS = 10
"""Of a token id that is a key, and text therefore: ids are of 32 bits."""

Bias = Annotated[float, Field(strict=True, ge=-100, le=100)]


def neutral_values() -> dict[str, tuple[Any, ...]]:
    """Every field that would change an answer somewhere, with the values that ask for nothing beside null."""
    defaults = {name: field.default for name, field in TurnBody.model_fields.items() if name not in TELL_ONLY}
    of_turns = {name: () if one in (None, PydanticUndefined) else (one,) for name, one in defaults.items()}
    return {name: (*of_turns.get(name, ()), *NEUTRAL.get(name, ())) for name in [*NEUTRAL, *of_turns]}


TELL_ONLY = ("model", "stream", "stream_options")
"""Fields of a turn that say how its answer is told, and not what it is."""


def _with_neutral(schema: dict[str, Any]) -> None:
    """For descriptions of the interface: what is ignored, and what must ask for nothing."""
    schema["additionalProperties"] = True
    for name, values in neutral_values().items():
        schema["properties"].setdefault(name, {"enum": [*values, *NEUTRAL_WITHOUT_TOOLS.get(name, ()), None]})


class AnswerBody(BaseModel):
    """A request for an answer, in whatever interface: it may hold what nobody knows, but nothing that would change the
    answer elsewhere and does not here."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=_with_neutral)


class GenerationBody(AnswerBody):
    """What every request for text may say, whatever its prompt looks like."""

    model: str | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, strict=True, ge=0)
    top_p: float | None = Field(default=None, strict=True, gt=0, le=1)
    top_k: int | None = Field(default=None, strict=True, ge=-1)
    seed: int | None = Field(default=None, strict=True, ge=-(2**63), lt=2**64)
    min_p: float | None = Field(default=None, strict=True, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, strict=True, ge=0.01, le=100)
    presence_penalty: float | None = Field(default=None, strict=True, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, strict=True, ge=-2, le=2)
    logit_bias: dict[str, Bias] | None = None
    min_tokens: int | None = Field(default=None, strict=True, ge=0)
    reproducible: StrictBool = False
    logprobs_mode: LogprobsMode = "raw_logprobs"
    max_tokens: int | None = Field(default=None, strict=True, ge=1)
    stop_token_ids: list[TokenId] | None = None
    stop: list[StopString] | None = Field(default=None, max_length=4)
    include_stop_str_in_output: StrictBool = False
    n: int | None = Field(default=None, strict=True, ge=1, le=8)
    ignore_eos: StrictBool = False
    drafting: StrictBool = True
    store: StrictBool | None = None
    priority: Literal["interactive", "background"] = "interactive"
    queue_seconds: float | None = Field(default=None, strict=True, ge=0)
    response_format: ResponseFormat | None = None

    @field_validator("temperature", "queue_seconds")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value

    @field_validator("priority", mode="before", json_schema_input_type=Literal["interactive", "background"] | int)
    @classmethod
    def _of_number(cls, priority: Any) -> Any:
        """Other servers count: 0 is the usual one, and more is later."""
        if type(priority) is int:
            return "background" if priority > 0 else "interactive"
        return priority

    @field_validator("stop", mode="before", json_schema_input_type=StopString | StopStrings)
    @classmethod
    def _one_or_more(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token in bias or {}:
            if not token.isascii() or not token.isdigit() or len(token) > MAX_DIGITS:
                raise ValueError(f"keys must be token ids, got {shown(token)}")
        return bias

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """(token id, added to its logit)."""
        return tuple((int(token), added) for token, added in (self.logit_bias or {}).items())

    @property
    def grammar(self) -> Grammar | None:
        return self.response_format.grammar if self.response_format else None

    @property
    def usage_told(self) -> UsageTold:
        return (self.stream_options or StreamOptions()).usage_told


class TurnBody(GenerationBody):
    """What a chat completion and an append turn have in common."""

    messages: list[Message]
    max_completion_tokens: int | None = Field(default=None, strict=True, ge=1)
    logprobs: StrictBool | None = None
    top_logprobs: int | None = Field(default=None, strict=True, ge=0, le=20)
    thinking_budget: int | None = Field(default=None, strict=True, ge=0)
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Effort | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool = True
    continue_final_message: StrictBool = False
    add_generation_prompt: StrictBool | None = None

    @field_validator("messages")
    @classmethod
    def _not_empty(cls, messages: list[Message]) -> list[Message]:
        if not messages:
            raise ValueError("at least one message is needed")
        return messages

    @field_validator("top_logprobs")
    @classmethod
    def _asked_for(cls, top: int | None, info: ValidationInfo) -> int | None:
        if top and not info.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return top

    @field_validator("tools")
    @classmethod
    def _functions(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if tools:
            functions_of(tools)  # its refusal is a ValueError that says which
        return tools

    @property
    def thinks(self) -> bool | None:
        """Whether the model is asked to think; it knows no degrees. None: as its template has it."""
        options = self.chat_template_kwargs or TemplateOptions()
        effort = options.reasoning_effort or options.reasoning_strength or self.reasoning_effort
        if options.enable_thinking is None and effort is not None:
            return effort != "none"
        return options.enable_thinking

    @property
    def preserves_thinking(self) -> bool | None:
        """Whether earlier thinking stays in the prompt. None: as its template has it."""
        return self.chat_template_kwargs.preserve_thinking if self.chat_template_kwargs else None

    @property
    def alternatives(self) -> int | None:
        """How many are told beside each token's log-probability; None: none is told."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_budget(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class SessionBody(BaseModel):
    """`id`: the new session's name; None: one with 128 random bits."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = None


class NewSessionBody(SessionBody):
    """`store` False: it is kept in the memory of one node, and nowhere else."""

    store: StrictBool = True


class CheckpointBody(BaseModel):
    """`name`: by which the session's checkpoint is called; None: one of 8 hex digits."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = None


class ForkBody(SessionBody):
    """Where the fork begins: at one of these, or at the session's end."""

    checkpoint: str | None = None
    turn: str | None = None
    frontier: int | None = Field(default=None, strict=True, ge=0)

    @field_validator("turn", "frontier")
    @classmethod
    def _one_place(cls, place: str | int | None, info: ValidationInfo) -> str | int | None:
        if any(info.data.get(other) is not None for other in ("checkpoint", "turn")):
            raise ValueError("at most one of checkpoint, turn and frontier says where the fork begins")
        return place


class MigrateBody(BaseModel):
    """`to`: a replica's id; None lets the server choose another one than the owner."""

    model_config = ConfigDict(extra="forbid")

    to: str | None = None
