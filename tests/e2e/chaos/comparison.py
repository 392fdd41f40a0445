"""Was anything lost, repeated or contradicted? What clients heard, against each other, the ledger and an undisturbed
run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from deployment.event_ids import digest_of
from tests.e2e.chaos.reading import Answer, Refusal
from tests.e2e.chaos.workload import Broken, Taken, Talk


class Logs(Protocol):
    def ids_of(self, turn: str, start: int) -> tuple[int, ...]:
        """What a turn's log says from a ledger position on, as far as that is known."""
        ...


@dataclass
class Tally:
    """Counts of one run. `streams_resumed`: those that another replica ended than began them, or whose client asked for
    the rest; `tokens_recomputed`: prefilled beyond what the undisturbed run prefilled, by a turn's last owner.
    `given_up`: conversations whose client was refused for good; `tokens_unshown`: what such a client was told in its
    last turn, where neither the session nor a copy of its log was there to compare with. `refusals`: of all requests,
    by code. `what`: each flaw."""

    turns: int = 0
    streams_resumed: int = 0
    streams_resumed_by_client: int = 0
    given_up: int = 0
    tokens_published: int = 0
    tokens_recomputed: int = 0
    tokens_lost: int = 0
    tokens_repeated: int = 0
    tokens_contradicted: int = 0
    tokens_unshown: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    what: list[str] = field(default_factory=list)
    why_given_up: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.tokens_lost or self.tokens_repeated or self.tokens_contradicted or self.what)

    def counts(self) -> dict[str, Any]:
        numbers = {name: value for name, value in asdict(self).items() if isinstance(value, int)}
        return {**numbers, "refusals": dict(sorted(self.refusals.items()))}


def tally(
    talks: Sequence[Talk], undisturbed: Sequence[Talk] | None, logs: Logs, ingress_died: Sequence[float] = ()
) -> Tally:
    """`undisturbed`: the same conversations, with equal seeds. Without it owners do not draw alike, and only what was
    said of one turn is compared. `ingress_died`: when, on the monotonic clock."""
    total = Tally()
    for number, talk in enumerate(talks):
        if talk.given_up is not None:
            total.given_up += 1
            total.why_given_up.append(f"{talk.conversation.name}, step {talk.steps}: {talk.given_up}")
        diverged = False
        for at, taken in enumerate(talk.turns):
            where = f"{talk.conversation.name}, turn {at}"
            _check(total, where, taken)
            if undisturbed is not None:
                diverged = _compare(total, where, taken, undisturbed[number].turns[at], diverged)
        if talk.broken is not None:
            _check_broken(total, f"{talk.conversation.name}, turn {len(talk.turns)}, given up", talk.broken, logs)
        for refusal in _refusals(talk):
            total.refusals[refusal.code] += 1
    for talk in (*talks, *(undisturbed or ())):
        faults = [refusal for refusal in _refusals(talk) if refusal.is_fault(ingress_died)]
        total.what.extend(f"{talk.key}: {refusal}" for refusal in faults)
    return total


def _refusals(talk: Talk) -> Iterator[Refusal]:
    yield from talk.refusals
    for taken in talk.turns:
        for answer in (taken.answer, *taken.followers):
            yield from answer.refusals
    if talk.broken is not None:
        yield from talk.broken.answer.refusals
        yield from talk.broken.follower.refusals


def _check(total: Tally, where: str, taken: Taken) -> None:
    answer = taken.answer
    total.turns += 1
    total.tokens_published += answer.tokens
    total.streams_resumed_by_client += answer.resumed
    total.streams_resumed += taken.moved or answer.resumed > 0
    _check_heard(total, where, answer, taken)
    for follower in taken.followers:
        _check_heard(total, f"{where}, follower", follower, taken)
        if (follower.end, follower.text, follower.finish) != (answer.end, answer.text, answer.finish):
            total.what.append(f"{where}: its follower heard {follower.text!r}, its client {answer.text!r}")


