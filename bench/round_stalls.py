"""Lanes decode while one long prompt arrives: how long do they wait, and what does it cost the prompt? For
`bench/round.py`.

A whole engine, in this process, over random weights, which accept nothing: a round gives each lane one token. A gap is
the time between two tokens of a lane. First the prompt alone, then another one beside the lanes that decode; before it
they decode undisturbed, which is what a gap is compared with.

`slices`: one prefill slice of so many tokens, launched from the host one by one, and as one captured graph.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.gpu import elapsed_ms, median_ms
from bench.round_models import DEVICE, Lanes, draft_context, draft_rows
from bench.round_parts import bare_models
from deployment.engine.commands import Cancel, Submit
from deployment.engine.engine import Engine
from deployment.engine.events import Event, Failed, Finished, Started, Tokens
from deployment.engine.loading import state_geometry
from deployment.engine.options import EngineOptions
from model.drafter import Drafter
from model.target import Target
from state.geometry import pages_for

LANES, PROMPT = 7, 65536
SHORT = 1024
"""Tokens of the prompts of lanes that decode."""
TOKENS = 2048
"""Of their answers, at most."""
UNDISTURBED = 40
"""Rounds before the prompt comes."""
SLICES = (64, 256, 512, 1024, 2048)


class Heard:
    """What an engine told: when each turn's tokens came, and which turns decode or have ended."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)
        self.started: set[str] = set()
        self.ended: set[str] = set()
        self.failed: list[str] = []

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self.started.add(event.turn)
            case Tokens():
                self.times[event.turn].append(time.perf_counter())
            case Finished():
                self.ended.add(event.turn)
            case Failed():
                self.failed.append(f"{event.ref}: {event.message}")
            case _:
                pass


def stall_rows(model: str, target: Target, drafter: Drafter) -> list[dict[str, Any]]:
    heard = Heard()
    engine = engine_of(target, drafter, heard)
    alone = seconds_of(engine, heard, prompt(target, "alone", PROMPT))
    row = {"model": model, "lanes": LANES, "prompt": PROMPT, "max_stall_ms": engine._options.max_stall_ms}
    row |= beside(engine, heard, target, alone)
    print(row, flush=True)
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [row]


def engine_of(target: Target, drafter: Drafter, heard: Heard) -> Engine:
    """With the defaults of everything but its pools."""
    drafts = drafter.config.block_size - 1
    models = bare_models(target, drafter, drafts, state_geometry(target.config, drafter.config, target.embedding.dtype))
    models.context = PROMPT + SHORT
    pages = 2 * pages_for(PROMPT + SHORT) + LANES * pages_for(SHORT + TOKENS)
    options = EngineOptions(
        Path(),
        Path(),
        drafter.config.kind,
        device=DEVICE,
        dtype="bfloat16",
        lanes=LANES + 1,
        images=8,
        pages=pages,
    )
    return Engine(models, options, heard)


def prompt(target: Target, turn: str, tokens: int, max_tokens: int = 1) -> Submit:
    ids = torch.randint(0, target.public_rows, (tokens,)).tolist()
    return Submit(turn, tuple(ids), max_tokens=max_tokens, ignore_eos=True)


def seconds_of(engine: Engine, heard: Heard, submit: Submit) -> float:
    """To a turn's end."""
    begun = time.perf_counter()
    engine.execute(submit)
    while submit.turn not in heard.ended:
        assert engine.step() and not heard.failed, heard.failed or f"{submit.turn} has not ended"
    return time.perf_counter() - begun


def beside(engine: Engine, heard: Heard, target: Target, alone: float) -> dict[str, Any]:
    names = [f"decodes-{lane}" for lane in range(LANES)]
    for name in names:
        engine.execute(prompt(target, name, SHORT, max_tokens=TOKENS))
    while not heard.started.issuperset(names):
        engine.step()
    for _ in range(UNDISTURBED):
        engine.step()
    slices = watched_slices(engine)
    came = time.perf_counter()
    taken = seconds_of(engine, heard, prompt(target, "beside", PROMPT))
    assert not heard.ended & set(names), "lanes ended while the prompt was prefilled"
    for name in names:
        engine.execute(Cancel(name))
    while engine.step():
        pass
    times = heard.times[names[-1]]  # all lanes have the same rounds
    before = gaps([moment for moment in times if moment < came][-UNDISTURBED:])
    during = gaps([moment for moment in times if came <= moment <= came + taken])
    return {
        "alone_s": round(alone, 3),
        "beside_s": round(taken, 3),
        "share_of_speed": round(alone / taken, 3),
        "slices": len(slices),
        "slice_tokens": round(median(tokens for tokens, _ in slices)),
        "slice_ms": round(1e3 * median(seconds for _, seconds in slices), 2),
        "round_ms": round(1e3 * median(before), 2),
        "gap_ms": round(1e3 * median(during), 2),
        "gap_p99_ms": round(1e3 * sorted(during)[int(0.99 * len(during))], 2),
        "gap_most_ms": round(1e3 * max(during), 2),
        "first_slices": slices[:12],
    }


def watched_slices(engine: Engine) -> list[tuple[int, float]]:
    """Tokens and seconds of each prefill slice from now on."""
    slices: list[tuple[int, float]] = []
    measured = engine._pacer.measured

    def noted(tokens: int, seconds: float) -> None:
        slices.append((tokens, round(seconds, 4)))
        measured(tokens, seconds)

    engine._pacer.measured = noted
    return slices


def gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


# ------------------------------------------------------------------------------------------------ one slice


def slice_rows(model: str, target: Target, drafter: Drafter) -> list[dict[str, Any]]:
    """What a slice takes at the beginning of a prompt."""
    found: list[dict[str, Any]] = []
    for tokens in SLICES:
        lanes = Lanes.at(target.config, 1, 0, tokens)
        context, rows = draft_context(drafter.config, lanes), draft_rows(drafter.config, lanes)
        columns = lanes.columns(torch.randint(0, target.public_rows, (1, tokens), device=DEVICE))

        def prefill(columns: Any = columns, lanes: Any = lanes, rows: Any = rows, context: Any = context) -> None:
            forward = target.prefill(columns, lanes.state, drafter.config.target_layer_ids)
            assert forward.features is not None
            drafter.append_context(forward.features, columns.start, columns.valid, rows, context)

        row = {"model": model, "tokens": tokens, "launched_ms": round(elapsed_ms(prefill), 2)}
        row["graph_ms"] = round(median_ms([prefill], samples=5), 2)
        found.append(row)
        print(row, flush=True)
    return found
