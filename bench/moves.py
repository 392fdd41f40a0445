"""For how long does a client wait while its turn moves to another replica?

    python -m bench.moves [--output FILE] [--moves N] [--timeline FILE]

demo     two replicas of one Ray, over HTTP
27B      an image of 187 MiB and 1,000 tokens of K/V with random contents, from `Departure` to `Arrivals` and back to
         pages, in one process: what the turn stands for without Ray, its ownership and a network

An answer of the demo model with DFlash2 is streamed while its session moves back and forth; then the same with nobody
who moves it. A pause is the longest gap between two chunks from a move's request to a moment after its answer, less the
median gap of the chunks outside. `stands` is for how long the source's turn stood, as the source says; bytes ahead went
while it decoded. The undisturbed answer must be the same. With `--timeline` one such answer alone, and when each of its
chunks came, for `bench/pictures.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import json
import os
import platform
import secrets
import socket
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import torch

from bench.gpu import write_results
from bench.migration import FRONTIER, Side
from bench.state import random_checkpoint
from deployment.arrivals import Arrivals
from deployment.engine.commands import DropStaged, Export, ExportPages, Import, StageSegments, VerifyStaged
from deployment.load.report import percentile
from deployment.local import running
from deployment.moving import Departure, ToDestination, Welcome
from deployment.ownership.words import Epoch, Order, SessionKey
from deployment.session import Session
from deployment.settings import AppArgs

MOVES_A_TURN = 4
TOKENS = 500
SETTLE_SECONDS = 0.3
"""After a move's answer: the first chunk from the destination may come later."""

RUNS_OF_27B = 9

PROMPT = {"role": "user", "content": "Count from 3 in steps of 2, 12 numbers."}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "max_tokens": TOKENS, "ignore_eos": True}


@dataclass
class Stream:
    """What one client reads, and when."""

    times: list[float] = field(default_factory=list)
    text: str = ""
    over: bool = False

    def read(self, url: str, key: str, session: str, seed: int) -> None:
        body = {"messages": [PROMPT], "stream": True, "seed": seed, **SAMPLED}
        headers = {"authorization": f"Bearer {key}", "x-session-id": session}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if chunk["choices"]:
                        self.times.append(time.monotonic())
                        self.text += chunk["choices"][0]["delta"].get("content") or ""
        self.over = True

    def gaps(self, since: float = float("-inf"), until: float = float("inf")) -> list[float]:
        """Between the chunks around such an interval."""
        first = max(1, bisect.bisect_left(self.times, since))
        last = min(len(self.times) - 1, bisect.bisect_right(self.times, until))
        return [self.times[i] - self.times[i - 1] for i in range(first, last + 1)]


@dataclass(frozen=True)
class Move:
    began: float
    ended: float
    answer: dict[str, Any]


def moved_turn(url: str, seed: int, moves: int) -> tuple[Stream, list[Move]]:
    """A turn that is moved `moves` times while it streams."""
    stream, key, session = Stream(), secrets.token_hex(8), f"bench-{seed}-{moves}"
    reader = threading.Thread(target=stream.read, args=(url, key, session, seed))
    reader.start()
    made: list[Move] = []
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120) as client:
        while len(stream.times) < 10:
            time.sleep(0.01)
        for _ in range(moves):
            began = time.monotonic()
            response = client.post(f"/v1/sessions/{session}/migrate")
            response.raise_for_status()
            made.append(Move(began, time.monotonic(), response.json()))
            time.sleep(2 * SETTLE_SECONDS)
            if stream.over:
                made.pop()  # nobody waited for this one any more
                break
    reader.join()
    return stream, made


def usual_gap(stream: Stream, moves: list[Move]) -> float:
    """The median outside of moves."""
    windows = [(move.began, move.ended + SETTLE_SECONDS) for move in moves]
    times = stream.times
    outside = [
        after - before
        for before, after in itertools.pairwise(times)
        if not any(began <= after and before <= ended for began, ended in windows)
    ]
    return statistics.median(outside)


def timeline_of_the_demo(url: str) -> dict[str, Any]:
    """When the texts of an answer came that moved, and when the moves were asked for and answered. Seconds from its
    first text. The first turn of its server does not count."""
    moved_turn(url, 0, 0)
    stream, moves = moved_turn(url, 1, MOVES_A_TURN)
    begin = stream.times[0]
    return {
        "chunks": [round(at - begin, 4) for at in stream.times],
        "moves": [
            {
                "asked": round(move.began - begin, 4),
                "answered": round(move.ended - begin, 4),
                "stands": round(move.answer["pause_seconds"], 4),
            }
            for move in moves
        ],
    }


