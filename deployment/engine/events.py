"""What comes out of the engine: events, as plain as the commands of `commands.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from deployment.engine.commands import Foreign, Hit, SegmentBytes, TokenLogprob
from deployment.engine.counts import Counts
from state.container import Blob
from state.image_pieces import ImagePiece
from state.names import Order, SessionKey
from state.session_record import SessionRecord

FinishReason = Literal["stop", "length", "cancelled", "failed"]
"""`failed`: only in what a `Failed` says was committed."""

CheckpointKind = Literal["turn_start", "turn_end", "explicit", "tap"]


@dataclass(frozen=True)
class Started:
    """The prompt is in: what was reused, from where, and what had to be prefilled (`reused + prefilled = prompt`).
    Of a resumed turn, the prompt and what it had committed, without the last token, which is the anchor."""

    turn: str
    hit: Hit
    reused: int
    prefilled: int


@dataclass(frozen=True)
class Captured:
    """A checkpoint of the session exists on the device at `frontier`: an `Export` brings it."""

    turn: str
    session: str
    kind: CheckpointKind
    frontier: int


@dataclass(frozen=True)
class Evicted:
    """The device had to let go of all that it held of a session. It belongs to no turn or call."""

    session: str


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens from `start` on, one event a prefill slice, before `Started`. The first
    token of a prompt has none; every other one comes once, in order, whatever happens to the turn's lane."""

    turn: str
    start: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Round:
    """`token_ids` are committed; `start` is the ledger position of the first. One event a round that committed
    anything, and one for the token that the prefill drew, before the `Tokens` that it brings.

    `held_back`: how many ids at the end of all that the turn has committed are not published after this round, since
    they may belong to a stop string, or since they are hidden. `accepted` is the number of accepted drafts of the
    round; None for the token that the prefill drew. `logprobs` has one entry an id where they were asked for, else it
    is empty.
    """

    turn: str
    start: int
    token_ids: tuple[int, ...]
    held_back: int
    accepted: int | None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Tokens:
    """`token_ids` are published, all of them committed; `start` is the ledger position of the first. It is one round,
    less what may belong to a stop string, and with what was held back before and turned out not to.

    `accepted` is the number of accepted drafts of the round; None for the token that the prefill drew. `logprobs` has
    one entry a published id where they were asked for, else it is empty. `text_cut`: that many characters at the end
    of the published ids' text do not count, since they belong to a stop string or follow it; never before the last of
    a turn's events of this kind.
    """

    turn: str
    start: int
    token_ids: tuple[int, ...]
    accepted: int | None
    logprobs: tuple[TokenLogprob, ...] = ()
    text_cut: int = 0


@dataclass(frozen=True)
class Finished:
    """The turn ended. `token_ids` are all published ids; `stop_id` is the hidden id that ended it, if one did.

    `frontier` counts the tokens whose target state is committed; the ledger has one more (the anchor).
    `rounds` lists accepted drafts round by round, a cut round included. `seconds`: wall time since the turn got a lane.
    `stop_string` is the string that ended the turn, if one did; then the answer is the text of `token_ids` without its
    last `text_cut` characters. `hidden_ids` were committed after `token_ids` and are not published: `stop_id`, or what
    belongs to `stop_string`.
    """

    turn: str
    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    stop_id: int | None
    prompt_tokens: int
    frontier: int
    rounds: tuple[int, ...]
    acceptance_length: float
    seconds: float
    stop_string: str | None = None
    text_cut: int = 0
    hidden_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Suspended:
    """The turn is out of the engine, and all of its rounds were told. `committed`: how many ids it has committed in
    all, those before it was resumed included. `frontier`: tokens of the state that its session holds of it; 0 if none.
    """

    call: str
    turn: str
    session: str | None
    frontier: int
    committed: int


@dataclass(frozen=True)
class Checkpointed:
    """The session has an explicit checkpoint at `frontier`."""

    call: str
    session: str
    frontier: int


