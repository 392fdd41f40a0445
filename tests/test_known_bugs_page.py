"""docs/known-bugs.md names tests: each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = [line for line in (ROOT / "docs/known-bugs.md").read_text().splitlines() if re.match(r"\| B\d+ \|", line)]


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=[row.split()[1] for row in ROWS])
def test_every_test_that_the_page_names_for_a_bug_exists(row: str) -> None:
    nodes = re.findall(r"`(tests/[a-z0-9_/]+\.py)::(test_[a-z0-9_]+)`", row)
    assert nodes and len(nodes) == row.count("::")
    for file, name in nodes:
        assert name in functions(ROOT / file), f"{file} has no {name}"


def test_the_page_has_a_row_for_every_bug_that_it_counts() -> None:
    page = (ROOT / "docs/known-bugs.md").read_text()
    (count,) = re.findall(r"(\d+) bugs", page)
    assert len({row.split()[1] for row in ROWS}) == len(ROWS) == int(count)
