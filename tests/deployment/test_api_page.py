"""The commands of docs/api.md and docs/quickstart.md do what they say."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deployment.serving import serving


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as url:
        yield url


def test_a_first_conversation_goes_as_the_quickstart_says(url: str):
    (first, asked), (kept, forked, counted, listed) = _told("quickstart", url)
    assert asked["session"]["id"] == "first" and asked["session"]["reused"] == first["session"]["frontier"]
    assert "4172" in asked["choices"][0]["message"]["content"]
    assert (kept["name"], forked["parent"], forked["frontier"]) == ("told", "first", asked["session"]["frontier"])
    assert counted["session"]["id"] == "second" and {one["id"] for one in listed["data"]} == {"first", "second"}


def test_the_commands_of_the_page_do_what_it_says(url: str):
    told = _told("api", url)
    (called,), (scored, encoded, decoded, version), (message,), (second, first) = told
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather" and json.loads(call["function"]["arguments"])["city"]
    assert [choice["text"] for choice in scored["choices"]] == ["3, 5, 7", "One day"]
    assert scored["choices"][0]["logprobs"]["tokens"] and encoded["count"] == len(encoded["tokens"])
    assert decoded["prompt"] and version["version"]
    assert message["content"][0]["text"] == "3, 4, 5, 6, 7, 8, 9"
    assert "4172" in json.dumps(second["output"]) and second["previous_response_id"] == first["id"]


def _told(page: str, url: str) -> list[list[Any]]:
    """What each block of a page's commands prints, but those that need more than this machine."""
    text = (Path(__file__).resolve().parents[2] / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return [_run(block, url) for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]


def _run(block: str, url: str) -> list[Any]:
    """What the commands of a block print, one answer a line."""
    script = block.replace("127.0.0.1:8000", url.removeprefix("http://")).replace("curl", "curl -w '\\n'")
    run = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in run.stdout.splitlines()]
