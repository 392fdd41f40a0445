"""What stands between fences in README.md and in docs/*.md, and where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))

COMMANDS = ("sh", "python")
SHOWN = ("json", "nginx", "text", "yaml")
"""What is there to be looked at, or to be copied into a file."""

NEEDS = ("cloud", "gpu", "k8s")
"""`cloud`: other machines, or packages and data from the network."""


@dataclass(frozen=True)
class Block:
    """`needs`: of `NEEDS`, what a test does not have; None: all is here."""

    page: str
    line: int
    language: str
    needs: str | None
    text: str

    @property
    def at(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether it is to be run where the tests run."""
        return self.language in COMMANDS and self.needs is None

    @property
    def moves(self) -> bool:
        """Whether it moves a session, which takes two replicas."""
        return self.runs and "migrate" in self.text


def written(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Raises ValueError, with file and line, for a block that says nothing a test could go by."""
    found: list[Block] = []
    lines = iter(enumerate(written(page).splitlines(), 1))
    before = ""
    for number, line in lines:
        if line.lstrip().startswith("```"):
            found.append(_fenced(page, number, line, lines))
        elif line.startswith("    ") and not before.strip():
            raise ValueError(f"{page}:{number}: a block without a fence has no language: {line.strip()}")
        before = line
    return found


def _fenced(page: str, number: int, opening: str, lines: Iterator[tuple[int, str]]) -> Block:
    match = re.fullmatch(r"```(\w+)(?: needs: (\w+))?", opening)
    if match is None:
        raise ValueError(f"{page}:{number}: {opening} has no language, or says more than what it needs")
    language, needs = match.groups()
    if language not in COMMANDS + SHOWN:
        raise ValueError(f"{page}:{number}: {language} is none of {', '.join(COMMANDS + SHOWN)}")
    if needs is not None and (needs not in NEEDS or language not in COMMANDS):
        raise ValueError(f"{page}:{number}: {opening}: commands may need one of {', '.join(NEEDS)}")
    body: list[str] = []
    for _, line in lines:
        if line == "```":
            return Block(page, number, language, needs, "\n".join(body) + "\n")
        body.append(line)
    raise ValueError(f"{page}:{number}: the block has no end")


def inline_commands(page: str) -> list[str]:
    """Commands of ours that stand in a sentence, where a line ends or not."""
    prose = re.sub(r"^```.*?^```$", "", written(page), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(found.split()) for found in re.findall(r"`(dflash-serve [^`]+)`", prose)]
