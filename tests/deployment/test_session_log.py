"""What a session's log says of its turns, and what comes back from it."""

from __future__ import annotations

import dataclasses
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployment.engine.commands import Grammar, TokenLogprob
from deployment.engine.events import Finished, Round
from deployment.ownership.log import Deleted, HeadMoved
from deployment.ownership.log_format import decode, encode
from deployment.ownership.words import NOTHING, SessionKey
from deployment.session_log import (
    Course,
    began_record,
    ended_record,
    living,
    logged_turns,
    request_of,
    round_record,
)
from deployment.tool_use import ToolUse
from deployment.turns import Prompt
from deployment.wire import TurnRequest
from state.media import Media, PlacedMedia

KEY = SessionKey("t" * 64, "a session/with a slash")
PROMPT = Prompt((1, 2, 3), 2)

_text = st.text(st.characters(codec="utf-8"), max_size=8)
_number = st.floats(0, 4, width=32)
_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | _text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_text, inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
_FIELDS: dict[str, Any] = {
    "mode": st.sampled_from(["history", "append", "prompt"]),
    "messages": st.lists(st.dictionaries(_text, _plain, max_size=3), max_size=3).map(tuple),
    "temperature": st.none() | _number,
    "top_p": st.none() | _number,
    "top_k": st.none() | st.integers(-1, 2**63),
    "seed": st.none() | st.integers(-(2**63), 2**63),
    "max_tokens": st.none() | st.integers(1, 4096),
    "stop_token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=2).map(tuple),
    "ignore_eos": st.booleans(),
    "drafting": st.booleans(),
    "enable_thinking": st.none() | st.booleans(),
    "min_p": st.none() | _number,
    "repetition_penalty": st.none() | _number,
    "presence_penalty": st.none() | _number,
    "frequency_penalty": st.none() | _number,
    "logit_bias": st.lists(st.tuples(st.integers(0, 999), _number), max_size=2).map(tuple),
    "min_tokens": st.integers(0, 9),
    "reproducible": st.booleans(),
    "stop": st.lists(_text, max_size=2).map(tuple),
    "include_stop": st.booleans(),
    "n": st.integers(1, 8),
    "logprobs": st.none() | st.integers(0, 20),
    "logprobs_mode": st.sampled_from(["raw_logprobs", "processed_logprobs"]),
    "thinking_budget": st.none() | st.integers(0, 99),
    "grammar": st.none() | st.builds(Grammar, st.sampled_from(["json_schema", "regex"]), _text, st.none()),
    "tools": st.none() | st.builds(ToolUse, _text, st.sampled_from(["none", "auto"]), st.none() | _text, st.booleans()),
    "preserve_thinking": st.none() | st.booleans(),
    "continues": st.booleans(),
    "unattended": st.booleans(),
    "echo": st.booleans(),
    "note": _text,
    "priority": st.sampled_from(["interactive", "background"]),
    "queue_seconds": st.none() | _number,
    "prompt": _text | st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple),
    "idempotency_key": st.none() | st.text(string.printable, min_size=1, max_size=9),
}
_NOT_LOGGED = {
    "turn": "the record's own", "key": "the log's own", "tenant": "the log's own",
    "must_exist": "was so", "repeated": "says who asked", "hint": "none with a session", "resumed": "the log has them",
    "accept_durable": "was so", "follows": "was so", "store": "the set's own",
    "draws": "the record has the seed",
    "media": "the prompt's are what the turn goes on with",
}  # fmt: skip


def test_every_field_of_a_request_is_logged_or_it_is_known_why_not():
    assert {field.name for field in dataclasses.fields(TurnRequest)} == _FIELDS.keys() | _NOT_LOGGED.keys()


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries(_FIELDS))
def test_a_request_is_itself_again_after_the_log(fields: dict[str, Any]):
    request = TurnRequest(turn="f" * 32, key=KEY, tenant=KEY.tenant, **fields)
    began = began_record(request, PROMPT, 2**64 - 1, 1.5)
    again = decode(encode(began))
    assert again == began
    assert request_of(began, KEY) == request


