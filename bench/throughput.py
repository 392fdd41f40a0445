"""Tokens per second of one engine with 1 to 8 lanes, drafting off and on, on the demo model.

    python -m bench.throughput [--device cpu|cuda] [--dtype float32|bfloat16] [--output FILE]

Sixteen greedy turns of 64 tokens from the golden prompts (end tokens ignored, so that every run does the same work),
submitted at once; the time runs from the first step to the last token, prefill included. All runs share one process.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from deployment.engine.commands import Submit
from deployment.engine.engine import Engine
from deployment.engine.events import Event, Finished
from deployment.engine.loading import load_models
from deployment.engine.options import EngineOptions
from model import DEMO

TURNS, TOKENS = 16, 64
LANES = (1, 2, 4, 8)


def measure(backend: Any, lanes: int, device: str, dtype: str, prompts: list[list[int]]) -> dict[str, Any]:
    draft = None if backend == "none" else DEMO / backend
    options = EngineOptions(
        DEMO / "target", draft, backend, device=device, dtype=dtype, lanes=lanes, images=1, context=1024
    )
    events: list[Event] = []
    engine = Engine(load_models(options), options, events.append)

    def run(name: str, count: int, tokens: int) -> float:
        events.clear()
        for i in range(count):
            prompt = tuple(prompts[i % len(prompts)])
            engine.execute(Submit(f"{name}-{i}", prompt, max_tokens=tokens, ignore_eos=True))
        started = time.perf_counter()
        while engine.step():
            pass
        return time.perf_counter() - started

    run("warm-up", lanes, 8)
    seconds = run("turn", TURNS, TOKENS)
    finished = [event for event in events if isinstance(event, Finished)]
    published = sum(len(event.token_ids) for event in finished)
    rounds = [count for event in finished for count in event.rounds]
    return {
        "backend": backend,
        "K": engine.models.draft_tokens,
        "lanes": lanes,
        "tokens": published,
        "seconds": seconds,
        "tokens_per_second": published / seconds,
        "acceptance_length": (published - len(finished)) / len(rounds),
        "rounds_by_accepted": [rounds.count(count) for count in range(engine.models.draft_tokens + 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = json.loads((DEMO / "golden_public.json").read_text())["prompts"]
    prompts = [case["prompt"] for case in cases if len(case["prompt"]) < 256]
    rows: list[dict[str, Any]] = []
    print(f"{'backend':8} {'lanes':>5} {'tok/s':>7} {'by one lane':>11} {'accepted':>8}")
    for backend in ("none", "dflash", "dflash2"):
        for lanes in LANES:
            row = measure(backend, lanes, args.device, args.dtype, prompts)
            rows.append(row)
            one = next(other for other in rows if other["backend"] == backend and other["lanes"] == 1)
            row["ratio"] = row["tokens_per_second"] / one["tokens_per_second"]
            print(
                f"{backend:8} {lanes:5} {row['tokens_per_second']:7.1f} {row['ratio']:11.2f} "
                f"{row['acceptance_length']:8.2f}",
                flush=True,
            )
    if args.output:
        card = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine()
        facts = {"card": card, "torch": torch.__version__, "dtype": args.dtype, "threads": 1, "turns": TURNS}
        facts["thinking"] = "no template"
        args.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
