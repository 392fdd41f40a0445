"""The agent of docs/clients.md makes its ten calls, and each step finds what the one before it had computed."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from tests.deployment.serving import serving

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"


def test_the_agent_of_the_page_makes_ten_calls_and_finds_its_state():
    (agent,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    said = io.StringIO()
    with serving() as url, contextlib.redirect_stdout(said):
        exec(compile(agent.replace("http://127.0.0.1:8000", url), str(PAGE), "exec"), {})
    *steps, last = said.getvalue().splitlines()
    figures = [tuple(map(int, step.split())) for step in steps[:10]]
    assert [step for step, *_ in figures] == list(range(10)) and all(1 <= shelf <= 10 for _, shelf, *_ in figures)
    prompts, cached = [one[2] for one in figures], [one[3] for one in figures]
    assert all(found > before // 2 for before, found in zip(prompts, cached[1:], strict=False)), figures
    assert last
