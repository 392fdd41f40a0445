"""What is left of a response in the session that it is in: a note in its turn's record, and its messages.

A session may have come in a document that lies. What could be no response of ours is none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from deployment.wire import SessionInfo

_KEPT = ConfigDict(extra="allow")


# ------------------------------------------------------------------------------------------------ the note


class Facts(BaseModel):
    """What a response repeats of its request, but for what is long."""

    model_config = _KEPT

    created_at: int


class Newest(BaseModel):
    """What is long, and kept until another turn follows."""

    model_config = ConfigDict(extra="forbid")

    tools: list[dict[str, Any]] = Field(default_factory=list)
    instructions: str | None = None


class Note(BaseModel):
    """The response's own messages are those from `begin` to `end` of its conversation, of which the last is the
    answer. `instructed`: the sha256 of its instructions, which stand before the conversation; None: it had none."""

    model_config = ConfigDict(extra="ignore")

    facts: Facts
    begin: int = Field(ge=0)
    end: int = Field(ge=1)
    instructed: str | None
    while_newest: Newest = Field(default_factory=Newest)  # turn_records.WHILE_NEWEST

    @classmethod
    def of(cls, facts: dict[str, Any], begin: int, end: int) -> Note:
        long = {name: facts[name] for name in Newest.model_fields}
        short = {name: value for name, value in facts.items() if name not in long}
        instructed = _sha256(long["instructions"]) if long["instructions"] else None
        return cls(facts=Facts(**short), begin=begin, end=end, instructed=instructed, while_newest=Newest(**long))

    @property
    def text(self) -> str:
        return self.model_dump_json()

    @property
    def all_facts(self) -> dict[str, Any]:
        return {**self.while_newest.model_dump(), **self.facts.model_dump()}


def note_of(text: Any) -> Note | None:
    """None: the turn is no response."""
    try:
        return Note.model_validate_json(text) if isinstance(text, str) else None
    except ValidationError:
        return None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# ------------------------------------------------------------------------------------------------ its messages


class _Text(BaseModel):
    model_config = _KEPT

    type: Literal["text"]
    text: str


class _Shown(BaseModel):
    """An image, which its digest stands for."""

    model_config = _KEPT

    type: Literal["image", "video"]


class _Function(BaseModel):
    model_config = _KEPT

    name: str
    arguments: str


class _Call(BaseModel):
    model_config = _KEPT

    id: str
    function: _Function


class _Message(BaseModel):
    model_config = _KEPT

    role: str
    content: str | list[Annotated[_Text | _Shown, Field(discriminator="type")]] | None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


_MESSAGES = TypeAdapter(list[_Message])


@dataclass(frozen=True)
class Stored:
    """A response that its session knows. `messages`: the session's conversation; the response's own are those from
    `begin` to `end`, of which the last is the answer. `facts`: what it repeats of its request."""

    session: SessionInfo
    name: str
    turn: str
    record: dict[str, Any]
    facts: dict[str, Any]
    begin: int
    end: int
    messages: tuple[dict[str, Any], ...]

    @property
    def newest(self) -> bool:
        return self.session.running is None and self.session.turns[-1]["id"] == self.turn

    @property
    def past(self) -> Sequence[dict[str, Any]]:
        """The conversation up to its answer."""
        return self.messages[: self.end]

    @property
    def asked(self) -> Sequence[dict[str, Any]]:
        return self.messages[self.begin : self.end - 1]

    @property
    def answer(self) -> dict[str, Any]:
        return self.messages[self.end - 1]

    @property
    def shows_media(self) -> bool:
        parts = (part for message in self.past for part in message.get("content") or () if isinstance(part, dict))
        return any(part["type"] != "text" for part in parts)


def stored_in(known: SessionInfo, session: str, turn: str) -> Stored | None:
    """None: the session has no such response."""
    record = next((record for record in known.turns if record["id"] == turn), None)
    # A turn that was appended leaves what was before it; another one tells the conversation anew.
    telling = next((one for one in reversed(known.turns) if one["mode"] == "history"), None)
    note, newest = (note_of(one["request"].get("note")) if one is not None else None for one in (record, telling))
    if record is None or note is None or newest is None:
        return None
    # Instructions stand before a conversation, and do not carry over.
    messages = known.transcript[1 if newest.instructed else 0 :]
    if not note.begin < note.end <= len(messages) or messages[note.end - 1]["role"] != "assistant":
        return None
    try:
        _MESSAGES.validate_python(messages[: note.end])
    except ValidationError:
        return None
    facts = note.all_facts
    first = known.transcript[0].get("content")
    if newest.instructed and isinstance(first, str) and note.instructed == _sha256(first):
        facts["instructions"] = first
    return Stored(known, session, turn, record, facts, note.begin, note.end, messages)
