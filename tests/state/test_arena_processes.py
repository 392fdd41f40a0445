"""Real processes that are killed without warning: what they had said is there, and what they were writing is kept."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from state.arena_file import sweep
from state.errors import ArenaError
from tests.state.arena_process import SIZE, WRITER, record, reservation
from tests.state.arenas import APPLICATION, KEY, NODE, arena_path, open_small, shared_directory

ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory() -> Iterator[Path]:
    with shared_directory() as path:
        yield path


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.state.arena_process", str(directory), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> list[str]:
    """What it had said beyond that, in whole lines."""
    assert process.stdout is not None
    process.kill()
    lines = process.stdout.read().split("\n")[:-1]
    process.wait()
    return lines


def test_killed_processes_leave_what_was_acknowledged_and_what_is_being_written(directory: Path) -> None:
    chance = random.Random(3)
    for _ in range(3):
        arena_path(directory, APPLICATION, NODE).unlink(missing_ok=True)
        store = start(directory, "store")
        facts = said(store).split()
        reserved = reservation(int(facts[1]), int(facts[2]))
        writer = start(directory, "writer", *facts)
        assert said(writer) == "writing"
        with pytest.raises(ArenaError, match="is in use by another host store process"):
            open_small(directory, SIZE)
        time.sleep(chance.uniform(0, 0.1))
        acknowledged = int(end(store)[-1])

        arena = open_small(directory, SIZE)
        records = arena.records(KEY)
        assert arena.incarnation == facts[0]
        assert records[-1] in (record(acknowledged - 1), record(acknowledged + 1)), "the last one, or one more, unsaid"
        last = acknowledged + (0 if records[-1] == record(acknowledged - 1) else 2)
        assert list(records) == [record(number) for number in range(last - len(records), last)]

        # The store is back before its engine: what that writes belongs to it, dead or alive.
        free = arena.free
        assert arena.awaited == {WRITER}
        end(writer)
        arena.register("another", [])
        assert (arena.free, arena.writing(), arena.awaited) == (free, (reserved,), {WRITER})
        arena.forget(WRITER)
        assert arena.free > free
        assert arena.awaited == frozenset()
        arena.close()


def test_a_sweep_leaves_an_arena_whose_store_died_to_those_that_still_write_there(directory: Path) -> None:
    store = start(directory, "store")
    facts = said(store).split()
    writer = start(directory, "writer", *facts)
    assert said(writer) == "writing"
    assert sweep(directory, []) == ()
    end(store)
    assert sweep(directory, []) == ()
    end(writer)
    assert sweep(directory, []) == (arena_path(directory, APPLICATION, NODE),)
