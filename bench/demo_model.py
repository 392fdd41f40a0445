"""Acceptance length and tokens per second of the demo model, with and without drafting, on one lane.

    python -m bench.demo_model [--device cpu|cuda] [--dtype float32|bfloat16] [--output FILE]

The twelve golden prompts, greedy, each until its end token or 96 tokens. Every drafter runs the same prompts in
the same process; each runs once before it is timed. Tokens per second count decoding only, from the end of the prefill.
`rounds_by_accepted[n]`: rounds that accepted n drafts. The prompts are continued as they are: no template, no thinking.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from deployment.engine.commands import Submit
from deployment.engine.engine import Engine
from deployment.engine.events import Event, Finished, Started
from deployment.engine.loading import load_models
from deployment.engine.options import EngineOptions
from model import DEMO

CONFIGURATIONS: list[tuple[Any, int | None]] = [("none", None), ("dflash", 15), ("dflash", 7), ("dflash2", 7)]
TOKENS = 96


def measure(backend: Any, draft_tokens: int | None, device: str, dtype: str, prompts: list[dict[str, Any]]):
    """One row a kind of text: tokens, rounds, acceptance length and decoding tokens per second."""
    draft = None if backend == "none" else DEMO / backend
    options = EngineOptions(
        DEMO / "target", draft, backend, draft_tokens, device=device, dtype=dtype, lanes=1, images=1
    )
    events: list[Event] = []
    engine = Engine(load_models(options), options, events.append)

    def run(turn: str, ids: list[int], tokens: int) -> tuple[Finished, float]:
        events.clear()
        engine.execute(Submit(turn, tuple(ids), max_tokens=tokens))
        started: float | None = None
        while engine.step():
            if started is None and any(isinstance(event, Started) for event in events):
                started = time.perf_counter()
        finished = events[-1]
        assert isinstance(finished, Finished) and started is not None, finished
        return finished, time.perf_counter() - started

    run("warm-up", prompts[0]["prompt"], 16)
    rows: dict[str, dict[str, Any]] = {}
    for index, case in enumerate(prompts):
        finished, seconds = run(f"turn-{index}", case["prompt"], TOKENS)
        row = rows.setdefault(case["kind"], {"tokens": 0, "rounds": [], "seconds": 0.0})
        row["tokens"] += max(0, len(finished.token_ids) - 1)
        row["rounds"] += finished.rounds
        row["seconds"] += seconds
    return [
        {
            "backend": backend,
            "K": draft_tokens or 0,
            "text": kind,
            "tokens": row["tokens"],
            "acceptance_length": row["tokens"] / max(1, len(row["rounds"])),
            "rounds_by_accepted": [row["rounds"].count(count) for count in range((draft_tokens or 0) + 1)],
            "tokens_per_second": row["tokens"] / row["seconds"],
        }
        for kind, row in rows.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    prompts = json.loads((DEMO / "golden_public.json").read_text())["prompts"]
    rows = [row for backend, k in CONFIGURATIONS for row in measure(backend, k, args.device, args.dtype, prompts)]
    plain = {row["text"]: row["tokens_per_second"] for row in rows if row["backend"] == "none"}
    print(f"{'backend':8} {'K':>2} {'text':11} {'tokens':>6} {'accepted':>8} {'tok/s':>7} {'ratio':>5}")
    for row in rows:
        row["ratio"] = row["tokens_per_second"] / plain[row["text"]]
        print(
            f"{row['backend']:8} {row['K']:2} {row['text']:11} {row['tokens']:6} {row['acceptance_length']:8.2f} "
            f"{row['tokens_per_second']:7.1f} {row['ratio']:5.2f}"
        )
    speculative = [row["ratio"] for row in rows if row["backend"] != "none"]
    print(f"geometric mean of the ratios with a drafter: {statistics.geometric_mean(speculative):.2f}")
    if args.output:
        card = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine()
        facts = {"card": card, "torch": torch.__version__, "dtype": args.dtype, "threads": 1, "tokens": TOKENS}
        facts["thinking"] = "no template"
        args.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
