"""The chaos tests' own judge: whatever a client could be told wrongly is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from deployment.event_ids import EventId, digest_of
from tests.e2e.chaos.comparison import Tally, tally
from tests.e2e.chaos.conversations import Step, conversation
from tests.e2e.chaos.reading import Answer, Heard
from tests.e2e.chaos.workload import Taken, Talk

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


def judged(turn: Taken, undisturbed: Taken | None = None) -> Tally:
    def talk(one: Taken) -> Talk:
        return Talk(conversation(1, 0, 1, 8), "key", turns=[one])

    return tally([talk(turn)], None if undisturbed is None else [talk(undisturbed)])


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
