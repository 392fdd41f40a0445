"""A lane: one turn on its way through the engine, from admission to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field

from deployment.engine.commands import Hit, Submit, TokenLogprob
from deployment.engine.events import FinishReason
from deployment.engine.grammar import TurnMatcher
from deployment.engine.stop_strings import StopMatch, StopStrings
from deployment.engine.thinking import ThinkingLimit
from model.placeholders import MediaSpan
from state.memory import SequenceMemory


@dataclass(eq=False)
class Lane:
    """`row`: index of the lane's pending features. `ledger`: the prompt, then every committed token; once decoding it
    has one token more than the frontier, the anchor. `budget`: tokens the turn may publish. `pending`: features
    of the last `pending` positions before the frontier that the draft context has not taken in yet. `session`:
    who gets the turn's checkpoints; None also once the session was given another state. `boundary`,
    `system_boundary`: prompt tokens where a turn start and the tenant's tap are captured; 0: not, or not any
    more. `private`: its state was computed from some that came from outside, and is found by its session alone.
    `imaged`: where the last image on the lane's way is, or should be. `begun`: the prompt is in, and that was told.
    `ended`: the last event is out. `suspended`: the turn gave its memory up, or has had none yet, and waits.
    `passed`: prefill slices that others got since its last one. `published`: the answer's ids, of which the
    client knows the first `told`; the others may belong to a stop string. `matcher`: where the turn stands in
    its grammar; it follows `generated`. `scored`: tokens of the prompt whose log-probabilities were told, if the
    turn asked for them; the first has none, and counts. `spans`: where the prompt's media stand; `rope_delta`: rotary
    position minus ordinal of everything that comes after them."""

    submit: Submit
    row: int
    memory: SequenceMemory
    ledger: list[int]
    budget: int
    stop_ids: frozenset[int]
    hit: Hit
    reused: int
    admitted_at: float
    session: str | None = None
    boundary: int = 0
    system_boundary: int = 0
    private: bool = False
    imaged: int = 0
    pending: int = 0
    published: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    begun: bool = False
    ended: bool = False
    suspended: bool = False
    passed: int = 0
    stop_strings: StopStrings | None = None
    stop_match: StopMatch | None = None
    thinking: ThinkingLimit | None = None
    told: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    matcher: TurnMatcher | None = None
    scored: int = 1
    spans: tuple[MediaSpan, ...] = ()
    rope_delta: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.submit.prompt_ids)

    @property
    def frontier(self) -> int:
        return self.memory.frontier

    @property
    def reusable(self) -> int:
        """The deepest frontier of a state that the turn can go on from: what is not scored must be computed."""
        scored = self.submit.sampling.prompt_logprobs is None or self.scored == self.prompt_tokens
        return len(self.ledger) if scored else self.scored - 1

    @property
    def prefill_end(self) -> int:
        """What is prefilled: the prompt, and where a turn is replayed all that it had committed."""
        return max(self.prompt_tokens, len(self.ledger) - 1)

    @property
    def prefilling(self) -> bool:
        """Whether something is to be prefilled, or nothing was drawn yet from a prompt that another turn prefilled."""
        return self.frontier < self.prefill_end or len(self.ledger) == self.prompt_tokens

    @property
    def paused(self) -> bool:
        """Whether the turn rests in its lane until its grammar has been compiled anew."""
        return self.matcher is not None and self.matcher.full

    @property
    def anchor(self) -> int:
        return self.ledger[self.frontier]

    @property
    def generated(self) -> list[int]:
        """Every token that the turn has chosen, the anchor included."""
        return self.ledger[self.prompt_tokens :]

    @property
    def tokens_left(self) -> int:
        return self.budget - len(self.published)

    @property
    def acceptance_length(self) -> float:
        """Published tokens after the first, divided by rounds (decision 25); 0 without a round."""
        return max(0, len(self.published) - 1) / len(self.rounds) if self.rounds else 0.0
