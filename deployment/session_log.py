"""What does a session's log say of its turns? Records in, turns out; and a turn's request, into a record and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from deployment.engine.commands import Grammar, Resumed
from deployment.engine.events import Finished, Round
from deployment.ownership.log import Deleted, Record, TurnBegan, TurnEnded
from deployment.ownership.log import Round as LoggedRound
from deployment.ownership.log_format import decode
from deployment.ownership.words import NOTHING, Epoch, SessionKey
from deployment.tool_use import ToolUse
from deployment.turn_records import canonical_request, request_sha256
from deployment.turns import Prompt
from deployment.wire import TurnRequest
from state.media import Placed, with_pixels, without_pixels


@dataclass
class Course:
    """How one choice of a turn went so far, round by round. `ended`: None while it runs, as far as is known."""

    rounds: list[Round] = field(default_factory=list)
    ended: TurnEnded | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All that is committed, ids that are held back included."""
        return tuple(token for one in self.rounds for token in one.token_ids)

    @property
    def resumed(self) -> Resumed:
        """For the engine that goes on."""
        accepted = tuple(one.accepted for one in self.rounds if one.accepted is not None)
        return Resumed(self.token_ids, accepted, tuple(entry for one in self.rounds for entry in one.logprobs))

    def told(self) -> list[tuple[tuple[Round, ...], int]]:
        """What a client was told: the rounds behind each event, and how many ids are published after it."""
        events: list[tuple[tuple[Round, ...], int]] = []
        committed = published = 0
        waiting: list[Round] = []
        for one in self.rounds:
            waiting.append(one)
            committed += len(one.token_ids)
            if committed - one.held_back > published:
                published = committed - one.held_back
                events.append((tuple(waiting), published))
                waiting = []
        if self.ended is not None and self.ended.published > published:
            events.append((tuple(waiting), self.ended.published))
        return events


@dataclass
class LoggedTurn:
    """A turn as the log has it. Only one with a key of its own (`deployment/keyed_turns.py`) has several choices."""

    began: TurnBegan
    courses: dict[int, Course] = field(default_factory=dict)

    @property
    def choices(self) -> range:
        return range(self.began.request.get("n", 1))

    @property
    def over(self) -> bool:
        """Whether all choices are."""
        return all(self.course(choice).ended is not None for choice in self.choices)

    def course(self, choice: int) -> Course:
        return self.courses.setdefault(choice, Course())

    def prompt(self, known: Placed) -> Prompt:
        """`known`: media of the session as it was when the turn began, whose pixels the log need not have."""
        media = with_pixels(self.began.media, known)
        return Prompt(self.began.prompt_ids, self.began.stable_boundary, media=media)

    def request(self, key: SessionKey) -> TurnRequest:
        return request_of(self.began, key)

    def finished(self, choice: int = 0) -> Finished | None:
        """As the engine said it; None while it runs."""
        course = self.course(choice)
        ended = course.ended
        if ended is None:
            return None
        ids = course.token_ids
        rounds = course.resumed.rounds
        return Finished(
            turn=self.began.turn,
            finish_reason=ended.finish_reason,
            token_ids=ids[: ended.published],
            stop_id=ended.stop_id,
            prompt_tokens=len(self.began.prompt_ids),
            frontier=max(0, len(self.began.prompt_ids) + len(ids) - 1) if ids else 0,
            rounds=rounds,
            acceptance_length=max(0, ended.published - 1) / len(rounds) if rounds else 0.0,
            seconds=0.0,
            stop_string=ended.stop_string,
            text_cut=ended.text_cut,
            hidden_ids=ids[ended.published :],
        )


def logged_turns(records: Iterable[Record]) -> list[LoggedTurn]:
    """The turns that these records of one session tell whole, in their order. Rounds of one whose beginning is not
    among them belong to an image that has the turn."""
    turns: dict[str, LoggedTurn] = {}
    for record in records:
        match record:
            case TurnBegan() as began:
                turns[began.turn] = LoggedTurn(began)
            case LoggedRound(turn=turn) as one if turn in turns:
                turns[turn].course(one.choice).rounds.append(
                    Round(turn, one.start, one.token_ids, one.held_back, one.accepted, one.logprobs or ())
                )
            case TurnEnded(turn=turn) as ended if turn in turns:
                turns[turn].course(ended.choice).ended = ended
            case _:
                pass
    return list(turns.values())


def living(records: Iterable[bytes]) -> list[Record]:
    """What a log says of the session that is there now: nothing of one of the same name that was deleted before."""
    said: list[Record] = []
    for data in records:
        record = decode(data)
        said.append(record)
        if isinstance(record, Deleted):
            said.clear()
    return said


def deleted_under(records: Iterable[bytes]) -> Epoch | None:
    """The epoch of the last tombstone of a session that somebody deleted; None: of none that was there. One that was
    abandoned never was."""
    buried = [record for record in map(decode, records) if isinstance(record, Deleted) and record.at > 0]
    return buried[-1].order.epoch if buried else None


def began_record(request: TurnRequest, prompt: Prompt, seed: int, at: float, known: Placed = ()) -> TurnBegan:
    """`seed`: the effective one; `at`: seconds since 1970; `known`: media of the session as it is now, whose pixels are
    in its copies."""
    shown = {one.media.digest for one in known}
    asked = canonical_request(request) | {
        "mode": request.mode,
        "messages": list(request.messages),
        "seed": request.seed,
        "note": request.note,
    }
    return TurnBegan(
        order=NOTHING,
        turn=request.turn,
        request=asked,
        request_sha256=request_sha256(request),
        seed=seed,
        idempotency_key=request.idempotency_key,
        prompt_ids=prompt.ids,
        stable_boundary=prompt.stable_boundary,
        at=at,
        media=tuple(without_pixels(one) if one.media.digest in shown else one for one in prompt.media),
    )


def round_record(one: Round, turn: str, choice: int) -> LoggedRound:
    return LoggedRound(
        NOTHING, turn, choice, one.start, one.token_ids, one.held_back, one.accepted, one.logprobs or None
    )


def ended_record(finished: Finished, turn: str, choice: int, at: float) -> TurnEnded:
    return TurnEnded(
        order=NOTHING,
        turn=turn,
        choice=choice,
        finish_reason=finished.finish_reason,
        published=len(finished.token_ids),
        stop_id=finished.stop_id,
        stop_string=finished.stop_string,
        text_cut=finished.text_cut,
        at=at,
    )


def request_of(began: TurnBegan, key: SessionKey) -> TurnRequest:
    """The request that `began_record` wrote down."""
    known = {one.name for one in fields(TurnRequest)}
    asked: dict[str, Any] = {name: value for name, value in began.request.items() if name in known}
    for name in ("messages", "stop_token_ids", "stop"):
        if name in asked:
            asked[name] = tuple(asked[name])
    if "logit_bias" in asked:
        asked["logit_bias"] = tuple((int(token), float(bias)) for token, bias in asked["logit_bias"])
    if asked.get("grammar") is not None:
        asked["grammar"] = Grammar(**asked["grammar"])
    if asked.get("tools") is not None:
        asked["tools"] = ToolUse(**asked["tools"])
    if isinstance(asked.get("prompt"), list):
        asked["prompt"] = tuple(asked["prompt"])
    return TurnRequest(
        turn=began.turn, key=key, tenant=key.tenant, idempotency_key=began.idempotency_key, **asked
    )  # fmt: skip


def courses_of(resumed: Sequence[Sequence[Round]]) -> list[Course]:
    return [Course(list(rounds)) for rounds in resumed]
