"""The chaos tests' kills: one that met nobody is made good, and nothing else that goes wrong is passed over."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from tests.e2e.chaos import faults
from tests.e2e.chaos.faults import Faults


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def killing(monkeypatch: pytest.MonkeyPatch, *processes: int | Exception) -> Faults:
    """Of a cluster whose directory is these processes, one after the other, and that has no session."""
    found = iter(processes)

    def process_of(_: object) -> int:
        process = next(found)
        if isinstance(process, Exception):
            raise process
        return process

    monkeypatch.setattr(faults, "process_of", process_of)
    monkeypatch.setattr(faults, "replicas", lambda url: {})
    monkeypatch.setattr(faults, "WHOLE_SECONDS", 2.0)
    nodes: Any = SimpleNamespace(directory=lambda: None, url="", ids=[], count=0)
    workload: Any = SimpleNamespace(over=False, talks=[])
    return Faults(nodes, workload, random.Random(1))


def test_kill_that_meets_nobody_is_tried_again(monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]):
    over = subprocess.Popen(["true"])
    over.wait()
    made = killing(monkeypatch, ActorDiedError(), ValueError("no such actor"), over.pid, process.pid)
    made.overlapping(["directory"], 0.0)
    assert process.wait(10) == -9
    assert made.counts["directory"] == 1 and made.nothing_to_kill == {"directory": 3}


@pytest.mark.parametrize("failed", [RuntimeError("x"), RayTaskError("pid", "", KeyError("x"))])
def test_what_else_a_kill_raises_comes_out(monkeypatch: pytest.MonkeyPatch, failed: Exception):
    with pytest.raises(type(failed)):
        killing(monkeypatch, failed).overlapping(["directory"], 0.0)


def test_moves_that_are_refused_are_known(monkeypatch: pytest.MonkeyPatch):
    made = killing(monkeypatch)
    talk: Any = SimpleNamespace(running={}, sessions=["s"], headers={}, key="key")
    made.workload.talks.append(talk)
    monkeypatch.setattr(httpx, "post", lambda *_, **__: httpx.Response(500, text="Internal Server Error"))
    made.move()
    assert not made.moves and [refusal.code for refusal in made.refused_moves] == ["no_ingress"]
