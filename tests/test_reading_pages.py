"""docs/tour.md, docs/troubleshooting.md and docs/console.md name what there is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text("utf-8")


def test_the_tour_has_ten_steps_and_each_file_has_what_it_begins_with():
    steps = re.findall(r"^\| (\d+) \| `([\w/.]+)`: `(\w+)` \| .* \| `([\w/.]+)` \|$", page("tour"), re.MULTILINE)
    assert [int(number) for number, *_ in steps] == list(range(1, 11))
    for _, file, function, test in steps:
        assert re.search(rf"def {function}\(", (ROOT / file).read_text("utf-8")), (file, function)
        assert (ROOT / test).is_file(), test


def test_what_troubleshooting_quotes_is_what_is_said():
    _, starting, refused = re.split(
        r"^## (?:It does not start|A request is refused)$", page("troubleshooting"), flags=re.M
    )
    sources = [file.read_text("utf-8") for file in (ROOT / "deployment").rglob("*.py")]
    quoted = re.findall(r"^\| `([^`]+)` \|", starting, re.MULTILINE)
    assert len(quoted) >= 5 and all(any(text in source for source in sources) for text in quoted)
    codes = re.findall(r"^\| `(\w+)`", refused, re.MULTILINE)
    table = page("http").partition("## Errors")[2]
    assert len(codes) >= 7 and all(f"`{code}`" in table for code in codes)


def test_pictures_are_small_and_are_pictures():
    named = re.findall(r"!\[[^]]+\]\(([\w.-]+)\)", page("console"))
    assert len(named) == 2
    for name in named:
        data = (DOCS / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) < 150_000, name
