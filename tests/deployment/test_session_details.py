"""A session as the interface shows it, whatever an imported document had in it."""

from __future__ import annotations

import json

from deployment.ownership.messages import Placed
from deployment.ownership.words import Epoch, Member, SessionKey
from deployment.server_objects import session_details
from deployment.wire import SessionInfo

PLACEMENT = Placed(SessionKey("t" * 64, "one"), Epoch(1, 2), "a", (Member("node", "0" * 32),))


def test_bytes_in_an_imported_transcript_are_shown_as_hex():
    message = {"role": "user", "content": [{"type": b"\xff\x00"}], "x": {"y": [b"a"]}}
    known = SessionInfo("a", Epoch(1, 2), 3, 2, None, (message,), ({"request": {"stop": b"\xfe"}},))
    shown = session_details(PLACEMENT, known)
    assert json.loads(json.dumps(shown)) == shown
    assert shown["transcript"] == [{"role": "user", "content": [{"type": "ff00"}], "x": {"y": ["61"]}}]
    assert shown["turns"] == [{"request": {"stop": "fe"}}] and shown["tokens"] == 3


def test_a_session_whose_owner_does_not_answer_is_shown_as_the_directory_has_it():
    assert session_details(PLACEMENT, None) == {
        "id": "one", "object": "session", "replica": "a", "epoch": "1.2", "store": True, "copies": [{"node": "node"}],
    }  # fmt: skip