def test_a_turn_s_log_has_the_pixels_that_its_session_has_not_shown_before():
    old, new = (Media("image", digest * 64, (1, 3, 4, 4), 1, 1, (), digest.encode() * 48) for digest in "ab")
    shown, both = (PlacedMedia(old, (2,)),), (PlacedMedia(old, (1,)), PlacedMedia(new, (3,)))
    request = TurnRequest("f" * 32, "history", (), KEY, tenant=KEY.tenant)
    began = began_record(request, Prompt((5, 9, 5, 9, 5), 4, media=both), 7, 1.5, shown)
    assert [one.media.pixels for one in began.media] == [b"", new.pixels]
    (turn,) = logged_turns([decode(encode(began))])
    assert turn.prompt(shown).media == both
    assert [one.media.pixels for one in turn.prompt(()).media] == [b"", new.pixels], "the engine would refuse it"


# ------------------------------------------------------------------------------------------------ courses


def course(*rounds: tuple[int, int]) -> Course:
    """Rounds of so many ids, of which so many in all are held back after it."""
    made, start = Course(), 10
    for count, held_back in rounds:
        ids = tuple(range(start, start + count))
        made.rounds.append(Round("t", start, ids, held_back, count - 1, tuple(TokenLogprob(i, -1.0, ()) for i in ids)))
        start += count
    return made


def test_a_client_was_told_what_a_round_published_and_with_it_the_rounds_that_published_nothing():
    told = course((1, 0), (2, 2), (1, 3), (3, 1), (1, 2)).told()
    assert [published for _, published in told] == [1, 6]
    assert [[len(one.token_ids) for one in rounds] for rounds, _ in told] == [[1], [2, 1, 3]]


def test_held_back_ids_that_turned_out_to_be_text_were_told_at_the_end_of_their_turn():
    made = course((2, 1), (1, 2))
    turn = TurnRequest("t", "append", (), KEY, tenant=KEY.tenant)
    finished = Finished("t", "length", (10, 11, 12), None, 10, 12, (1, 0), 1.0, 0.1)
    records = [
        began_record(turn, Prompt(tuple(range(10)), 9), 1, 1.0),
        *(round_record(one, "t", 0) for one in made.rounds),
        ended_record(finished, "t", 0, 2.0),
    ]
    (logged,) = logged_turns(records)
    assert [published for _, published in logged.course(0).told()] == [1, 3]
    again = logged.finished()
    assert again is not None and (again.token_ids, again.hidden_ids, again.frontier) == ((10, 11, 12), (), 12)
    assert again.rounds == (1, 0) and again.acceptance_length == 1.0


def test_a_hidden_stop_id_is_committed_and_not_published():
    turn = TurnRequest("t", "append", (), KEY, tenant=KEY.tenant)
    finished = Finished("t", "stop", (10,), 11, 10, 11, (1,), 0.0, 0.1, hidden_ids=(11,))
    one = Round("t", 10, (10, 11), 1, 1, ())
    (logged,) = logged_turns(
        [began_record(turn, Prompt(tuple(range(10)), 9), 1, 1.0), round_record(one, "t", 0),
         ended_record(finished, "t", 0, 2.0)]
    )  # fmt: skip
    again = logged.finished()
    assert again is not None
    assert (again.token_ids, again.hidden_ids, again.stop_id, again.frontier) == ((10,), (11,), 11, 11)


def test_what_goes_on_elsewhere_is_all_that_was_committed():
    resumed = course((1, 0), (2, 2)).resumed
    assert (resumed.token_ids, resumed.rounds) == ((10, 11, 12), (0, 1))
    assert [entry.token for entry in resumed.logprobs] == [10, 11, 12]


def test_rounds_of_a_turn_whose_beginning_was_trimmed_are_passed_over():
    assert logged_turns([round_record(course((1, 0)).rounds[0], "old", 0)]) == []


@pytest.mark.parametrize("after", [0, 1])
def test_nothing_before_a_tombstone_is_the_past_of_who_has_the_name_now(after: int):
    turn = began_record(TurnRequest("t", "append", ()), PROMPT, 1, 1.0)
    records = [encode(turn), encode(Deleted(NOTHING, 1.0)), *[encode(HeadMoved(NOTHING, None, 0))] * after]
    assert living(records) == [HeadMoved(NOTHING, None, 0)] * after