@dataclass(frozen=True)
class Unpinned:
    call: str
    session: str
    frontier: int


@dataclass(frozen=True)
class Pages:
    """Pages [first, end) of the turn, as `segments`: the target's, then the drafter's, each content once. `full`: how
    many full pages the turn has by now."""

    call: str
    turn: str
    first: int
    end: int
    full: int
    segments: tuple[SegmentBytes, ...]


@dataclass(frozen=True)
class Staged:
    """What is held for the migration now."""

    call: str
    migration: str
    segments: int
    size: int


@dataclass(frozen=True)
class Failed:
    """The turn or call did not happen, or the turn ended in the middle. `code` is one of `deployment.engine.errors`;
    `param` names the field. `committed`: what the turn had drawn by then, all of it published or hidden, and kept."""

    ref: str
    code: str
    message: str
    param: str | None = None
    committed: Finished | None = None


@dataclass(frozen=True)
class Exported:
    """`document`: `state/FORMAT.md`. `kinds` and `frontiers` of its checkpoints. `segments`: of a detached document,
    those that were asked for. Of a document in slices, the last one has what lies before its payload as `document`,
    the payload's segments, in their order, as `payload`, their `sizes`, and what comes after it as `trailer`; those
    before it are not `whole`, and have segments and perhaps a `piece` of one: what `offset` 0 begins is whole with a
    `sha256`. Each says which checkpoints were `chosen`, by their serials."""

    call: str
    session: str
    document: Blob
    kinds: tuple[CheckpointKind, ...]
    frontiers: tuple[int, ...]
    segments: tuple[SegmentBytes, ...] = ()
    payload: tuple[bytes, ...] = ()
    sizes: tuple[int, ...] = ()
    trailer: bytes = b""
    piece: ImagePiece | None = None
    whole: bool = True
    chosen: tuple[int, ...] = ()


@dataclass(frozen=True)
class Publishing:
    """A session waits to be written, if this is `whole`; else there is more to be read of it. `frontiers` of the
    checkpoints that it names, also of those that were written before and stay; `read`: bytes of those segments that the
    device was asked for, because they were not known to be stored."""

    call: str
    session: str
    frontiers: tuple[int, ...]
    read: int
    whole: bool = True


@dataclass(frozen=True)
class Stored:
    """What became of a `Publish`. `superseded`: a newer one of the session took its place before it was written.
    `payload`: the state that should go with it is stored too, not its record and ledger alone; `checkpoints`: kind and
    frontier of what is, which may be what was written before. It belongs to no turn or call."""

    key: SessionKey
    order: Order
    outcome: Literal["published", "superseded", "failed"]
    payload: bool = False
    checkpoints: tuple[tuple[str, int], ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Imported:
    """`frontiers` of the checkpoints that the session holds now, oldest first. Of an import: the `record` that came,
    what made its state if that was something else, and whether the document is `signed` by this cluster."""

    call: str
    session: str
    frontiers: tuple[int, ...]
    record: SessionRecord | None = None
    foreign: Foreign | None = None
    signed: bool = False


@dataclass(frozen=True)
class Dropped:
    call: str
    session: str


@dataclass(frozen=True)
class Facts:
    """`facts`: what the engine holds now. `counts`: what it has done since it began. `work`: how many pieces of work,
    such as a round, a prefill slice or a turn's end, it has done so far. `checkpoints`: kind and frontier of those that
    stand for the session that was asked for."""

    call: str
    facts: dict[str, Any]
    counts: Counts
    work: int = 0
    checkpoints: tuple[tuple[str, int], ...] = ()


Event = (
    Started
    | Captured
    | Evicted
    | PromptLogprobs
    | Round
    | Tokens
    | Finished
    | Suspended
    | Checkpointed
    | Unpinned
    | Pages
    | Staged
    | Failed
    | Exported
    | Publishing
    | Stored
    | Imported
    | Dropped
    | Facts
)
