"""What is kept of a turn: enough to repeat it and to tell a retry, and nothing of who asked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from deployment.engine.commands import Grammar
from deployment.engine.events import Finished, Started
from deployment.ownership import SessionKey
from deployment.ownership.words import Epoch
from deployment.session import Session
from deployment.tool_use import ToolUse
from deployment.turn_records import (
    WHILE_NEWEST,
    canonical_request,
    followed,
    request_sha256,
    tools_sha256,
    turn_object,
    turn_record,
)
from deployment.turns import Prompt
from deployment.wire import TurnRequest
from state.fields import Fields
from state.session_manifest import parse_session, session_fields
from state.session_record import SessionRecord

REQUEST = TurnRequest("t1", "history", ({"role": "user", "content": "Grüße \ud83d"},), temperature=0.5, stop=("a", "b"))
FINISHED = Finished("t1", "stop", (5, 6), 7, 10, 12, (1, 0), 1.5, 0.1)


def test_a_canonical_request_holds_what_was_asked_and_not_who_asked_or_what_is_default():
    asked = replace(REQUEST, key=SessionKey("t" * 64, "s"), tenant="t" * 64, logit_bias=((3, -1.5),), n=1)
    assert canonical_request(asked) == {"temperature": 0.5, "stop": ["a", "b"], "logit_bias": [[3, -1.5]]}
    grammar = replace(asked, grammar=Grammar("regex", "a+"))
    assert canonical_request(grammar)["grammar"] == {"kind": "regex", "source": "a+", "after": None, "needed": True}


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.6}, {"seed": 3}, {"mode": "append"}, {"stop": ("b", "a")},
        {"messages": ({"role": "user", "content": "x"},)},
    ],
)  # fmt: skip
def test_a_request_that_differs_has_another_digest(change: dict[str, Any]):
    assert request_sha256(replace(REQUEST, **change)) != request_sha256(REQUEST)


def test_a_repeated_request_has_the_same_digest_whoever_and_whenever_it_comes():
    again = replace(REQUEST, turn="t2", key=SessionKey("u" * 64, "s"), tenant="u" * 64, must_exist=True)
    assert request_sha256(again) == request_sha256(REQUEST)


def test_tools_are_asked_for_in_full_and_kept_as_a_digest():
    tools = ToolUse('[{"type": "function", "function": {"name": "f"}}]', "required")
    asked = replace(REQUEST, tools=tools, note="n")
    kept = turn_record(asked, "r1", "t1", 3, None, FINISHED, 1.5).request
    assert canonical_request(asked)["tools"]["source"] == tools.source and "note" not in canonical_request(asked)
    assert kept["tools"] == {"source": tools_sha256(tools), "choice": "required", "function": None, "parallel": True}
    assert kept["note"] == "n" and request_sha256(asked) == request_sha256(replace(asked, note=""))


def test_what_a_note_has_while_it_is_the_newest_goes_when_another_turn_follows():
    session = Session(SessionKey("t" * 64, "s"), Epoch(0, 1))
    notes = [json.dumps({"n": n, WHILE_NEWEST: {"tools": "long"}}) for n in range(3)]
    for number, note in enumerate(notes):
        record = turn_record(replace(REQUEST, note=note), "r1", f"t{number}", 3, None, FINISHED, 1.5)
        session.book(Prompt((1, 2), 1), FINISHED, (), record)
    assert [turn.request["note"] for turn in session.turns] == ['{"n": 0}', '{"n": 1}', notes[2]]
    assert session.turns[0] == replace(record, id="t0", request={**record.request, "note": '{"n": 0}'})


@pytest.mark.parametrize("note", [WHILE_NEWEST, f'["{WHILE_NEWEST}"]', "[" * 9000 + WHILE_NEWEST, 7, None])
def test_a_note_that_came_in_a_document_and_is_none_of_ours_stays_as_it_is(note: Any):
    record = replace(turn_record(REQUEST, "r1", "t1", 3, None, FINISHED, 1.5), request={"note": note})
    assert followed(record) == record


def test_what_stays_of_a_note_that_came_in_a_document_can_be_written():
    record = turn_record(REQUEST, "r1", "t1", 3, None, FINISHED, 1.5)
    note = f'{{"facts": "\\ud83d", "{WHILE_NEWEST}": 1}}'
    kept = followed(replace(record, request={"note": note})).request["note"]
    assert kept.encode() and json.loads(kept) == {"facts": "\ud83d"}


@pytest.mark.parametrize("started", [None, Started("t1", "peer", 8, 2)])
def test_a_turns_record_fits_the_format_and_the_interface(started: Started | None):
    record = turn_record(REQUEST, "r1", "t1", 2**64 - 1, started, FINISHED, 1.5)
    fields = session_fields(SessionRecord("s", (1, 2), turns=(record,)))
    assert parse_session(Fields(fields, "manifest")).turns == (record,)
    shown = turn_object(record)
    assert (shown["prompt_tokens"], shown["completion_tokens"], shown["seed"]) == (10, 2, 2**64 - 1)
    assert shown["hit"] == ("peer" if started else "none") and "request_sha256" not in shown
