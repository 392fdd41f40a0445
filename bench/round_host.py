"""What does the host add to a round that the engine's process runs for many streams of an asyncio loop?

    python -m bench.round_host [--device cuda] [--lanes 64] [--output FILE]

The demo model's rounds are short, so that a slow host shows. The same turns run twice: in this process, where events
around the segments say how long a round keeps the device busy (`device_ms`; on a CPU the segments' own time), and in
the engine's own process, read as a replica reads it: every turn is an event iterator of one asyncio loop. `round_ms` is
the time from round to round that a stream sees there while all lanes decode; `host_ms` is the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from pathlib import Path
from statistics import median

import torch

from bench.round_parts import Watched
from deployment.engine.engine import Engine
from deployment.engine.loading import load_models
from deployment.engine.messages import Event, Round, Submit
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
    return sum(median(times) for times in watched.milliseconds().values())


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
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    on_card = args.device == "cuda"
    options = EngineOptions(
        DEMO / "target",
        DEMO / "dflash2",
        "dflash2",
        device=args.device,
        dtype="bfloat16" if on_card else "float32",
        lanes=args.lanes,
        context=1024,
        images=0,
        own_process=True,
    )
    busy, seen = device_ms(options), asyncio.run(round_ms(options))
    row = {
        "lanes": args.lanes,
        "round_ms": round(seen, 3),
        "device_ms": round(busy, 3),
        "host_ms": round(seen - busy, 3),
    }
    print(row, flush=True)
    if args.output:
        card = torch.cuda.get_device_name() if on_card else "cpu"
        facts = {"card": card, "torch": torch.__version__, "model": "demo", "backend": "dflash2", "K": 7}
        args.output.write_text(json.dumps({**facts, "rows": [row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