def _check_heard(total: Tally, where: str, answer: Answer, taken: Taken) -> None:
    ids = taken.ledger[answer.start :]
    total.tokens_lost += max(0, taken.record["completion_tokens"] - answer.tokens)
    if answer.start != taken.record["prompt_tokens"] or answer.tokens != taken.record["completion_tokens"]:
        total.what.append(f"{where}: heard {answer.start} to {answer.end}, the session says {taken.record}")
    if answer.text != taken.said:
        total.what.append(f"{where}: heard {answer.text!r}, the transcript has {taken.said!r}")
    _check_events(total, where, answer, ids)


def _check_broken(total: Tally, where: str, broken: Broken, logs: Logs) -> None:
    """What was told counts, also if its client was refused the rest: it is in the session, or at least in its log."""
    told: dict[int, str] = {}
    total.tokens_published += broken.answer.tokens if broken.answer.events else 0
    for answer in (broken.answer, broken.follower):
        if answer.turn is None:
            continue
        if broken.ledger is not None:
            total.tokens_lost += max(0, answer.end.position - len(broken.ledger))
            _check_events(total, where, answer, broken.ledger[answer.start :])
        else:
            ids = logs.ids_of(answer.turn, answer.start)
            shown = [event for event in answer.events if event.id.position <= answer.start + len(ids)]
            total.tokens_unshown += answer.end.position - shown[-1].id.position
            _check_events(total, where, replace(answer, events=shown), ids)
        for event in answer.events:
            if told.setdefault(event.id.position, event.id.digest) != event.id.digest:
                total.tokens_contradicted += 1
                total.what.append(f"{where}: event {event.id} is not what its client heard")


def _check_events(total: Tally, where: str, answer: Answer, ids: Sequence[int]) -> None:
    right = position = answer.start
    for event in answer.events[1:]:
        came = event.id.position - position
        if event.tokens is not None:
            total.tokens_lost += max(0, came - event.tokens)
            total.tokens_repeated += max(0, event.tokens - came)
        total.tokens_repeated += max(0, -came)
        position = event.id.position
        if digest_of(ids[: position - answer.start]) != event.id.digest or event.id.turn != answer.turn:
            total.tokens_contradicted += max(1, position - right)
            total.what.append(f"{where}: event {event.id} is not what the ledger says")
        right = position


def _compare(total: Tally, where: str, taken: Taken, calm: Taken, diverged: bool) -> bool:
    """Whether the turn is another one than in the undisturbed run. `diverged`: one before it was; what only follows
    from that, since the prompts differ, is not counted again."""
    total.tokens_recomputed += max(0, taken.answer.prefilled - calm.answer.prefilled)
    heard, usual = taken.answer, calm.answer
    prompts = taken.ledger[: heard.start], calm.ledger[: usual.start]
    mine, theirs = taken.ledger[heard.start :][: heard.tokens], calm.ledger[usual.start :][: usual.tokens]
    alike = mine == theirs and heard.text == usual.text and heard.finish == usual.finish
    if (alike and prompts[0] == prompts[1]) or (diverged and prompts[0] != prompts[1]):
        return diverged
    same = next((at for at, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), len(mine))
    total.tokens_contradicted += max(1, len(mine) - same)
    asked = f"{taken.step.kind} in {taken.step.branch}, {_prompts(*prompts)}, {dict(taken.step.options)}"
    way = f"{'moved' if taken.moved else 'not moved'}, {heard.resumed} times resumed, {heard.tries} tries"
    total.what.append(
        f"{where}: differs from the undisturbed run from token {same} on, of {len(mine)} and {len(theirs)} ({asked}; "
        f"{way}): {heard.text!r}, undisturbed {usual.text!r}"
    )
    return True


def _prompts(mine: tuple[int, ...], theirs: tuple[int, ...]) -> str:
    if mine == theirs:
        return "equal prompts"
    same = next((at for at, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), len(mine))
    return f"prompts of {len(mine)} and {len(theirs)} ids that differ from {same} on"
