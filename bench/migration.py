"""How long does a turn pause when it moves from one engine to another? All in one process, without a network.

    python -m bench.migration [--output FILE]

27B      an image of 187 MiB and 1,000 tokens of KV, with random contents: each step of the pause, in order, with the
         full pages sent ahead and without, with what is left hashed (between nodes) and not (on one node)
demo     a turn of the demo model with DFlash2 that moves back and forth between two engines while it decodes: the gap
         between its last round here and its first one there, less the median gap of its rounds, beside the bytes

Seconds are medians of a few runs on one thread; `longest` is the longest of the demo's pauses, `calls` what its two
engines took from the suspension to the resumed turn's arrival.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import platform
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.gpu import write_results
from bench.state import prompt, random_checkpoint
from bench.state_sizes import GEOMETRY_27B
from deployment.engine.commands import (
    Call,
    Export,
    ExportPages,
    Import,
    Resumed,
    StageSegments,
    Submit,
    Suspend,
    VerifyStaged,
)
from deployment.engine.engine import Engine
from deployment.engine.events import Event, Exported, Failed, Round
from deployment.engine.exchange import StateExchange
from deployment.engine.loading import Models, load_models
from deployment.engine.options import EngineOptions
from deployment.engine.sessions import SessionTable
from model import DEMO
from state.geometry import pages_for
from state.memory import StateMemory

Row = dict[str, Any]
RUNS, MOVES = 5, 9
FRONTIER = 1000
PROMPT, ANSWER, ROUNDS_BETWEEN = 512, 480, 3


@dataclass(frozen=True)
class Way:
    """`ahead`: full pages went before the pause. `hashed`: what is left is hashed in it."""

    ahead: bool
    hashed: bool

    def __str__(self) -> str:
        return f"pages {'ahead' if self.ahead else 'in the pause'}, {'hashed' if self.hashed else 'not hashed'}"


WAYS = (Way(False, True), Way(True, True), Way(True, False))


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


class Watch:
    """Seconds since the last lap, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


# ------------------------------------------------------------------------------------------------ 27B, its state alone


class Side:
    """What an engine does with state, without a model."""

    def __init__(self) -> None:
        self.memory = StateMemory(GEOMETRY_27B, 2 * pages_for(FRONTIER), 1, 3)
        self.sessions = SessionTable(self.memory, lambda session: None)
        target = SimpleNamespace(public_rows=1 << 20)
        fingerprint = {"weights": "random", "tokenizer": "none"}
        models: Any = SimpleNamespace(fingerprint=fingerprint, target=target, vision=None)
        options = EngineOptions(DEMO / "target")
        self.exchange = StateExchange(models, options, self.memory, self.sessions, time.monotonic)


def moves_of_27b() -> list[Row]:
    return [move_of_27b(way) for way in WAYS]


def move_of_27b(way: Way) -> Row:
    source, destination = Side(), Side()
    checkpoint = random_checkpoint(source.memory, FRONTIER)
    sequence = source.memory.restore(checkpoint, FRONTIER + 8)
    source.memory.release(checkpoint)
    lane: Any = SimpleNamespace(memory=sequence)
    runs: list[dict[str, float]] = []
    left = sent_ahead = 0
    for run in range(RUNS + 1):
        migration = f"m{run}"
        known: frozenset[bytes] = frozenset()
        if way.ahead:
            pages = source.exchange.pages(ExportPages("p", "t", most=1 << 20), lane)
            destination.exchange.stage(StageSegments("g", migration, pages.segments))
            known = frozenset(segment.sha256 for segment in pages.segments)
            sent_ahead = sum(len(segment.data) for segment in pages.segments)
        watch = Watch()
        captured = source.memory.capture(sequence, range(FRONTIER + 1), "decode", "turn_end")
        source.sessions.replace("s", [captured], "device", "", shared=False)
        watch.lap("capture")
        exported = source.exchange.export(Export("e", "s", without=known, hashed=way.hashed))
        watch.lap("export")
        destination.exchange.stage(StageSegments("g", migration, exported.segments, way.hashed))
        watch.lap("stage")
        answer = destination.exchange.import_(Import("i", "s", exported.document, migration=migration))
        assert answer.frontiers == (FRONTIER,), answer
        watch.lap("import")
        (came,) = destination.sessions.checkpoints("s")
        resumed = destination.memory.restore(came, FRONTIER + 8)
        watch.lap("restore")
        left = sum(len(segment.data) for segment in exported.segments)
        if run:  # the first one does not count
            runs.append({**watch.laps, "pause": sum(watch.laps.values())})
        destination.memory.close(resumed)
        destination.sessions.drop("s")
        source.sessions.drop("s")
        if not way.hashed:
            destination.exchange.verify_staged(VerifyStaged("v", migration, "s", digests(exported)))
    return {"what": f"27B, {way}", "ahead_bytes": sent_ahead, "pause_bytes": left, "seconds": medians(runs)}


