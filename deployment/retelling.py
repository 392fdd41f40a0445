"""What does the log tell of a turn that was over before its session came here? Its events, once more, for whoever has
not heard its end: its replica may have died between writing that and telling it."""

from __future__ import annotations

from collections.abc import Iterator

from deployment.session import Session
from deployment.session_log import LoggedTurn
from deployment.turns import TurnText
from deployment.wire import Closed, Delta, Opened, SessionFacts, TokenFact, TurnEvent
from model.tokenizer import Tokenizer


def retold(replica: str, model: str, session: Session, logged: LoggedTurn, tokenizer: Tokenizer) -> Iterator[TurnEvent]:
    """From Opened to Closed. `logged` is over. What its prompt had reused is not in the log."""
    began, prompt, course, finished = logged.began, logged.prompt, logged.course(0), logged.finished()
    assert finished is not None
    request = logged.request(session.key)
    facts = SessionFacts(session.key.session, str(session.epoch), "none", 0, 0)
    yield Opened(
        replica, model, began.seed, len(prompt.ids), 0, facts, began.turn, choices=request.n, created=int(began.at)
    )  # fmt: skip
    text = TurnText(tokenizer, prompt.opener)
    ids, told, before = course.token_ids, course.told(), 0
    logprobs = [entry for one in course.rounds for entry in one.logprobs]
    for number, (_, published) in enumerate(told, start=1):
        cut = finished.text_cut if number == len(told) else 0
        reasoning, content = text.push(ids[before:published], cut)
        shown = tuple(
            TokenFact(
                tokenizer.spelled(entry.token),
                entry.logprob,
                tuple((tokenizer.spelled(token), value) for token, value in entry.top),
            )
            for entry in logprobs[before:published]
        )
        position = len(prompt.ids) + published
        yield Delta(reasoning, content, 0, shown, ids[before:published], position, cut)
        before = published
    reasoning, content = text.flush()
    yield Closed(
        finish_reason=finished.finish_reason,
        completion_tokens=len(finished.token_ids),
        rounds=finished.rounds,
        acceptance_length=finished.acceptance_length,
        seconds=finished.seconds,
        session=SessionFacts(facts.id, facts.epoch, facts.hit, 0, 0, finished.frontier),
        stop_reason=finished.stop_id if finished.stop_id in request.stop_token_ids else finished.stop_string,
        reasoning=reasoning,
        content=content,
    )
