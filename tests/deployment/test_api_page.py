"""The commands of docs/api.md do what it says."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from tests.deployment.serving import serving


def test_the_commands_of_the_page_do_what_it_says():
    page = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    with serving() as url:
        told = [_run(block, url) for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL)]
    (called,), (scored, encoded, decoded, version), (message,), (second, first) = told
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather" and json.loads(call["function"]["arguments"])["city"]
    assert [choice["text"] for choice in scored["choices"]] == ["3, 5, 7", "One day"]
    assert scored["choices"][0]["logprobs"]["tokens"] and encoded["count"] == len(encoded["tokens"])
    assert decoded["prompt"] and version["version"]
    assert message["content"][0]["text"] == "3, 4, 5, 6, 7, 8, 9"
    assert "4172" in json.dumps(second["output"]) and second["previous_response_id"] == first["id"]


def _run(block: str, url: str) -> list[Any]:
    """What the commands of a block print, one answer a line."""
    script = block.replace("127.0.0.1:8000", url.removeprefix("http://")).replace("curl", "curl -w '\\n'")
    run = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in run.stdout.splitlines()]
