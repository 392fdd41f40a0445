"""Where forks of the past may begin, and what the past was there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployment.engine.events import Finished
from deployment.errors import RequestError
from deployment.fork_points import ForkAt, found, of_turn, past_of
from deployment.ownership.words import Epoch, SessionKey
from deployment.session import Session
from deployment.turn_records import turn_record
from deployment.turns import Prompt
from deployment.wire import TurnRequest
from state.session_record import ForkPoint, SessionRecord

KEY = SessionKey("t" * 64, "s")


def ask(session: Session, turn: str, prompt: tuple[int, ...], *ids: int, history: int | None = None) -> None:
    """A turn of a session, from its prompt's ids to its end. `history`: so many messages of the transcript are sent."""
    messages = (*session.transcript[: history or 0], {"role": "user", "content": turn})
    request = TurnRequest(turn, "append" if history is None else "history", messages, KEY)
    finished = Finished(turn, "stop", ids, None, len(prompt), len(prompt) + len(ids) - 1, (), 1.0, 0.1)
    record = turn_record(request, "r", turn, 1, None, finished, 1.0)
    answer = {"role": "assistant", "content": str(ids)}
    session.book(Prompt(prompt, len(prompt) - 1), finished, (*messages, answer), record)


def three_turns() -> Session:
    session = Session(KEY, Epoch(1, 1))
    ask(session, "t1", (1, 2, 3), 4, 5)
    ask(session, "t2", (*session.ledger, 6), 7)
    ask(session, "t3", (*session.ledger, 8), 9, 10)
    return session


def named(session: Session, name: str) -> ForkPoint:
    point = replace(of_turn(session.record(), session.turns[-1].id), name=name)
    session.fork_points.append(point)
    return point


def refusal(record: SessionRecord, at: ForkAt) -> tuple[int, str, str]:
    with pytest.raises(RequestError) as caught:
        found(record, at)
    told = caught.value.refused
    return told.status, told.code, told.message


def test_every_turns_end_is_a_point_by_its_turn_and_by_its_frontier():
    record = three_turns().record()
    for at in (ForkAt(turn="t2"), ForkAt(frontier=6)):
        past = past_of(record, found(record, at))
        assert past.ledger == (1, 2, 3, 4, 5, 6, 7) and past.frontier == 6 and past.opener == 5
        assert past.transcript == record.transcript[:4]
        assert [turn.id for turn in past.turns] == ["t1", "t2"]
        assert [point.turn for point in past.fork_points] == ["t1", "t2"]


def test_a_fork_at_the_last_turns_end_is_the_session_itself():
    record = three_turns().record()
    assert past_of(record, found(record, ForkAt(turn="t3"))) == record


def test_a_history_that_goes_on_from_the_same_tokens_leaves_nothing_behind():
    session = three_turns()
    ask(session, "t4", (*session.ledger, 11), 12, history=6)
    assert [point.turn for point in session.fork_points] == ["t1", "t2", "t3", "t4"]
    past = past_of(session.record(), found(session.record(), ForkAt(turn="t2")))
    assert [message["content"] for message in past.transcript] == ["t1", "(4, 5)", "t2", "(7,)"]


def test_a_history_that_leaves_the_way_keeps_what_came_before_and_explicit_checkpoints_whole():
    session = three_turns()
    kept = named(session, "kept")
    whole = session.record()
    ask(session, "t4", (1, 2, 3, 4, 5, 20, 21), 22, history=2)
    record = session.record()
    assert refusal(record, ForkAt(turn="t2"))[:2] == (409, "turn_left")
    past = past_of(record, found(record, ForkAt(checkpoint="kept")))
    assert (past.ledger, past.transcript, past.turns) == (whole.ledger, whole.transcript, whole.turns)
    assert [point.turn for point in past.fork_points] == ["t1", "t3"]
    assert past.fork_points[-1] == kept, "with its name, and nothing of its own any more"
    assert past_of(record, found(record, ForkAt(turn="t3"))) == past, "the checkpoint has kept that turn"
    assert past_of(record, found(record, ForkAt(turn="t4"))).ledger == record.ledger


def test_a_checkpoint_that_was_left_is_the_same_after_further_turns():
    session = three_turns()
    named(session, "kept")
    ledger = session.ledger
    for number in range(3):
        ask(session, f"h{number}", (30 + number, 31), 32, history=0)
    record = session.record()
    assert past_of(record, found(record, ForkAt(checkpoint="kept"))).ledger == ledger


def test_what_is_no_point_is_not_found_and_what_there_is_is_said():
    session = three_turns()
    named(session, "one")
    record = session.record()
    assert refusal(record, ForkAt(checkpoint="two")) == (
        404, "checkpoint_not_found", "checkpoint: 'two' is none of the session's: one",
    )  # fmt: skip
    assert refusal(record, ForkAt(turn="t9"))[:2] == (404, "turn_not_found")
    status, _, message = refusal(record, ForkAt(frontier=5))
    assert status == 404 and "4, 6, 9" in message
    assert "none yet" in refusal(Session(KEY, Epoch(1, 1)).record(), ForkAt(frontier=5))[2]
