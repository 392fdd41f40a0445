"""The chaos tests' own judge: whatever a client could be told wrongly is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from deployment.event_ids import EventId, digest_of
from tests.e2e.chaos.comparison import Tally, tally
from tests.e2e.chaos.conversations import Step, conversation
from tests.e2e.chaos.reading import Answer, Heard, Refusal, Unanswered
from tests.e2e.chaos.workload import Broken, Taken, Talk

TURN = "a" * 32
PROMPT = (1, 2, 3)
IDS = (10, 11, 12, 13, 14)


def heard(ids: tuple[int, ...] = IDS, text: str = "abcde") -> Answer:
    """Two events after the first one: two tokens, then the rest."""

    def event(length: int, text: str, tokens: int | None) -> Heard:
        return Heard(float(length), EventId(TURN, len(PROMPT) + length, digest_of(ids[:length])), text, tokens)

    events = [event(0, "", None), event(2, text[:2], 2), event(len(ids), text[2:], len(ids) - 2)]
    return Answer(events, finish="length", replica="one")


def taken(answer: Answer, *followers: Answer, ids: tuple[int, ...] = IDS, said: str = "abcde") -> Taken:
    record = {"id": TURN, "replica": "one", "prompt_tokens": len(PROMPT), "completion_tokens": len(ids)}
    return Taken(Step("chat", "main"), answer, PROMPT + ids, said, 0, record, followers)


@dataclass(frozen=True)
class Log:
    """That of one turn."""

    ids: tuple[int, ...]

    def ids_of(self, turn: str, start: int) -> tuple[int, ...]:
        return self.ids if (turn, start) == (TURN, len(PROMPT)) else ()


def judged(turn: Taken, undisturbed: Taken | None = None) -> Tally:
    def talk(one: Taken) -> Talk:
        return Talk(conversation(1, 0, 1, 8), "key", turns=[one])

    return tally([talk(turn)], None if undisturbed is None else [talk(undisturbed)], Log(()))


def test_what_was_told_rightly_is_clean():
    found = judged(taken(heard(), heard()), taken(heard()))
    assert found.clean and (found.turns, found.tokens_published) == (1, 5)


def _without_an_event(answer: Answer) -> None:
    del answer.events[1]


def _with_an_event_twice(answer: Answer) -> None:
    answer.events.insert(2, answer.events[1])


def _with_a_short_end(answer: Answer) -> None:
    del answer.events[2]


def _with_another_token(answer: Answer) -> None:
    wrong = replace(answer.events[1].id, digest=digest_of((10, 99)))
    answer.events[1] = replace(answer.events[1], id=wrong)


@pytest.mark.parametrize(
    ("how", "counts"),
    [
        (_without_an_event, ("tokens_lost", 2)),
        (_with_an_event_twice, ("tokens_repeated", 2)),
        (_with_a_short_end, ("tokens_lost", 3)),
        (_with_another_token, ("tokens_contradicted", 2)),
    ],
)
def test_what_is_lost_repeated_or_contradicted_is_counted(how: Callable[[Answer], None], counts: tuple[str, int]):
    answer = heard()
    how(answer)
    found = judged(taken(answer))
    assert not found.clean and getattr(found, counts[0]) == counts[1]
    assert not judged(taken(heard(), answer)).clean, "a follower counts like a client"


def test_text_that_the_transcript_does_not_have_is_a_flaw():
    assert judged(taken(heard(text="abXde"))).what


def test_tokens_that_the_undisturbed_run_does_not_have_are_contradicted_from_the_first_on():
    other = (10, 11, 99, 98, 97)
    found = judged(taken(heard()), taken(heard(other), ids=other))
    assert found.tokens_contradicted == 3 and "from token 2 on" in found.what[0]


def test_another_prompt_is_a_flaw_though_the_answer_is_the_same():
    calm = taken(heard())
    assert not judged(taken(heard()), replace(calm, ledger=(9, 2, 3, *IDS))).clean


# ------------------------------------------------------------------------------------------------ given up


def given_up(broken: Broken, log: tuple[int, ...] = (), refusals: Sequence[Refusal] = ()) -> Tally:
    unanswered = Unanswered("no answer", "no_answer")
    talk = Talk(conversation(1, 0, 1, 8), "key", refusals=list(refusals), given_up=unanswered, broken=broken)
    return tally([talk], None, Log(log))


def broken(answer: Answer, ledger: tuple[int, ...] | None, follower: Answer | None = None) -> Broken:
    return Broken(Step("chat", "main"), answer, follower or Answer(), None, ledger)


def test_what_a_client_was_told_before_it_gave_up_is_in_its_session_that_went_on_or_not():
    part = heard(IDS[:4])
    for ledger in (PROMPT + IDS[:4], PROMPT + IDS, PROMPT + IDS + (1, 2)):
        found = given_up(broken(part, ledger, heard(IDS[:2])))
        assert found.clean and (found.given_up, found.tokens_published, found.tokens_unshown) == (1, 4, 0)
    assert given_up(broken(part, (*PROMPT, 10, 11, 12, 99, 14))).tokens_contradicted == 2
    lost = given_up(broken(part, PROMPT + IDS[:2]))
    assert not lost.clean and lost.tokens_lost == 2
    assert not given_up(broken(part, PROMPT + IDS, heard((10, 99)))).clean, "its follower counts, too"


def test_where_no_session_answers_what_was_told_is_compared_with_its_log_as_far_as_that_was_seen():
    part = heard(IDS[:4])
    assert given_up(broken(part, None)).tokens_unshown == 4
    seen = given_up(broken(part, None), log=IDS)
    assert seen.clean and seen.tokens_unshown == 0
    half = given_up(broken(part, None), log=IDS[:3])
    assert half.clean and half.tokens_unshown == 2
    assert given_up(broken(part, None), log=(10, 99, 12, 13)).tokens_contradicted > 0
    assert not given_up(broken(part, None, heard((10, 99)))).clean, "two who heard something else"


def test_a_client_that_was_told_nothing_before_it_gave_up_lost_nothing():
    found = given_up(broken(Answer(), None))
    assert found.clean and (found.given_up, found.tokens_published) == (1, 0)


def test_every_refusal_is_counted_and_one_that_nobody_may_meet_is_a_flaw():
    busy, fault = Refusal(409, "session_busy", ""), Refusal(500, "internal_error", "")
    found = given_up(broken(Answer(refusals=[busy]), None, Answer(refusals=[busy])), refusals=[busy])
    assert found.clean and found.counts()["refusals"] == {"session_busy": 3}
    assert not given_up(broken(Answer(), None), refusals=[fault]).clean
    whole = heard()
    whole.refusals.append(fault)
    for turn in (taken(whole), taken(heard(), whole)):
        assert (judged(turn).clean, judged(turn).refusals) == (False, {"internal_error": 1})
    undisturbed = judged(taken(heard()), taken(whole))
    assert not undisturbed.clean and not undisturbed.refusals, "nor may anybody meet it in the undisturbed run"
