"""What does serving add to the engine, and how do many streams and agents' sessions fare? The demo model over HTTP.

    python -m bench.serve [--output FILE] [--quick]

chunk     greedy turns of one stream, each over HTTP and then by a bare engine of this process: the same tokens in the
          same rounds. `added_first`: how much later the first text came than the first token here. `added_chunk`: how
          much longer all later texts took than all later rounds here, by the number of texts
first     to the first text: `cold`, of a message that nobody sent before; `warm`, of an append turn whose session is
          on the device
streams   64 streams at once on 8 lanes
agents    8 sessions of 20 turns, all at once, each turn with what a tool might say. Bytes are those of the images that
          went to the host store, and of what went to the durable tier (`dflash_tier_bytes_total`): once of a server
          without one, and once, in the row `agents, durable`, of one that has a directory for it

One replica. The server and its client share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.gpu import write_results
from deployment.client import AsyncClient
from deployment.engine.commands import Sampling, Submit
from deployment.engine.events import Tokens
from deployment.engine.service import EngineService
from deployment.load.report import Spread, report
from deployment.load.traffic import Load, put
from deployment.load.turns import TurnSeen
from deployment.local import running
from deployment.settings import AppArgs
from deployment.turns import full_history

LANES = 8
ARGS = AppArgs(replicas=1, lanes=LANES, durable=None)
DURABLE = "agents, durable"

FEW_TOKENS = {True: (2, 8), False: (8, 32)}
"""By whether it is to be quick: how many conversations there are, and tokens of a turn, at the least."""

Row = dict[str, Any]


def chunk_row(url: str, engine: EngineService, load: Load) -> Row:
    """`load`: turns that are run one after the other, of which the first does not count."""
    served: list[TurnSeen] = []
    bare: list[TurnSeen] = []
    for number in range(load.conversations):
        one = replace(load, conversations=1, seed=number)
        (seen,), _ = asyncio.run(_put(url, one))
        served.append(seen)
        bare.append(asyncio.run(_bare(engine, one)))
    del served[0], bare[0]
    texts, rounds = ([gap for one in turns for gap in one.gaps] for turns in (served, bare))
    later = [one.first - other.first for one, other in zip(served, bare, strict=True) if one.first and other.first]
    assert texts and later, "no turn had two texts"
    return {
        "what": "chunk",
        "texts": len(texts),
        "rounds": len(rounds),
        "added_first": statistics.median(later),
        # Sums, since a text may come a round later than its tokens, but none is lost.
        "added_chunk": (sum(texts) - sum(rounds)) / len(texts),
        "http": asdict(Spread.of(texts)),
        "engine": asdict(Spread.of(rounds)),
    }


async def _bare(engine: EngineService, load: Load) -> TurnSeen:
    """The load's only turn, with its rounds as texts."""
    ids = full_history(engine.chat_template, engine.tokenizer, [load.message(0, 0)]).ids
    submit = Submit(f"bare-{load.seed}", ids, Sampling(), max_tokens=load.tokens, ignore_eos=True)
    began = time.perf_counter()
    times = [time.perf_counter() - began async for event in engine.turn(submit) if isinstance(event, Tokens)]
    return TurnSeen(time.perf_counter() - began, tuple(times))


async def _put(url: str, load: Load) -> tuple[list[TurnSeen], float]:
    async with AsyncClient(url, "bench", patience=0) as client:
        return await put(client, load)


def load_row(what: str, url: str, load: Load) -> Row:
    before = written(url)
    seen, seconds = asyncio.run(_put(url, load))
    told = report(seen, seconds)
    if told.refused:
        raise RuntimeError(f"{what}: turns were refused: {told.refused}")
    grown = {tier: size - before[tier] for tier, size in written(url).items()}
    facts = {"what": what, "load": asdict(load), **asdict(told)}
    return {**facts, "bytes_written": grown["host"], "durable_bytes_written": grown["durable"]}


