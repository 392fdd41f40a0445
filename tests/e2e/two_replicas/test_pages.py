"""What the pages say to type, on a real cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def test_the_clients_page_does_what_it_says(url: str, tmp_path: Path):
    page = (Path(__file__).resolve().parents[3] / "docs" / "client.md").read_text(encoding="utf-8")
    page = page.replace("127.0.0.1:8000", url.removeprefix("http://"))
    (typed,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    chat_here = f"{shlex.quote(sys.executable)} -m deployment.cli chat --url {url}"
    how: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60, "check": True}
    root = str(Path(__file__).resolve().parents[3])
    how["env"] = {**os.environ, "PYTHONPATH": root}
    talked = subprocess.run(["bash", "-euc", typed.replace("dflash-serve chat", chat_here)], **how)
    first, second = talked.stdout.splitlines()
    assert first and "4172" in second
    moved = [line for line in talked.stderr.splitlines() if "moved from" in line or "state from peer" in line]
    assert len(moved) == 2 and talked.stderr.count("acceptance length") == 2
    said = subprocess.run([sys.executable, "-c", program], **how).stdout
    assert "4172" in said and said.endswith("404 session_not_found session\n")


def test_the_commands_of_the_page_do_what_it_says(url: str, tmp_path: Path):
    page = (Path(__file__).resolve().parents[3] / "docs" / "http.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    told = [
        subprocess.run(
            ["bash", "-euc", block.replace("127.0.0.1:8000", url.removeprefix("http://"))],
            cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60,
        ).stdout
        for block in blocks
    ]  # fmt: skip
    first, forked, followed, twice, completed = told
    assert first.startswith("HTTP/1.1 200") and "x-session-resume: hit=none" in first
    assert '"session.checkpoint"' in forked and '"session.forked"' in forked
    rests = followed.split("data: [DONE]\n\n")
    assert len(rests) == 4 and rests[3] == "" and rests[1].startswith(rests[0]) and rests[2].endswith(rests[0])
    assert '"usage"' in rests[1].removeprefix(rests[0]) and "assistant" in rests[2] and "assistant" not in rests[0]
    assert twice == "one turn\n"
    assert json.loads(completed)["usage"]["completion_tokens"] == 8