def moves_of_the_demo(url: str, wanted: int) -> dict[str, Any]:
    pauses: list[float] = []
    stands: list[float] = []
    answers: list[dict[str, Any]] = []
    usual: list[float] = []
    seed = 0
    while len(pauses) < wanted:
        seed += 1
        stream, moves = moved_turn(url, seed, MOVES_A_TURN)
        undisturbed, _ = moved_turn(url, seed, 0)
        assert stream.text == undisturbed.text, f"a move changed the answer of seed {seed}"
        gap = usual_gap(stream, moves)
        usual.append(gap)
        pauses += [max(stream.gaps(move.began, move.ended + SETTLE_SECONDS)) - gap for move in moves]
        stands += [move.answer["pause_seconds"] for move in moves]
        answers += [move.answer for move in moves]
    return {
        "what": "demo, two replicas of one node",
        "moves": len(pauses),
        "seconds": {
            "pause_p50": statistics.median(pauses),
            "pause_p99": percentile(sorted(pauses), 0.99),
            "stands_p50": statistics.median(stands),
            "stands_p99": percentile(sorted(stands), 0.99),
            "usual_gap": statistics.median(usual),
        },
        "bytes_ahead": statistics.median(answer["bytes_ahead"] for answer in answers),
        "bytes_in_pause": statistics.median(answer["bytes_in_pause"] for answer in answers),
    }


# ------------------------------------------------------------------------------------------------ 27B


class SideService:
    """An engine without a model (`bench.migration.Side`), as a replica calls it."""

    def __init__(self, side: Side, lane: Any = None) -> None:
        self._exchange = side.exchange
        self._lane = lane

    async def call(self, command: Any) -> Any:
        match command:
            case ExportPages():
                return self._exchange.pages(command, self._lane)
            case Export():
                return self._exchange.export(command)
            case StageSegments():
                return self._exchange.stage(command)
            case VerifyStaged():
                return self._exchange.verify_staged(command)
            case _:
                assert isinstance(command, DropStaged)
                return self._exchange.drop_staged(command)


async def moves_of_27b(hashed: bool) -> dict[str, Any]:
    """`hashed`: as between two nodes."""
    source, destination = Side(), Side()
    checkpoint = random_checkpoint(source.memory, FRONTIER)
    sequence = source.memory.restore(checkpoint, FRONTIER + 8)
    source.memory.release(checkpoint)
    lane: Any = SimpleNamespace(memory=sequence)
    here: Any = SideService(source, lane)
    there: Any = SideService(destination)
    arrivals = Arrivals(there, "there" if hashed else "here", 600.0)

    async def send(replica: str, message: ToDestination) -> Welcome:
        return await arrivals.receive(message)

    session = Session(SessionKey("t", "s"), Epoch(1, 1))
    order = Order(Epoch(1, 1), 1)
    pauses: list[float] = []
    for run in range(RUNS_OF_27B + 1):
        departure = Departure(here, send, "here", session, "there")
        await departure.ahead("turn")
        began = time.perf_counter()
        captured = source.memory.capture(sequence, range(FRONTIER + 1), "decode", "turn_end")
        source.sessions.replace(session.engine_id, [captured], "device", "t", shared=False)
        await departure.rest(order)
        arrival = arrivals.arrived(session.key, order)
        assert arrival is not None
        name, migration = session.engine_id, arrival.migration
        imported = destination.exchange.import_(Import("i", name, arrival.document, migration=migration))
        assert imported.frontiers == (FRONTIER,), imported
        (came,) = destination.sessions.checkpoints(name)
        resumed = destination.memory.restore(came, FRONTIER + 8)
        if run:  # the first one does not count
            pauses.append(time.perf_counter() - began)
        await departure.arrived()
        assert await arrivals.verified(arrival)
        destination.memory.close(resumed)
        destination.sessions.drop(name)
        source.sessions.drop(name)
    return {
        "what": f"27B, without a stream, replica to replica, {'hashed' if hashed else 'not hashed'}",
        "moves": len(pauses),
        "seconds": {"stands_p50": statistics.median(pauses), "stands_p99": percentile(sorted(pauses), 0.99)},
        "bytes_ahead": departure.bytes_ahead,
        "bytes_in_pause": departure.bytes_in_pause,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--moves", type=int, default=50)
    parser.add_argument("--timeline", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if args.timeline:
        load = f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores before"
        with running(AppArgs(durable=None), host="127.0.0.1", port=port, quiet=True) as url:
            timeline = timeline_of_the_demo(url)
        facts = {"machine": platform.machine(), "torch": torch.__version__, "load": load}
        args.timeline.write_text(json.dumps({**facts, **timeline}) + "\n")
        return
    rows: list[dict[str, Any]] = []

    def measured_one(row: dict[str, Any]) -> None:
        rows.append({**row, "load": f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"})
        steps = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in row["seconds"].items())
        moves = f"{row['moves']} moves, {row['bytes_ahead']} bytes ahead, {row['bytes_in_pause']} in the pause"
        print(f"{row['what']}: {moves}; {steps}; load {rows[-1]['load']}", flush=True)
        if args.output:
            write_results(args.output, {"machine": platform.machine(), "torch": torch.__version__}, rows)

    for hashed in (True, False):
        measured_one(asyncio.run(moves_of_27b(hashed)))
    with running(AppArgs(durable=None), host="127.0.0.1", port=port, quiet=True) as url:
        measured_one(moves_of_the_demo(url, args.moves))


if __name__ == "__main__":
    main()
