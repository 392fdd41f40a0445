"""What does the host add to a round that the engine's process runs for many streams of an asyncio loop?

    python -m bench.round_host [--device cuda] [--lanes 1 8 64] [--model DIR --draft DIR] [--output FILE]

The demo model's rounds are short, so that all of the host shows; of a model whose rounds are long only that part does
which cannot be done while the device works. The same turns run twice: in this process, where events
around the segments say how long a round keeps the device busy (`device_ms`; on a CPU the segments' own time), and in
the engine's own process, read as a replica reads it: every turn is an event iterator of one asyncio loop. `round_ms` is
the time from round to round that a stream sees there while all lanes decode; `host_ms` is the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from bench.round_parts import Watched
from deployment.engine.commands import Submit
from deployment.engine.engine import Engine
from deployment.engine.events import Event, Round
from deployment.engine.loading import load_models
from deployment.engine.options import EngineOptions
from deployment.engine.service import EngineService
from model import DEMO

TOKENS = 960
"""More than the first lane can publish until the last one has decoded for a while."""
STEADY = slice(8, 30)
"""Which of the rounds in which all lanes decode are timed."""


def submits(lanes: int) -> list[Submit]:
    prompts = json.loads((DEMO / "golden_public.json").read_text())["prompts"]
    ids = [tuple(prompts[lane % len(prompts)]["prompt"][-24:]) for lane in range(lanes)]
    return [Submit(f"turn-{lane}", ids[lane], max_tokens=TOKENS, ignore_eos=True) for lane in range(lanes)]


def device_ms(options: EngineOptions) -> float:
    """Of a round of all lanes, in its segments."""
    events: list[Event] = []
    engine = Engine(load_models(options), options, events.append)
    for submit in submits(options.lanes):
        engine.execute(submit)
    while any(lane.prefilling for lane in engine._lanes) or len(engine._lanes) < options.lanes:
        engine.step()
    executor = engine._executor
    for _ in range(STEADY.start):
        engine.step()
    watched = Watched(executor._runs, engine.models.device)
    executor._runs = watched
    for _ in range(STEADY.stop - STEADY.start):
        engine.step()
    assert len(engine._lanes) == options.lanes, "turns ended while rounds were timed"
    busy = sum(median(times) for times in watched.milliseconds().values())
    del engine, executor
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()  # the next engine is another process
    return busy


async def round_ms(options: EngineOptions) -> float:
    service = EngineService.start(options)
    try:
        rounds = await asyncio.gather(*(stream(service, submit) for submit in submits(options.lanes)))
    finally:
        service.close()
    begun = max(times[0] for times in rounds)  # from here on all lanes decode
    steady = [[moment for moment in times if moment >= begun][STEADY] for times in rounds]
    return 1e3 * median(later - earlier for times in steady for earlier, later in itertools.pairwise(times))


async def stream(service: EngineService, submit: Submit) -> list[float]:
    """When each of a turn's rounds came."""
    return [time.perf_counter() async for event in service.turn(submit) if isinstance(event, Round)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lanes", type=int, nargs="+", default=[64])
    parser.add_argument("--model", type=Path, default=DEMO / "target")
    parser.add_argument("--draft", type=Path, default=DEMO / "dflash2", help="a DFlash2 drafter")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    on_card = args.device == "cuda"
    options = EngineOptions(
        args.model,
        args.draft,
        "dflash2",
        device=args.device,
        dtype="bfloat16" if on_card else "float32",
        context=1024,
        images=0,
        own_process=True,
    )
    rows = [measured(replace(options, lanes=lanes)) for lanes in args.lanes]
    if args.output:
        card = torch.cuda.get_device_name() if on_card else "cpu"
        facts = {"card": card, "torch": torch.__version__, "model": args.model.name, "backend": "dflash2", "K": 7}
        args.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


def measured(options: EngineOptions) -> dict[str, float]:
    busy, seen = device_ms(options), asyncio.run(round_ms(options))
    row = {
        "lanes": options.lanes,
        "round_ms": round(seen, 3),
        "device_ms": round(busy, 3),
        "host_ms": round(seen - busy, 3),
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
