"""What goes into the engine: commands, and what they hold. All of it is small and msgpack-able.

The engine runs on a thread or in a process of its own (`runners.py`), so nothing here holds a tensor, a callback or a
lock. Token ids are plain ints, states are the bytes of `state/FORMAT.md`. What comes out is in `events.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from state.container import Blob
from state.fingerprint import Mismatch
from state.image_pieces import ImagePart
from state.media import Placed
from state.names import Order, SessionKey
from state.session_record import SessionRecord

Hit = Literal["device", "host", "peer", "disk", "none"]
"""Where the state that a turn went on from was found. `none`: nothing was reused."""

Priority = Literal["interactive", "background"]

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""Before all controls, or after all of them (decision 12)."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the defaults change nothing. Order of the controls: decision 12.

    `logit_bias`: (token id, added to its logit). `repetition_penalty` counts the prompt and the answer, `presence_` and
    `frequency_penalty` the answer; biases and these two lie within 10,000 of 0, `repetition_penalty` from 0.01 to 100.
    `min_tokens`: end tokens and stop ids are forbidden until that many are published.
    `temperature <= 0` is greedy; `top_k = 0` keeps all, `top_p = 1` keeps all, `min_p = 0` keeps all. `seed`: 64 bits,
    unsigned; `sub` separates the choices of one request (decision 13). `reproducible`: DFlash2 proposes with the
    target's own noise, so that a seed's tokens depend on the target alone. `logprobs`: None for none, else how many
    alternatives are told beside each published token (0 to 20), by `logprobs_mode` of the raw target distribution or of
    the processed one, of which only what could be drawn is an alternative; `temperature` 0 has no filters there.
    `prompt_logprobs`: the raw ones of the prompt's tokens after the first. They need the prompt's own positions, so
    that such a turn goes on from no state that others left: its prompt is prefilled as a whole.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    seed: int = 0
    sub: int = 0
    reproducible: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"


@dataclass(frozen=True)
class ThinkingBudget:
    """At most `tokens` ids of a turn inside think blocks; then an open one is closed by the ids `close`.

    `opened`: the prompt leaves a block open. A generated `begin` opens one (None: none does), a generated `end` closes
    it.
    """

    tokens: int
    close: tuple[int, ...]
    end: int
    begin: int | None = None
    opened: bool = False


@dataclass(frozen=True)
class Grammar:
    """What a turn's text must match as a whole. `source`: a JSON Schema's text, a regular expression, a grammar in
    llguidance's Lark form, or tools as `tools_grammar` writes them; of a `json_object` nothing. `after`: the grammar
    holds once this token has come, which is the end of thinking, and a blank line may come first; until then the turn
    cannot end by itself. None: from the first token. Not `needed`: where it cannot be kept to, for want of the library
    or for what it says, the turn runs without it instead of being refused."""

    kind: Literal["json_object", "json_schema", "regex", "lark", "tools"]
    source: str = ""
    after: int | None = None
    needed: bool = True

    @property
    def field(self) -> str:
        """What a refusal names."""
        return "tools" if self.kind == "tools" else "response_format"


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token, and the best alternatives as (token id, log-probability), best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Resumed:
    """What a turn had committed where it ran before, as its `Round`s told it: `token_ids` after the prompt, those that
    were held back included; `rounds`: `accepted` of each round that has one; `logprobs`, one an id, where the turn asks
    for them."""

    token_ids: tuple[int, ...]
    rounds: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class SegmentBytes:
    """A segment of `state/FORMAT.md` that travels apart from its document. `sha256`: 32 bytes; or a random name, where
    its document was not hashed."""

    sha256: bytes
    data: Blob


# ------------------------------------------------------------------------------------------------ commands


@dataclass(frozen=True)
class Submit:
    """Runs one turn: prefill `prompt_ids`, then decode up to `max_tokens` tokens.

    The deepest checkpoint of the tenant whose processed tokens are an exact prefix of the prompt is restored first.
    With a `session`, a `turn_start` checkpoint is captured at `stable_boundary` tokens (0: none), a `turn_end` one when
    the turn ends, at whatever was committed by then, and `tap`s on a long way, each where it is worth it
    (`state/image_policy.py`). `system_boundary`: where the tools-and-system block ends (0: there is none); a tap there
    is kept for all turns of the tenant, with or without a session.

    `stop_ids`, and the model's end tokens unless `ignore_eos`, end the turn: such an id is committed to the ledger but
    hidden, that is not published. `max_tokens = None` means: up to the context limit. `drafting = False` decodes
    without proposals even if the engine has a drafter.

    `stop_strings` end the turn at the token that completes one, if `sampling.min_tokens` ids are published by then.
    That token is committed; the text ends before the string, or with it if `include_stop_string`.

    `tenant`: whose turn it is; limits and fairness are between tenants. `priority`: background turns wait for
    interactive ones, and give their lanes up first. `queue_seconds`: how long the turn may wait for its first lane
    (None: the engine's option); then it fails with `queue_timeout`.

    `followers`: turns to come that have the same prompt; its state is kept for them when it is prefilled, while images
    are free. `after`: the turn that this one follows; it waits until that one's prompt is in, or that turn is over.

    `resumed`: the turn has run before, here or elsewhere, and goes on after what it had committed, as if nothing had
    happened; no id is drawn or told again. It waits for a lane however long the queue is. What is not found in a
    checkpoint is prefilled; where prompt log-probabilities are asked for and nothing was committed, they come anew.
    A turn that has ended with these ids is `Finished` at once.

    `media`: what stands in place of the placeholders of `prompt_ids`, where exactly these are. A checkpoint is a prefix
    only if it has the same media.
    """

    turn: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    session: str | None = None
    stable_boundary: int = 0
    system_boundary: int = 0
    drafting: bool = True
    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    thinking: ThinkingBudget | None = None
    tenant: str = ""
    priority: Priority = "interactive"
    queue_seconds: float | None = None
    followers: tuple[str, ...] = ()
    after: str | None = None
    grammar: Grammar | None = None
    resumed: Resumed | None = None
    media: Placed = ()


@dataclass(frozen=True)
class Cancel:
    """Ends a turn at its next commit boundary; committed tokens stay. Unknown turns are ignored."""

    turn: str


@dataclass(frozen=True)
class Preempt:
    """Takes a running turn's lane away at its commit boundary. The turn waits for another one and goes on there as if
    nothing had happened. Turns that do not run are left as they are."""

    turn: str


@dataclass(frozen=True)
class Suspend:
    """Takes a turn out of the engine at its commit boundary, so that it can be `resumed`, here or elsewhere.

    Where its session can hold it, the turn's state at that boundary is captured like a turn's end, whatever that image
    is worth: an `Export` of the session brings it. A turn that waits, or whose prompt is not in yet, is given back with
    nothing committed. Answer: `Suspended`, which is the turn's last event too; `Failed` with `unknown_turn` if the turn
    is not here or has ended.
    """

    call: str
    turn: str


@dataclass(frozen=True)
class Checkpoint:
    """Captures an `explicit` checkpoint of a session, which stays until `Unpin`, or until the device is short of memory
    and nothing else is left to evict.

    While a turn of it decodes: at that turn's commit boundary. Else at the deepest checkpoint on the way to its
    ledger's end; the tokens after it are prefilled by whoever goes on. Answer: `Checkpointed`.
    """

    call: str
    session: str


@dataclass(frozen=True)
class Unpin:
    """Releases a session's explicit checkpoint at `frontier`; what is not there is ignored. Answer: `Unpinned`."""

    call: str
    session: str
    frontier: int


@dataclass(frozen=True)
class ExportPages:
    """Encodes full pages of a running turn, from page `first` on and at most `most`, which nobody writes again: what
    can travel while the turn decodes. Other lanes wait while they are read and hashed. Answer: `Pages`."""

    call: str
    turn: str
    first: int = 0
    most: int = 8


@dataclass(frozen=True)
class StageSegments:
    """Holds segments for an `Import` of a detached document to come, which names the same `migration`.

    They are dropped by that import, by `DropStaged`, or when nothing was heard of the migration for the option
    `staged_seconds`. More than `staged_bytes` are refused, and what was held stays. Answer: `Staged`.

    `hashed`: they are checked against their sha256 now. Else they came from this node under random names, and stay
    until `VerifyStaged` says what their sha256 are.
    """

    call: str
    migration: str
    segments: tuple[SegmentBytes, ...]
    hashed: bool = True


@dataclass(frozen=True)
class VerifyStaged:
    """Tells the sha256 of segments that were staged without, as (name, sha256), after `session` was imported with them.

    Answer: `Staged`; or `Failed` with `bad_state` if one is not what it should be, or is not held any more. Then the
    session's state here is dropped, and its turns give it none: whoever owns it suspends them, and resumes them from
    their ledger.
    """

    call: str
    migration: str
    session: str
    digests: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class DropStaged:
    """Drops the segments of a migration; unknown ones are ignored. Answer: `Staged` with nothing held."""

    call: str
    migration: str


@dataclass(frozen=True)
class Foreign:
    """What made a session's state, where that is not what runs here."""

    mismatch: Mismatch
    fingerprint: dict[str, str | int]


@dataclass(frozen=True)
class Export:
    """Encodes a session: its record, the newest checkpoint of each kind that the device holds of it, oldest first, and
    the deepest one on the way to its ledger's end, whoever holds that and of whatever kind.

    `record` is what the replica knows of the session; without one, what the newest checkpoint's ledger says. A session
    of which the device holds nothing is whole by its record's ledger. `checkpoints = False` leaves the state out.
    So does `foreign`: the ledger is still what something else made, and the document says so.

    `without`: the document is detached and has all explicit checkpoints, and its segments come beside it, but for those
    with these sha256, which whoever asks has already. What `ExportPages` gave before is neither read nor hashed again.
    Not `hashed`: nothing else is hashed either; such segments have random names, and are for `StageSegments` on the
    same node.

    `slice_bytes`: the document is attached, and is put together by who asks, who has the segments `without` from the
    session's document before. The others come in slices of about so many bytes, so that no lane waits for long: while
    the answer is not `whole`, ask again, with its segments among `without`, and with what there is of an image that
    comes in pieces as `begun`: the engine begins one anew where it does not stand itself. `chosen`: the checkpoints
    that the first slice named, so that all slices are of that moment, whatever the session's turns do meanwhile.
    Answer: `Exported`; or `Failed` with `unknown_checkpoint` if one of them is gone: the document has to begin anew.
    """

    call: str
    session: str
    record: SessionRecord | None = None
    checkpoints: bool = True
    foreign: Foreign | None = None
    without: frozenset[bytes] | None = None
    hashed: bool = True
    slice_bytes: int | None = None
    begun: ImagePart | None = None
    chosen: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Publish:
    """Makes a session durable under `key` as of `order`, with the same checkpoints as `Export`, in the background.
    `Stored` says what came of it.

    `record_alone`: its record and ledger, beside the state that was written last (`state/publication_policy.py` says
    when that is enough); without such a state, all of it. Answer: `Publishing`.
    `slice_bytes`: of the device about so many are read at once, so that no lane waits for long: while the answer is not
    `whole`, ask again for the same. What is written is of the moment of the first time; where a checkpoint goes
    meanwhile, of a later one.
    """

    call: str
    session: str
    key: SessionKey
    order: Order
    record: SessionRecord
    foreign: Foreign | None = None
    record_alone: bool = False
    slice_bytes: int | None = None


@dataclass(frozen=True)
class Import:
    """Decodes a session document and gives its checkpoints to `session`, replacing what it held. All or nothing.

    Of a detached document, those checkpoints whose segments the engine finds among those that were staged for
    `migration`, or in its durable tier: one that is not whole there costs nothing but itself, and the tokens after the
    deepest that is are prefilled from the ledger.

    State that was made by something else is not loaded (decision 23): the answer says so, and its record's ledger is
    what the next turn prefills. `exact`: such a document is refused with `fingerprint_mismatch`. `tenant`: whose other
    sessions may share the state, if this cluster signed it; without a signature nobody's do. Answer: `Imported`.
    """

    call: str
    session: str
    document: Blob
    origin: Hit = "peer"
    exact: bool = False
    tenant: str = ""
    migration: str | None = None


@dataclass(frozen=True)
class Fork:
    """Gives `child` all checkpoints of `session`: pages are shared, images copied. With `ledger`, those on the way to
    its end, which may be one that the session has left; `media` are what stands in it, without pixels. Answer:
    `Imported`."""

    call: str
    session: str
    child: str
    ledger: tuple[int, ...] | None = None
    media: Placed = ()


@dataclass(frozen=True)
class Drop:
    """Releases all that a session holds on the device. Unknown sessions are ignored. Answer: `Dropped`."""

    call: str
    session: str


@dataclass(frozen=True)
class Inspect:
    """Asks for the engine's own facts (lanes, pages, images, sessions), and for what it has of one `session`. Answer:
    `Facts`."""

    call: str
    session: str | None = None


StateCall = (
    Checkpoint
    | Unpin
    | ExportPages
    | StageSegments
    | VerifyStaged
    | DropStaged
    | Export
    | Publish
    | Import
    | Fork
    | Drop
)
"""Commands that begin and end no turn."""

Call = Suspend | Inspect | StateCall
"""Commands with one answer, which names their `call`."""

Command = Submit | Cancel | Preempt | Call
