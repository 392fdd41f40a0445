"""What ingress and replicas say to each other. Small, immutable, and the same for every kind of turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from deployment.engine.messages import Grammar
from deployment.errors import Refused
from deployment.ownership import Epoch, Placement, SessionKey


@dataclass(frozen=True)
class Route:
    """First argument of every call to a replica; the SessionRouter reads it.

    `replica`: who should answer, if it is alive. `placement`: what the directory said of the session just before, so
    that a replica which lost the session without knowing it learns so from the request. `affinity` orders the rest.
    """

    affinity: str
    replica: str | None = None
    placement: Placement | None = None


@dataclass(frozen=True)
class TurnRequest:
    """One turn, validated. `mode`: `history` carries all messages, `append` only new ones. None: model's default."""

    turn: str
    mode: Literal["history", "append"]
    messages: tuple[dict[str, Any], ...]
    key: SessionKey | None = None
    must_exist: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    drafting: bool = True
    enable_thinking: bool | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    reproducible: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    n: int = 1
    logprobs: int | None = None
    thinking_budget: int | None = None
    grammar: Grammar | None = None
    tenant: str = ""
    priority: Literal["interactive", "background"] = "interactive"
    queue_seconds: float | None = None


@dataclass(frozen=True)
class SessionFacts:
    """What a resume cost, for headers, the last chunk and the body."""

    id: str
    epoch: str
    hit: str
    reused: int
    prefilled: int
    frontier: int | None = None

    @property
    def header(self) -> str:
        return f"hit={self.hit}; reused={self.reused}; prefilled={self.prefilled}; epoch={self.epoch}"


@dataclass(frozen=True)
class Opened:
    """The prompt is in; text follows."""

    replica: str
    model: str
    seed: int
    prompt_tokens: int
    reused: int
    session: SessionFacts | None


@dataclass(frozen=True)
class TokenFact:
    """A published token: its bytes (its spelling if it is a special one), its log-probability, and the best others."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True)
class Delta:
    """What is published of one choice after a round. Every part may be empty, since incomplete characters and what may
    belong to a stop string are held back."""

    reasoning: str
    content: str
    choice: int = 0
    logprobs: tuple[TokenFact, ...] = ()


@dataclass(frozen=True)
class Closed:
    """One choice is over and, with a session, its Host replica is written. `rounds` lists accepted drafts.

    `stop_reason`: the stop string, or the id of the request's `stop_token_ids`, that ended it.
    """

    finish_reason: str
    completion_tokens: int
    rounds: tuple[int, ...]
    acceptance_length: float
    seconds: float
    session: SessionFacts | None
    choice: int = 0
    stop_reason: str | int | None = None


TurnEvent = Opened | Delta | Closed | Refused


@dataclass(frozen=True)
class HandedOver:
    """A session as its owner gives it away. `document` (uint8 array, `state/FORMAT.md`) has the whole ledger, and
    checkpoints at `frontiers`. `order` numbers the documents of an epoch."""

    epoch: Epoch
    order: int
    frontiers: tuple[int, ...]
    document: np.ndarray


@dataclass(frozen=True)
class ExportedSession:
    """A session as a document for its client."""

    document: np.ndarray


@dataclass(frozen=True)
class NotHere:
    """The replica that was meant did not get the call, or does not hold the session."""

    replica: str


@dataclass(frozen=True)
class Adopted:
    """The session lives here now. `hit` as in SessionFacts."""

    replica: str
    epoch: Epoch
    hit: str
    frontier: int


@dataclass(frozen=True)
class SessionInfo:
    """What a session's owner knows of it."""

    replica: str
    epoch: Epoch
    tokens: int
    frontier: int
    running: str | None
    transcript: tuple[dict[str, Any], ...]
    turns: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class ReplicaInfo:
    replica: str
    pid: int
    node: str
    model: str
    backend: str
    context_limit: int
    sessions: int
    running: int
    engine: dict[str, Any]