def digests(exported: Exported) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((segment.sha256, hashlib.sha256(segment.data).digest()) for segment in exported.segments)


# ------------------------------------------------------------------------------------------------ the demo model


class Place:
    """An engine of the demo model, and when each of its events came."""

    def __init__(self, models: Models, options: EngineOptions) -> None:
        self.events: list[tuple[float, Event]] = []
        self.engine = Engine(models, options, lambda event: self.events.append((time.perf_counter(), event)))

    def call(self, command: Call) -> Any:
        self.engine.execute(command)
        answer = self.events[-1][1]
        assert not isinstance(answer, Failed), answer
        return answer

    def rounds(self) -> list[tuple[float, Round]]:
        return [(at, event) for at, event in self.events if isinstance(event, Round)]

    def decode(self, rounds: int) -> None:
        before = len(self.rounds())
        while len(self.rounds()) < before + rounds and self.engine.step():
            pass


def moves_of_the_demo() -> list[Row]:
    options = EngineOptions(DEMO / "target", DEMO / "dflash2", "dflash2", lanes=1, images=8, context=1024)
    models = load_models(options)
    alone = Place(models, options)
    ids = prompt(PROMPT)
    submit = Submit("t", ids, max_tokens=ANSWER, ignore_eos=True, session="s")
    alone.engine.execute(submit)
    alone.decode(ANSWER)
    told = alone.rounds()[1:]
    usual = statistics.median(after[0] - before[0] for before, after in itertools.pairwise(told))
    expected = tuple(token for _, event in alone.rounds() for token in event.token_ids)
    return [move_of_the_demo(models, options, submit, way, usual, expected) for way in WAYS]


def move_of_the_demo(
    models: Models, options: EngineOptions, submit: Submit, way: Way, usual: float, expected: tuple[int, ...]
) -> Row:
    here, there = Place(models, options), Place(models, options)
    here.engine.execute(submit)
    told: list[tuple[float, Round]] = []
    gaps: list[float] = []
    calls: list[float] = []
    ahead = left = 0
    for number in range(MOVES):
        migration = f"m{number}"
        here.decode(ROUNDS_BETWEEN)
        sent = pages_ahead(here, there, migration) if way.ahead else {}
        told += here.rounds()
        here.events.clear()
        began = time.perf_counter()
        here.engine.execute(Suspend("x", "t"))
        exported = here.call(Export("e", "s", without=frozenset(sent), hashed=way.hashed))
        there.call(StageSegments("g", migration, exported.segments, way.hashed))
        there.call(Import("i", "s", exported.document, migration=migration))
        ids = tuple(token for _, event in told for token in event.token_ids)
        accepted = tuple(event.accepted for _, event in told if event.accepted is not None)
        there.events.clear()
        there.engine.execute(replace(submit, resumed=Resumed(ids, accepted)))
        calls.append(time.perf_counter() - began)
        there.decode(1)
        gaps.append(there.rounds()[0][0] - told[-1][0])
        ahead, left = sum(sent.values()), sum(len(segment.data) for segment in exported.segments)
        if not way.hashed:
            there.call(VerifyStaged("v", migration, "s", digests(exported)))
        here, there = there, here
    here.decode(ANSWER)
    told += here.rounds()
    assert tuple(token for _, event in told for token in event.token_ids) == expected, "a move changed the answer"
    pauses = [gap - usual for gap in gaps]
    seconds = {"calls": statistics.median(calls), "pause": statistics.median(pauses), "longest": max(pauses)}
    seconds["round"] = usual
    return {"what": f"demo, {way}", "ahead_bytes": ahead, "pause_bytes": left, "seconds": seconds}


def pages_ahead(here: Place, there: Place, migration: str) -> dict[bytes, int]:
    """Sends full pages while the turn decodes; returns their sizes by sha256."""
    sent: dict[bytes, int] = {}
    first = 0
    while first < (pages := here.call(ExportPages("p", "t", first=first))).full:
        there.call(StageSegments("g", migration, pages.segments))
        sent |= {segment.sha256: len(segment.data) for segment in pages.segments}
        first = pages.end
        here.decode(1)
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = moves_of_27b() + moves_of_the_demo()
    for row in rows:
        steps = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in row["seconds"].items())
        print(
            f"{row['what']}: {row['ahead_bytes']} bytes ahead, {row['pause_bytes']} in the pause; {steps}", flush=True
        )
    facts = {"machine": platform.machine(), "torch": torch.__version__}
    facts["load"] = f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
    if args.output:
        write_results(args.output, facts, rows)


if __name__ == "__main__":
    main()
