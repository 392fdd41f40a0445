"""A page as its reader would try it: every block in turn, in one directory, against one server."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model import DEMO
from tests.deployment.certificates import written as written_certificate
from tests.deployment.media_files import picture
from tests.pages.blocks import ROOT, Block, blocks
from tests.pages.programs import check
from tests.pages.shell import Room

PLACES = {
    "TARGET": DEMO / "target",
    "DRAFT": DEMO / "dflash2",
    "CONFIG": ROOT / "deployment/configs/demo.yaml",
}
"""What a reader would put in the place of these words."""


@dataclass(frozen=True)
class Tried:
    """What a block printed."""

    block: Block
    output: str

    @property
    def answers(self) -> list[Any]:
        """The JSON documents that it printed, one after the other."""
        decoder, found, rest = json.JSONDecoder(), [], self.output.strip()
        while rest:
            document, end = decoder.raw_decode(rest)
            found.append(document)
            rest = rest[end:].lstrip()
        return found


def tried(page: str, url: str | None, place: Path) -> list[Tried]:
    """All blocks of commands of a page; `url` None: those that need what is not here, read and not run. Raises
    AssertionError that begins with the block's file and line."""
    room = Room(place, url)
    _furnish(room.place)
    told: list[Tried] = []
    for block in blocks(page):
        if block.runs if url is not None else block.needs is not None:
            with named(block):
                told.append(Tried(block, _run(block, room, url)))
    return told


def _run(block: Block, room: Room, url: str | None) -> str:
    if block.language == "python":
        program = compile(room.here(block.text), block.at, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as said:
            if url is not None:
                exec(program, {})
        return said.getvalue()
    ran = room.run(block.text)
    return "".join([ran.output, *(check(call, url, room.place) for call in ran.calls)])


@contextlib.contextmanager
def named(block: Block) -> Iterator[None]:
    """What goes wrong is told with the block's file and line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise AssertionError(f"{block.at}: {type(error).__name__}: {error}") from error


def _furnish(room: Path) -> None:
    """The files that pages speak of."""
    for name, place in PLACES.items():
        (room / name).symlink_to(place)
    (prompts, *_) = [block.text for block in blocks("docs/generate.md") if block.language == "json"]
    (room / "prompts.jsonl").write_text(prompts)
    weather = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}}
    (room / "tools.json").write_text(json.dumps([{"type": "function", "function": weather}]))
    (room / "heron.png").write_bytes(picture())
    (room / "your-texts").mkdir()
    (room / "your-texts" / "one.txt").write_text("Count from 3 to 9.")
    files = written_certificate(room)
    files.certificate.rename(room / "cert.pem")
    files.key.rename(room / "key.pem")
