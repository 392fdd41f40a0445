"""What the pages say to type, on a real cluster."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.cluster import text
from tests.pages.reading import tried


def test_the_readme_does_what_it_says(url: str, tmp_path: Path):
    asked = next(one for one in tried("README.md", url, tmp_path) if "/migrate" in one.block.text)
    answer, moved = asked.answers
    assert "4172" in text(answer) and moved["from"] != moved["to"]


def test_a_first_conversation_goes_as_the_quickstart_says(url: str, tmp_path: Path):
    _, first, kept, moved = tried("docs/quickstart.md", url, tmp_path)
    began, asked = first.answers
    assert asked["session"]["id"] == "first" and asked["session"]["reused"] == began["session"]["frontier"]
    assert "4172" in text(asked)
    checkpoint, forked, counted, listed = kept.answers
    assert (checkpoint["name"], forked["parent"], forked["frontier"]) == ("told", "first", asked["session"]["frontier"])
    assert counted["session"]["id"] == "second" and {one["id"] for one in listed["data"]} >= {"first", "second"}
    gone, again = moved.answers
    assert gone["from"] != gone["to"] and again["session"]["hit"] == "peer" and "4172" in text(again)


def test_the_clients_page_does_what_it_says(url: str, tmp_path: Path):
    typed, program = tried("docs/client.md", url, tmp_path)
    lines = typed.output.splitlines()
    (moved,) = (line for line in lines if "moved from" in line)
    (found,) = (line for line in lines if "state from" in line and line != moved)
    assert "state from peer" in moved and "state from none" not in found, "what had to go is in the host store"
    assert typed.output.count("acceptance length") == 2 and "4172" in typed.output
    assert "4172" in program.output and program.output.endswith("404 session_not_found session\n")
