"""Which tests run in one process, and in which order, where several processes share them (`make test`).

A file's tests stay together, for they share models and engines; all files that start a Ray cluster are one group, since
two clusters at a time slow each other down. What takes long comes first, so that all processes end together.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest

RAY = ("tests/e2e", "tests/deployment/cluster")
LONG = (
    "tests/engine",
    "tests/kernels/test_compiles.py",
    "tests/kernels/test_controls.py",
    "tests/ownership",
    "tests/model/test_parity.py",
    "tests/deployment",
)
"""The longest first. Files that are in none of these take seconds at most."""


def scheduling(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` by groups of files. Imports pytest-xdist, which is not needed where nothing is distributed."""
    from xdist.scheduler import LoadFileScheduling

    class Grouped(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(file_of(nodeid))

    return Grouped(config, log)


def file_of(nodeid: str) -> str:
    """A test's file, relative to the repository."""
    return nodeid.partition("::")[0]


def group_of(file: str) -> str:
    """Whose process runs a file's tests; `file` is relative to the repository."""
    return "ray" if _lies_in(file, RAY) is not None else file


def rank_of(file: str) -> int:
    """Files of a lower rank begin earlier."""
    if group_of(file) == "ray":
        return 0
    place = _lies_in(file, LONG)
    return 1 + (len(LONG) if place is None else place)


def _lies_in(file: str, places: tuple[str, ...]) -> int | None:
    """Index of the first of `places`, files or directories, that `file` is or lies in."""
    path = PurePosixPath(file)
    return next((index for index, place in enumerate(places) if path.is_relative_to(place)), None)
