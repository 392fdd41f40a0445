"""Items of the Responses interface, and the messages of a chat completion that say the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Tag, ValidationInfo, field_validator, model_validator
from pydantic.types import Discriminator

from deployment.content_parts import checked, responses_part
from deployment.tool_schemas import an_object

_LENIENT = ConfigDict(extra="ignore")


class Part(BaseModel):
    """A part of a message. `image_url`: where an image is, or what it is."""

    model_config = _LENIENT

    type: Literal["input_text", "output_text", "text", "input_image", "refusal"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _image(cls, part: Any) -> Any:
        shown = isinstance(part, dict) and part.get("type") == "input_image"
        return checked(responses_part, part) if shown else part

    @property
    def chat(self) -> dict[str, Any]:
        if self.type == "input_image":
            return {"type": "image_url", "image_url": {"url": self.image_url}}
        return {"type": "text", "text": self.text or self.refusal or ""}


class MessageItem(BaseModel):
    model_config = _LENIENT

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]

    @field_validator("content")
    @classmethod
    def _shown_to_the_model(cls, content: str | list[Part], info: ValidationInfo) -> str | list[Part]:
        if info.data.get("role") == "assistant" and any(part.type == "input_image" for part in _parts(content)):
            raise ValueError("an assistant's message has no images")
        return content


class CallItem(BaseModel):
    model_config = _LENIENT

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, AfterValidator(an_object)]


class ResultItem(BaseModel):
    model_config = _LENIENT

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]


class ReasoningText(BaseModel):
    model_config = _LENIENT

    text: str = ""


class ReasoningItem(BaseModel):
    model_config = _LENIENT

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


def _kind(item: Any) -> Any:
    return item.get("type") or "message" if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Field(discriminator=Discriminator(_kind)),
]


def messages_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Thinking, text and calls that an assistant had in a row are one message of its."""
    messages: list[dict[str, Any]] = []
    open_message: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, ResultItem) or (isinstance(item, MessageItem) and item.role != "assistant"):
            open_message = None
            messages.append(_given(item))
            continue
        if open_message is None or (isinstance(item, ReasoningItem) and "tool_calls" in open_message):
            open_message = {"role": "assistant", "content": ""}
            messages.append(open_message)
        _add(open_message, item)
    return messages


def media_places(items: Iterable[Item]) -> list[str]:
    """What holds each image, in the order in which `messages_of` has them."""
    return [
        f"input[{number}].{name}[{index}].image_url"
        for number, item in enumerate(items)
        for name, content in (("content", getattr(item, "content", None)), ("output", getattr(item, "output", None)))
        for index, part in enumerate(_parts(content))
        if part.type == "input_image"
    ]


def _parts(content: Any) -> list[Part]:
    return [part for part in content if isinstance(part, Part)] if isinstance(content, list) else []


def _given(item: MessageItem | ResultItem) -> dict[str, Any]:
    content = item.output if isinstance(item, ResultItem) else item.content
    said = content if isinstance(content, str) else [part.chat for part in content]
    if isinstance(item, ResultItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": said}
    return {"role": item.role, "content": said}


def _add(message: dict[str, Any], item: MessageItem | CallItem | ReasoningItem) -> None:
    match item:
        case MessageItem(content=content):
            said = content if isinstance(content, str) else "".join(part.chat.get("text", "") for part in content)
            message["content"] += said
        case CallItem():
            call = {"name": item.name, "arguments": item.arguments}
            message.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": call})
        case ReasoningItem():
            thought = "".join(part.text for part in item.content or ())
            if thought:
                message["reasoning_content"] = message.get("reasoning_content", "") + thought


# ------------------------------------------------------------------------------------------------ and back


def output_items(message: dict[str, Any], turn: str) -> list[dict[str, Any]]:
    """An assistant's message as items, whose ids come from its turn's."""
    items: list[dict[str, Any]] = []

    def add(prefix: str, kind: str, **fields: Any) -> None:
        items.append({"id": item_id(prefix, turn, len(items)), "type": kind, "status": "completed", **fields})

    if message.get("reasoning_content"):
        add("rs", "reasoning", summary=[], content=[{"type": "reasoning_text", "text": message["reasoning_content"]}])
    if message.get("content"):
        add("msg", "message", role="assistant", content=[output_text(message["content"])])
    for call in message.get("tool_calls") or ():
        function = call["function"]
        add("fc", "function_call", call_id=call["id"], name=function["name"], arguments=function["arguments"])
    return items


def input_items(messages: Sequence[dict[str, Any]], turn: str) -> list[dict[str, Any]]:
    """The messages that a turn brought, as items."""
    items: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        name, said = item_id("msg", turn, 1000 + index), message["content"] or ""
        match message["role"]:
            case "assistant":
                items += output_items(message, f"{turn}{index}")
            case "tool":
                items.append(
                    {"id": name, "type": "function_call_output", "call_id": message.get("tool_call_id", ""),
                     "output": said if isinstance(said, str) else _input_parts(said), "status": "completed"}
                )  # fmt: skip
            case role:
                items.append({"id": name, "type": "message", "role": role, "status": "completed",
                              "content": _input_parts(said)})  # fmt: skip
    return items


def _input_parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    return [
        {"type": "input_text", "text": part["text"]}
        if part.get("type") == "text"
        else {"type": "input_image", "image_url": None, "detail": "auto"}  # a session keeps its digest
        for part in content
    ]


def output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def item_id(prefix: str, turn: str, index: int) -> str:
    return f"{prefix}_{turn}{index:02}"
