"""Runs a page's commands: bash itself reads them, and finds no other programs than those that may run here, and
stand-ins for all others, which only write down how they were called."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.pages.blocks import ROOT

TOOLS = ("base64", "cat", "cut", "grep", "openssl", "sed", "sha256sum")
"""Run as they are, as `curl` is where a server is."""

STAND_INS = (
    "dflash", "dflash-serve", "git", "guidellm", "kubectl", "lm_eval", "make", "pip", "python", "ray", "serve"
)  # fmt: skip

_STAND_IN = f"""#!/bin/sh
exec {sys.executable} -IS -c '
import json, os, sys
call = {{"program": sys.argv[1], "arguments": sys.argv[2:], "typed": sys.stdin.read(),
        "exported": dict(os.environ)}}
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(call) + chr(10))
' "${{0##*/}}" "$@"
"""

_CURL = """#!/bin/sh
exec {curl} -sS -w '%{{stderr}}%{{http_code}} %{{url_effective}}\\n' "$@"
"""


@dataclass(frozen=True)
class Call:
    """How a stand-in was called, what a pipe brought it, and what the block had exported."""

    program: str
    arguments: tuple[str, ...]
    typed: str
    exported: dict[str, str]

    def __str__(self) -> str:
        return " ".join((self.program, *self.arguments))


@dataclass(frozen=True)
class Ran:
    """What a block printed, and the calls of it that are left to be looked at."""

    output: str
    calls: tuple[Call, ...]


class Room:
    """A directory that looks like the repository, with bash's programs beside it. `url` None: nothing is asked for."""

    def __init__(self, place: Path, url: str | None) -> None:
        self.place = place / "here"
        self._url = url
        self._calls = place / "calls"
        programs = place / "programs"
        programs.mkdir()
        self.place.mkdir()
        for entry in ("Makefile", "bench", "cluster.yaml", "deployment", "docs", "model", "pyproject.toml", "tests"):
            (self.place / entry).symlink_to(ROOT / entry)
        for name in (*STAND_INS, *(("curl",) if url is None else ())):
            _write_program(programs / name, _STAND_IN)
        for name in TOOLS:
            (programs / name).symlink_to(_found(name))
        if url is not None:
            _write_program(programs / "curl", _CURL.format(curl=_found("curl")))
        (self.place / "dflash-serve").symlink_to(self.place)
        (self.place / ".venv").mkdir()
        (self.place / ".venv" / "bin").symlink_to(programs)
        self._environment = {**os.environ, "PATH": str(programs), "CALLS": str(self._calls), "HOME": str(place)}

    def run(self, script: str) -> Ran:
        """Raises AssertionError with what bash or a server said."""
        self._calls.write_text("")
        done = subprocess.run(
            [_found("bash"), "-euo", "pipefail", "-c", self.here(script)],
            cwd=self.place, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        refused = [line for line in done.stderr.splitlines() if line[:1] in "45" and line[1:4].strip().isdecimal()]
        assert done.returncode == 0 and not refused, f"exit code {done.returncode}: {done.stderr}\n{done.stdout}"
        return Ran(done.stdout, tuple(map(self._call, self._calls.read_text().splitlines())))

    def _call(self, line: str) -> Call:
        call = json.loads(line)
        exported = {name: value for name, value in call["exported"].items() if name not in self._environment}
        return Call(call["program"], tuple(call["arguments"]), call["typed"], exported)

    def here(self, text: str) -> str:
        """With the address of the server that there is."""
        return text if self._url is None else text.replace("127.0.0.1:8000", self._url.removeprefix("http://"))


def _found(name: str) -> str:
    path = shutil.which(name)
    assert path is not None, f"{name} is not installed"
    return path


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