def written(url: str) -> dict[str, int]:
    """Bytes of images that have gone to host stores, and of what has gone to the durable tier."""
    text = httpx.get(f"{url}/metrics", timeout=20).raise_for_status().text
    counted = [line for line in text.splitlines() if line.startswith("dflash_tier_bytes_total{")]
    lines = [line for line in counted if 'direction="out"' in line]
    return {
        tier: int(sum(float(line.rpartition(" ")[2]) for line in lines if f'tier="{tier}"' in line))
        for tier in ("host", "durable")
    }


def agents(quick: bool) -> Load:
    few, tokens = FEW_TOKENS[quick]
    return Load(few, few, turns=few if quick else 20, tokens=tokens // 2, words=60, seed=3)


def rows(url: str, engine: EngineService, quick: bool) -> list[Row]:
    few, tokens = FEW_TOKENS[quick]
    return [
        chunk_row(url, engine, Load(conversations=few // 2 + 2, at_once=1, tokens=5 * tokens)),
        load_row("first", url, Load(conversations=few, at_once=1, turns=2, tokens=8, words=200, seed=1)),
        load_row("streams", url, Load(conversations=few * few, at_once=few * few, tokens=tokens, seed=2)),
        load_row("agents", url, agents(quick)),
    ]


def durable_row(port: int, quick: bool) -> Row:
    """The agents, on a server whose sessions outlive it."""
    with tempfile.TemporaryDirectory() as place:
        durable = ARGS.model_copy(update={"durable": place})
        with running(durable, host="127.0.0.1", port=port) as url:
            return load_row(DURABLE, url, agents(quick))


def table(rows: Sequence[Row]) -> str:
    """As docs/performance.md shows it: milliseconds."""
    of = {row["what"]: row for row in rows}
    lines = [
        ("first text, cold", of["first"]["cold"]),
        ("first text, warm", of["first"]["warm"]),
        ("gap of one stream", of["chunk"]["http"]),
        ("gap of the bare engine", of["chunk"]["engine"]),
        ("first text of 64 streams", of["streams"]["cold"]),
        ("gap of 64 streams", of["streams"]["gaps"]),
        ("first text of the agents' later turns", of["agents"]["warm"]),
        ("gap of the agents", of["agents"]["gaps"]),
    ]
    head = ["| ms | p50 | p95 | p99 | of |", "| --- | --- | --- | --- | --- |"]
    return "\n".join(head + [f"| {name} | {_cells(spread)} | {spread['count']:,} |" for name, spread in lines])


def _cells(spread: dict[str, Any]) -> str:
    return " | ".join(f"{1e3 * spread[part]:,.0f}" for part in ("p50", "p95", "p99"))


def sentence(rows: Sequence[Row]) -> str:
    """What the page says beneath the table."""
    of = {row["what"]: row for row in rows}
    chunk, streams, agents = of["chunk"], of["streams"], of["agents"]
    return (
        f"HTTP adds {1e3 * chunk['added_first']:.0f} ms to the first text and {1e3 * chunk['added_chunk']:.1f} ms to "
        f"each later one. 64 streams draw {streams['tokens_per_second']:.0f} tokens/s together. Eight agents of 20 "
        f"turns take {agents['seconds']:.0f} s, reuse {agents['reused_tokens']:,} of their "
        f"{agents['prompt_tokens']:,} prompt tokens, and write {agents['bytes_written'] / 1e6:,.0f} MB of images to "
        "the host store." + (_of_durable(of[DURABLE]) if DURABLE in of else "")
    )


def _of_durable(row: Row) -> str:
    host, durable = (row[name] / 1e6 for name in ("bytes_written", "durable_bytes_written"))
    return (
        f" With a durable directory they take {row['seconds']:.0f} s, and write {durable:,.0f} MB there beside "
        f"{host:,.0f} MB to the host store."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quick", action="store_true", help="few short turns: to see that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    load = f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores before"
    with running(ARGS, host="127.0.0.1", port=port) as url:
        engine = EngineService.start(ARGS.engine_options())
        try:
            measured = rows(url, engine, args.quick)
        finally:
            engine.close()
    measured.append(durable_row(port, args.quick))
    print(table(measured), sentence(measured), sep="\n\n")
    if args.output:
        facts = {"machine": platform.machine(), "torch": torch.__version__, "lanes": LANES, "load": load}
        write_results(args.output, facts, measured)


if __name__ == "__main__":
    main()
