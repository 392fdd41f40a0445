"""What ingress and replicas say to each other. Small, immutable, and the same for every kind of turn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from deployment.engine.commands import Grammar, Hit, LogprobsMode
from deployment.engine.events import Round
from deployment.errors import Refused
from deployment.ownership import Epoch, SessionKey
from deployment.ownership.messages import Placed
from deployment.parsing.turn_text import ToolCall
from deployment.tool_use import ToolUse
from model.generation_defaults import NO_DEFAULTS, GenerationDefaults
from state.media import MediaKind
from state.session_record import ForkPoint


@dataclass(frozen=True)
class Route:
    """First argument of every call to a replica; the SessionRouter reads it.

    `replica`: who should answer, if it is alive. `placement`: what the directory said of the session just before.
    `affinity` orders the rest. `sent_on`: another replica had no room and named this one, so that nobody sends the call
    on once more. `firm`: what the affinity leads to is there already, however full the replica is. `receipt`: whoever
    gets the call says so at once, since nobody else knows who that is. `again`: a replica that was asked before, and
    was lost, may have done what is asked.
    """

    affinity: str
    replica: str | None = None
    placement: Placed | None = None
    sent_on: bool = False
    firm: bool = False
    receipt: bool = False
    again: bool = False


NOTHING = ""
"""In the place of a turn: the session has none yet."""


@dataclass(frozen=True)
class MediaSource:
    """An image or a video as its client sent it. `sha256`: of `data`, 64 hex digits; the content part of the message
    that it belongs to has it too, so that messages alone tell a repeated request from another. `place`: names that part
    in errors, as in `messages[2].content[1].image_url`."""

    kind: MediaKind
    data: bytes
    sha256: str
    place: str


@dataclass(frozen=True)
class KeptMedia:
    """An image or a video that the turn's session has shown before, by the sha256 of the file that it came as."""

    kind: MediaKind
    sha256: str
    place: str


@dataclass(frozen=True)
class TurnRequest:
    """One turn, validated. None: model's default.

    `turn`: 32 hex digits. `mode`: `history` carries all messages, `append` only new ones, `prompt` none, but text or
    token ids as `prompt`. `idempotency_key`, and `repeated` if the client says that it is a retry: decision 21.
    `hint`: a client's own name of what it works on, where state is looked for and kept (decision 19).
    `accept_durable`: an older state of the session will do, if its newest is lost.
    `media`: those of `messages`, in the order of their content parts `{"type": kind, "sha256": ...}`; they are decoded
    where the model's rules are known, for the `Prompt`, but for those that its session has.
    `draws`: the seed that it drew by where it ran before.
    `resumed`: the turn has run before, without a log; the rounds of each choice as its ingress heard them.
    `tools`: what it may call. `preserve_thinking`: whether the template keeps the thinking of earlier turns.
    `continues`: the last message is the assistant's, and the answer goes on with it. `echo`: the prompt is told too,
    with log-probabilities if `logprobs` asks for those.
    `note`: what its interface wants kept with the turn. `follows`: the turn that must be its session's newest, or
    NOTHING.
    `unattended`: it goes on however long nobody reads it.
    `store`: False, of a session that is in the memory of one node and nowhere else; True, of one that is not.
    """

    turn: str
    mode: Literal["history", "append", "prompt"]
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
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
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
    prompt: str | tuple[int, ...] = ""
    media: tuple[MediaSource | KeptMedia, ...] = ()
    idempotency_key: str | None = None
    repeated: bool = False
    hint: str | None = None
    accept_durable: bool = False
    draws: int | None = None
    resumed: tuple[tuple[Round, ...], ...] = ()
    tools: ToolUse | None = None
    preserve_thinking: bool | None = None
    continues: bool = False
    echo: bool = False
    note: str = ""
    follows: str | None = None
    unattended: bool = False
    store: bool | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"

    @property
    def needs_its_session(self) -> bool:
        """Whether its prompt can only be made where its session is."""
        return self.mode == "append" or any(isinstance(one, KeptMedia) for one in self.media)

    @property
    def outlives_its_reader(self) -> bool:
        """Whether somebody could ask for this turn again (decision 22)."""
        return self.key is not None or self.idempotency_key is not None


def without_media(request: TurnRequest) -> TurnRequest:
    """Once its prompt has them: the request is kept for as long as its turn can be told again."""
    return replace(request, media=())


@dataclass(frozen=True)
class TokenFact:
    """A token that is told: its bytes (its spelling if it is a special one), its log-probability, and the best
    others."""

    data: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]


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
    """The prompt is in; text follows. `created`: when the turn was asked for, in Unix seconds. `echo`: the prompt, if
    it is to be told; its first token has no log-probability, and none has one unless they were asked for."""

    replica: str
    model: str
    seed: int
    prompt_tokens: int
    reused: int
    session: SessionFacts | None
    turn: str = ""
    choices: int = 1
    created: int = 0
    echo: tuple[TokenFact, ...] = ()


