"""Server-sent events, cut anywhere."""

from __future__ import annotations

import pytest

from deployment.client.sse_reading import EventLines, ServerEvent

STREAM = (
    b": keep-alive\n\n"
    b"id: 1\ndata: \xc3\xa4: b\n\n"
    b"event: resume\r\nid: 2\r\ndata: {}\r\n\r\n"
    b"id: 3\n\n"
    b"data:two\ndata: lines\nretry: 9\n\n"
    b"id: 4\ndata: never ended\n"
)
EVENTS = [ServerEvent("ä: b", "1"), ServerEvent("{}", "2", "resume"), ServerEvent("two\nlines")]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_what_empty_lines_end_and_comments_and_bare_ids_are_none(size: int):
    lines = EventLines()
    parts = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert [event for part in parts for event in lines.feed(part)] == EVENTS
