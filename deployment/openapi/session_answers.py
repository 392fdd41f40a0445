"""The answers of the routes of sessions, for the description of the interface: see `answers.py`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from deployment.openapi.answers import Listing

_EXACT = ConfigDict(extra="forbid", protected_namespaces=())


class Copy(BaseModel):
    model_config = _EXACT

    node: str


class Session(BaseModel):
    """`replica`: its owner. `store`: whether it is kept elsewhere than in one node's memory. `copies`: where its log
    lies."""

    model_config = _EXACT

    id: str
    object: Literal["session"]
    replica: str | None
    epoch: str
    store: bool
    copies: list[Copy]


class Sessions(Listing):
    data: list[Session]


class RecordedTurn(BaseModel):
    """A turn that is over. `request`: what it was asked for beside its messages."""

    model_config = _EXACT

    id: str
    mode: Literal["history", "append", "prompt"]
    replica: str
    request: dict[str, Any]
    seed: int
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    frontier: int
    hit: str
    reused: int
    prefilled: int
    acceptance_length: float
    ended_at: float


class ListedTurn(RecordedTurn):
    object: Literal["session.turn"]
    status: Literal["over"]


class RunningTurn(BaseModel):
    model_config = _EXACT

    id: str
    object: Literal["session.turn"]
    status: Literal["running"]


class Turns(Listing):
    data: list[ListedTurn | RunningTurn]


class SessionDetails(Session):
    """`running`: the turn that runs in it."""

    tokens: int
    frontier: int
    running: str | None
    transcript: list[dict[str, Any]]
    turns: list[RecordedTurn]


class Settled(BaseModel):
    """Where a new session lives."""

    model_config = _EXACT

    id: str
    replica: str
    epoch: str
    frontier: int


class Created(Settled):
    object: Literal["session.created"]


class Imported(Settled):
    object: Literal["session.imported"]


class Forked(Settled):
    object: Literal["session.forked"]
    parent: str


class Migrated(BaseModel):
    """`from` and `to`: replicas."""

    model_config = _EXACT

    id: str
    object: Literal["session.migrated"]
    source: str | None = Field(alias="from")
    to: str
    epoch: str
    hit: str
    frontier: int
    bytes_ahead: int
    bytes_in_pause: int
    pause_seconds: float


class Deleted(BaseModel):
    model_config = _EXACT

    id: str
    object: Literal["session.deleted"]
    deleted: Literal[True]


Place = Literal["device", "host", "peer", "disk"]


class NamedCheckpoint(BaseModel):
    """`image`: up to where a fork finds state; what comes after it is prefilled."""

    model_config = _EXACT

    name: str
    object: Literal["session.checkpoint"]
    kind: Literal["explicit"]
    turn: str | None
    frontier: int
    image: int | None


class MadeCheckpoint(NamedCheckpoint):
    session: str


class Checkpoint(NamedCheckpoint):
    """`places`: where its state lies."""

    places: list[Place]


class TakenCheckpoint(BaseModel):
    """One that the server made."""

    model_config = _EXACT

    object: Literal["session.checkpoint"]
    kind: str
    frontier: int
    places: list[Place]


class Checkpoints(Listing):
    data: list[Checkpoint | TakenCheckpoint]


class DeletedCheckpoint(BaseModel):
    model_config = _EXACT

    name: str
    object: Literal["session.checkpoint.deleted"]
    session: str
    deleted: Literal[True]