@dataclass(frozen=True)
class Delta:
    """What is published of one choice after a round: `token_ids`, which end at the ledger position `position`, and the
    text that they complete. Text may be empty, since incomplete characters wait for their end; the last `text_cut`
    characters of the ids' text belong to a stop string and are left out. `rounds`: those since the event before, where
    the turn has no log: whoever reads it can have it resumed. `calls` of tools that are whole now."""

    reasoning: str
    content: str
    choice: int = 0
    logprobs: tuple[TokenFact, ...] = ()
    token_ids: tuple[int, ...] = ()
    position: int = 0
    text_cut: int = 0
    rounds: tuple[Round, ...] = ()
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Closed:
    """One choice is over and, with a session, its Host replica is written. `rounds` lists accepted drafts.

    `stop_reason`: the stop string, or the id of the request's `stop_token_ids`, that ended it. `reasoning`, `content`:
    what was held back until now: a last character that was never completed, or text that might have become a call.
    `calls`: how many tools it called. `reasoning_tokens`: those of `completion_tokens` that are thinking.
    """

    finish_reason: str
    completion_tokens: int
    rounds: tuple[int, ...]
    acceptance_length: float
    seconds: float
    session: SessionFacts | None
    choice: int = 0
    stop_reason: str | int | None = None
    reasoning: str = ""
    content: str = ""
    calls: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class Movement:
    """What a session's move took: bytes of its state that went while its turn decoded, those that went while it stood,
    and for how long it did so at its source."""

    bytes_ahead: int = 0
    bytes_in_pause: int = 0
    pause_seconds: float = 0.0


@dataclass(frozen=True)
class Moved:
    """The turn goes on elsewhere: whoever reads it asks the session's owner for the rest. `owner`: who that is, if it
    is known here."""

    owner: str | None = None


TurnEvent = Opened | Delta | Closed | Refused | Moved


@dataclass(frozen=True)
class Told:
    """An event of a turn, and the id (`deployment/event_ids.py`) of the place that it leads to."""

    id: str
    event: TurnEvent


@dataclass(frozen=True)
class Elsewhere:
    """The turn that was asked for ran on another replica, which may still have its events."""

    replica: str
    turn: str


MOST_TOLD_IDS = 1 << 20
"""Token ids that are told, or taken to be told as text, at once: more than the longest context has."""

EncodedAs = Literal["count", "ids", "spelled"]
"""What is asked of a prompt's tokens: how many they are, their ids too, or also how each of them is spelled."""


@dataclass(frozen=True)
class Encoded:
    """A prompt as tokens: how many they are, and may be in a turn; their ids and spellings, if these were asked for."""

    count: int
    context_limit: int
    ids: tuple[int, ...] = ()
    spelled: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class ExportedSession:
    """A session as a document for its client."""

    document: np.ndarray


@dataclass(frozen=True)
class NotHere:
    """The replica that was asked does not hold the session, or serves nobody any more. `owner`: who does, if it knows.
    `full`: it has no room, and the owner has; `lost`: it is gone, and may have done what it was asked."""

    replica: str
    owner: str | None = None
    full: bool = False
    lost: bool = False


@dataclass(frozen=True)
class Received:
    """The call has come to this replica, which answers it when it can."""

    replica: str


TurnAnswer = Told | Elsewhere | NotHere | Received
"""What a replica answers a request for a turn with: its events, or where else to ask; before that a receipt, where the
route asks for one."""


@dataclass(frozen=True)
class Adopted:
    """The session lives here now. `hit` as in SessionFacts."""

    replica: str
    epoch: Epoch
    hit: str
    frontier: int


@dataclass(frozen=True)
class PlacedCheckpoint:
    """State of a session, and where it lies."""

    kind: str
    frontier: int
    places: tuple[Hit, ...]


@dataclass(frozen=True)
class SessionInfo:
    """What a session's owner knows of it. `running_note`: of the turn that runs. `checkpoints`: its state, wherever it
    lies; `fork_points`: without what they have of their own."""

    replica: str
    epoch: Epoch
    tokens: int
    frontier: int
    running: str | None
    transcript: tuple[dict[str, Any], ...]
    turns: tuple[dict[str, Any], ...]
    checkpoints: tuple[PlacedCheckpoint, ...] = ()
    fork_points: tuple[ForkPoint, ...] = ()
    running_note: str = ""


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
    defaults: GenerationDefaults = NO_DEFAULTS
