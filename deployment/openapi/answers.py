"""The answers of OpenAI's two oldest interfaces and of routes about the server, for the description of the interface;
those of sessions are in `session_answers.py`.

What answers with them writes dictionaries; that these have the form is tested with real answers. A field with None for
its default may be left out.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

_EXACT = ConfigDict(extra="forbid", protected_namespaces=())


# ------------------------------------------------------------------------------------------------ refusals


class Fault(BaseModel):
    model_config = _EXACT

    message: str
    type: str
    param: str | None
    code: str


class Error(BaseModel):
    """`param`: the field at fault. `code` stays the same from version to version; docs/http.md lists them."""

    model_config = _EXACT

    error: Fault


# ------------------------------------------------------------------------------------------------ turns


class Cached(BaseModel):
    model_config = _EXACT

    cached_tokens: int


class Reasoned(BaseModel):
    model_config = _EXACT

    reasoning_tokens: int


class Usage(BaseModel):
    model_config = _EXACT

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Cached
    completion_tokens_details: Reasoned


class MetaInfo(BaseModel):
    """How an answer came about. `rounds`: accepted drafts of each."""

    model_config = _EXACT

    replica: str
    turn: str
    seed: int
    spec_accept_length: float
    spec_verify_ct: int
    rounds: list[int]
    seconds: float


class Resume(BaseModel):
    """What it cost to go on in the session, and where it stands now."""

    model_config = _EXACT

    id: str
    epoch: str
    hit: Literal["device", "host", "peer", "disk", "none"]
    reused: int
    prefilled: int
    frontier: int | None
    replica: str


class ToldFunction(BaseModel):
    model_config = _EXACT

    name: str
    arguments: str


class ToldCall(BaseModel):
    model_config = _EXACT

    id: str
    type: Literal["function"]
    function: ToldFunction


class ChatMessage(BaseModel):
    model_config = _EXACT

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToldCall] | None = None
    refusal: None


class ScoredToken(BaseModel):
    model_config = _EXACT

    token: str
    logprob: float | None
    bytes: list[int]


class ToldToken(ScoredToken):
    top_logprobs: list[ScoredToken]


class ChatLogprobs(BaseModel):
    model_config = _EXACT

    content: list[ToldToken]
    refusal: None


class Ending(BaseModel):
    """What each choice says of its end. With several choices each has its own `meta_info`."""

    model_config = _EXACT

    index: int
    finish_reason: str
    stop_reason: str | int | None
    meta_info: MetaInfo | None = None


class ChatChoice(Ending):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class Whole(BaseModel):
    model_config = _EXACT

    id: str
    created: int
    model: str
    usage: Usage
    session: Resume | None = None
    meta_info: MetaInfo | None = None


class ChatCompletion(Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextLogprobs(BaseModel):
    model_config = _EXACT

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class TextChoice(Ending):
    text: str
    logprobs: TextLogprobs | None


class TextCompletion(Whole):
    object: Literal["text_completion"]
    choices: list[TextChoice]


# ------------------------------------------------------------------------------------------------ tokens, server


class Tokenized(BaseModel):
    model_config = _EXACT

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    model_config = _EXACT

    prompt: str


class Version(BaseModel):
    model_config = _EXACT

    version: str


class Model(BaseModel):
    """`root`: the name that answers have; `id` may be another one of the same model."""

    model_config = _EXACT

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    speculative: Literal["none", "dflash", "dflash2"]


class Listing(BaseModel):
    model_config = _EXACT

    object: Literal["list"]


class Models(Listing):
    data: list[Model]


class Replica(BaseModel):
    """`engine`: figures of its engine, by names that may change."""

    model_config = _EXACT

    id: str
    object: Literal["replica"]
    pid: int
    node: str
    model: str
    backend: str
    sessions: int
    running: int
    engine: dict[str, Any]


class Replicas(Listing):
    data: list[Replica]


class Health(BaseModel):
    model_config = _EXACT

    status: Literal["ok"]
    replicas: int
