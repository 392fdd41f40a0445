"""The host's preview of a round, and what the client is told of it once it is committed.

    preview   how many of the licensed tokens are kept, and whether the turn ends there: stop ids, stop strings, the
              thinking budget, the token budget, whichever comes first. Where two meet in one token, stop beats length
    publish   ids that cannot belong to a stop string any more; the others are held back until that is decided
    replay    what a resumed turn had committed goes the same way, and nobody is told

Source: specification (preview, N), decisions 7, 18 and 20.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployment.engine import errors
from deployment.engine.commands import Resumed, TokenLogprob
from deployment.engine.errors import EngineError
from deployment.engine.events import Finished, FinishReason, Round, Tokens
from deployment.engine.lane import Lane
from deployment.engine.stop_strings import StopMatch


@dataclass(frozen=True)
class Preview:
    """`kept`: the N tokens that are committed. `published`: those of them that the client sees unless they belong to a
    stop string: all but a hidden stop id, which is always the last. `finish_reason` is None while the turn goes on.
    `match`: the stop string that ended it. `forced`: indices in `kept` of ids that nobody chose."""

    kept: tuple[int, ...]
    published: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    match: StopMatch | None = None
    forced: tuple[int, ...] = ()


def preview(lane: Lane, licensed: Sequence[int]) -> Preview:
    """Cuts `licensed` where the turn ends, and where a forced id takes the place of another one.

    The lane's watchers move on: a round is previewed once, and one that cannot be committed ends its turn.
    """
    watched = lane.thinking is not None or lane.stop_strings is not None
    if not watched and len(licensed) < lane.tokens_left and lane.stop_ids.isdisjoint(licensed):
        return Preview(tuple(licensed), tuple(licensed))  # of nearly all rounds, and the card waits for it
    kept: list[int] = []
    forced: list[int] = []

    def end(reason: FinishReason | None, stop_id: int | None = None, match: StopMatch | None = None) -> Preview:
        published = kept if stop_id is None else kept[:-1]
        return Preview(tuple(kept), tuple(published), reason, stop_id, match, tuple(forced))

    for chosen in licensed:
        token = chosen
        if lane.thinking is not None:
            if lane.thinking.forced is not None:
                token = lane.thinking.forced
                forced.append(len(kept))
            lane.thinking.push(token)
        kept.append(token)
        if token in lane.stop_ids:
            return end("stop", stop_id=token)
        match = lane.stop_strings.push(token) if lane.stop_strings is not None else None
        if match is not None:
            return end("stop", match=match)
        if len(kept) == lane.tokens_left:
            return end("length")
        if token != chosen:
            break  # what was licensed beyond it stood after another token
    return end(None)


def publish(
    lane: Lane, outcome: Preview, accepted: int | None, logprobs: Sequence[TokenLogprob] = ()
) -> tuple[Round, Tokens | None]:
    """Books a committed round that kept something. Returns what is told of it: the round, and what the client gets of
    it, if anything.

    `logprobs`: one a licensed token, or none. A forced id was certain, so that its logprob is 0.
    """
    start = len(lane.ledger)
    told = tuple(
        TokenLogprob(token, 0.0, ()) if index in outcome.forced else logprob
        for index, (token, logprob) in enumerate(zip(outcome.kept, logprobs, strict=False))
    )
    lane.ledger.extend(outcome.kept)
    lane.published.extend(outcome.published)
    lane.logprobs.extend(told[: len(outcome.published)])
    lane.finish_reason, lane.stop_id, lane.stop_match = outcome.finish_reason, outcome.stop_id, outcome.match
    if outcome.match is not None:
        del lane.published[outcome.match.shown :], lane.logprobs[outcome.match.shown :]
    watched = lane.stop_strings if lane.finish_reason is None else None
    tokens = tell(lane, len(lane.published) if watched is None else watched.free, accepted)
    held_back = len(lane.ledger) - lane.prompt_tokens - lane.told
    return Round(lane.submit.turn, start, outcome.kept, held_back, accepted, told), tokens


def replay(lane: Lane, resumed: Resumed) -> None:
    """Books what a turn had committed elsewhere, as if its rounds had been run here. Raises EngineError, naming the
    field, where the turn could not have committed it."""
    outcome = preview(lane, resumed.token_ids)
    if outcome.kept != resumed.token_ids:
        after = len(outcome.kept)
        why = (
            f"the turn ended with id {after - 1}, {outcome.finish_reason}"
            if outcome.finish_reason
            else (f"id {after - 1} must be {outcome.kept[-1]}, as the thinking budget says")
        )
        message = f"resumed.token_ids has {len(resumed.token_ids)} ids, but {why}"
        raise EngineError(errors.INVALID_REQUEST, message, "resumed")
    if outcome.kept:
        publish(lane, outcome, None, resumed.logprobs)
    lane.rounds.extend(resumed.rounds)


def tell(lane: Lane, count: int, accepted: int | None) -> Tokens | None:
    """The event that brings what the client knows to the first `count` published ids; None if it knows them."""
    known, lane.told = lane.told, max(count, lane.told)
    ids = tuple(lane.published[known : lane.told])
    if not ids:
        return None
    text_cut = lane.stop_match.text_cut if lane.stop_match is not None else 0
    logprobs = tuple(lane.logprobs[known : lane.told])
    return Tokens(lane.submit.turn, lane.prompt_tokens + known, ids, accepted, logprobs, text_cut)


def finished(lane: Lane, reason: FinishReason, seconds: float) -> Finished:
    """How a turn ended, and all that it committed. A round that was torn does not count."""
    return Finished(
        turn=lane.submit.turn,
        finish_reason=reason,
        token_ids=tuple(lane.published),
        stop_id=lane.stop_id,
        prompt_tokens=lane.prompt_tokens,
        frontier=min(lane.frontier, len(lane.ledger)),
        rounds=tuple(lane.rounds),
        acceptance_length=lane.acceptance_length,
        seconds=seconds,
        stop_string=lane.stop_match.string if lane.stop_match else None,
        text_cut=lane.stop_match.text_cut if lane.stop_match else 0,
        hidden_ids=tuple(lane.ledger[lane.prompt_tokens + len(lane.published) :]),
    )
