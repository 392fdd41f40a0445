"""docs/tour.md, docs/quickstart.md and docs/troubleshooting.md name what there is. Their commands run elsewhere:
`tests/deployment/test_api_page.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from deployment.cli import app

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = ("console", "quickstart", "tour", "troubleshooting")


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text("utf-8")


def test_the_tour_has_ten_steps_and_each_file_has_what_it_begins_with():
    steps = re.findall(r"^\| (\d+) \| `([\w/.]+)`: `(\w+)` \| .* \| `([\w/.]+)` \|$", page("tour"), re.MULTILINE)
    assert [int(number) for number, *_ in steps] == list(range(1, 11))
    for _, file, function, test in steps:
        assert re.search(rf"def {function}\(", (ROOT / file).read_text("utf-8")), (file, function)
        assert (ROOT / test).is_file(), test


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_pages_and_to_headings_that_there_are(name: str):
    for target in re.findall(r"\]\((?!https:)([^)]+)\)", page(name)):
        file, _, heading = target.partition("#")
        assert (DOCS / file).exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", (DOCS / file).read_text("utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, target


@pytest.mark.parametrize("name", PAGES)
def test_files_that_are_named_exist(name: str):
    for file in re.findall(r"`((?:deployment|tests|model|kernels|state)/[\w/.]*)`", page(name)):
        assert (ROOT / file).exists(), file


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


@pytest.mark.parametrize("name", PAGES)
def test_commands_that_are_shown_and_their_options_exist(name: str):
    """Those that need more than a test has, too."""
    commands: Any = get_command(app)
    for command, rest in re.findall(r"dflash-serve ([a-z-]+)([^\n`#|]*)", page(name)):
        options = {option for parameter in commands.commands[command].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= options, command
