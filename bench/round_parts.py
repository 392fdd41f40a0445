"""The decode round as the engine runs it, in parts: for `bench/round.py`.

Pages, images and rings hold random numbers; nothing is prefilled. Random weights accept nothing, so the tokens that a
commit keeps are forced: N of `KEPT` in turn, four on average, each lane at another place of it. A part lasts from the
first to the last of its launches on the card, by events, in rounds of their own: events cost a round 0.13 ms. `host` is
what is left of a round without them: the time from verdict to verdict in which no segment runs. Medians of `ROUNDS`
rounds each.

The floor: all weights that a round must read (the head twice, for proposals and for verification; of a mixture the
experts that its layers chose, `bench/round_mixture.py`), every lane's K/V, rings and recurrent state once, over the
bandwidth of a pure read in the same run.
"""

from __future__ import annotations

import gc
import itertools
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from bench.round_mixture import Chosen, VariedDrafts, chosen_experts
from deployment.engine.commands import Sampling, Submit
from deployment.engine.drafting import DraftTokens
from deployment.engine.graphs import Runs, eagerly
from deployment.engine.lane import Lane
from deployment.engine.loading import state_geometry
from deployment.engine.round import Executor
from deployment.engine.round_shape import Shapes
from model.drafter import Drafter
from model.target import Target
from state.geometry import PAGE_TOKENS, StateGeometry, pages_for
from state.memory import StateMemory

DEVICE = torch.device("cuda")
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (1024, 8192, 32768, 131072)
KEPT = (1, 6, 3, 4, 7, 2, 4, 5)
"""N, mean 4."""
ROUNDS, WARM, COUNTED = 20, 4, 2
IN_TURN = 5
ROOM = (2 * ROUNDS + WARM + 2) * max(KEPT)
SPARE = 9 << 30
"""Bytes of the card that are left to activations, graphs and a round's buffers."""
GREEDY, DRAWN = Sampling(), Sampling(temperature=0.7, top_k=20, top_p=0.95, seed=1)
PROFILED = ((1, 1024), (8, 1024))
OURS = r"_stream_kernel|_sum_kernel|gate_up_kernel|down_kernel"
PRODUCTS = re.compile(rf"gemm|gemv|nvjet|cutlass|splitKreduce|{OURS}", re.IGNORECASE)


def rounds(
    model: str, target: Target, drafter: Drafter, drafts: int, tbps: float, contexts: Sequence[int] = CONTEXTS
) -> Iterator[dict[str, Any]]:
    """One row for each batch and context that fits the card's memory, drawn as chat is by default, and some greedy
    ones. `drafts`: K. `tbps`: TB/s of a pure read."""
    geometry = state_geometry(target.config, drafter.config, torch.bfloat16)
    memory = random_memory(geometry, contexts[-2])
    models = bare_models(target, drafter, drafts, geometry, contexts[-1])
    executor = Executor(models, memory, max(BATCHES), Shapes.on(DEVICE, DraftTokens(drafts)), media_bytes=0)
    cases = [(batch, context, DRAWN) for batch in BATCHES for context in contexts]
    for batch, context, sampling in [*((*case, GREEDY) for case in PROFILED), *cases]:
        if batch * pages_for(context + ROOM) > memory.target.pages:
            continue
        lanes = open_lanes(memory, batch, context, sampling)
        row = {"model": model, "backend": drafter.config.kind, "K": drafts, "B": batch, "context": context}
        row |= {"temperature": sampling.temperature} | timed(executor, lanes)
        chosen = None
        if target.config.moe is not None:
            chosen = experts_of(executor, lanes)
            row["experts"] = round(chosen.experts, 1)
        row["floor_ms"] = round(floor_bytes(target, drafter, geometry, batch, context, chosen) / tbps / 1e9, 3)
        if (batch, context) in PROFILED:
            row |= operators(executor, lanes)
        print(row, flush=True)
        yield row
        for lane in lanes:
            memory.close(lane.memory)
    del executor, memory
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------ what runs


def bare_models(
    target: Target, drafter: Drafter, drafts: int, geometry: StateGeometry, context: int = CONTEXTS[-1]
) -> Any:
    """What an executor asks of its models, without anything of text."""
    return SimpleNamespace(
        target=target,
        vision=None,
        drafter=drafter,
        draft_tokens=drafts,
        context=context + ROOM,
        defaults=SimpleNamespace(eos_ids=()),
        tokenizer=SimpleNamespace(public_rows=target.public_rows),
        geometry=geometry,
        device=DEVICE,
        dtype=torch.bfloat16,
        taps=drafter.config.target_layer_ids,
    )


def random_memory(geometry: StateGeometry, context: int) -> StateMemory:
    """Images for the largest batch, and pages for it at `context` tokens each, if so many fit."""
    pages = max(BATCHES) * pages_for(context + ROOM)
    if DEVICE.type == "cuda":
        free = torch.cuda.mem_get_info()[0] - SPARE - (max(BATCHES) + 1) * geometry.image_bytes
        pages = min(pages, free // (geometry.target_page_bytes + geometry.draft_page_bytes))
    memory = StateMemory(geometry, pages, pages, max(BATCHES), DEVICE)
    images = memory.images
    paged = [(pool.keys, pool.values) for pool in (memory.target, memory.draft) if pool is not None]
    for plane in (*itertools.chain.from_iterable(paged), images.conv, images.rings.keys, images.rings.values):
        for part in plane:
            part.normal_()
    for part in images.gdn:
        part.normal_(std=0.25)
    return memory


def open_lanes(memory: StateMemory, batch: int, context: int, sampling: Sampling) -> list[Lane]:
    """Lanes that decode at frontier `context`, over whatever their pages hold."""
    lanes: list[Lane] = []
    for row in range(batch):
        sequence = memory.open(context + ROOM)
        for plane, std in ((memory.images.gdn, 0.25), (memory.images.conv, 1.0), (memory.images.rings.keys, 1.0)):
            plane[sequence.slot].normal_(std=std)
        memory.images.rings.values[sequence.slot].normal_()
        sequence.settle(context)
        sequence.context_frontier = context
        submit = Submit(f"turn-{row}", (row,) * context, sampling)
        ledger = [(7 * row + place) % 31 for place in range(context + 1)]
        lanes.append(Lane(submit, row, sequence, ledger, ROOM, frozenset(), "none", 0, 0.0))
    return lanes


def kept(number: int, batch: int) -> list[int]:
    return [KEPT[(number + 3 * lane) % len(KEPT)] for lane in range(batch)]


def one_round(executor: Executor, lanes: Sequence[Lane], number: int) -> None:
    """A round, its commit, and what the engine's books would say after it."""
    done = executor.run(lanes)
    counts = kept(number, len(lanes))
    executor.commit(done, counts)
    for lane, count in zip(lanes, counts, strict=True):
        lane.ledger.extend(range(count))


# ------------------------------------------------------------------------------------------------ time


class Watched:
    """Runs segments, with an event before and one behind each; on a CPU, where they are over when their calls return,
    by the clock."""

    def __init__(self, runs: Runs, device: torch.device) -> None:
        self._runs = runs
        self._on_card = device.type == "cuda"
        self._moments: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def __call__(self, key: Any, segment: Callable[[], None]) -> None:
        begin = self._now()
        self._runs(key, segment)
        self._moments[key[0]].append((begin, self._now()))

    def _now(self) -> Any:
        if not self._on_card:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self) -> dict[str, list[float]]:
        """Of each segment, every time that it ran; they are over."""
        if not self._on_card:
            return {part: [1e3 * (end - begin) for begin, end in pairs] for part, pairs in self._moments.items()}
        torch.cuda.synchronize()
        return {part: [begin.elapsed_time(end) for begin, end in pairs] for part, pairs in self._moments.items()}


def timed(executor: Executor, lanes: Sequence[Lane]) -> dict[str, Any]:
    """A few rounds without events and a few with them in turn, because a card's clock is not the same all the time."""
    plain, watched = executor._runs, Watched(executor._runs, DEVICE)
    for number in range(WARM):
        one_round(executor, lanes, number)
    times: list[float] = []
    for first in range(0, ROUNDS, IN_TURN):
        for runs in (plain, watched):
            executor._runs = varied(executor, runs)
            for number in range(first, first + IN_TURN):
                begun = time.perf_counter()
                one_round(executor, lanes, WARM + number)
                if runs is plain and number > first:
                    times.append(1e3 * (time.perf_counter() - begun))
    executor._runs = plain
    whole, parts = median(times), watched.milliseconds()
    busy = [sum(part) for part in zip(*(times for name, times in parts.items() if name != "commit"), strict=True)]
    told = {name: round(median(times), 4) for name, times in parts.items()}
    told["host"] = round(whole - median(busy) - median(parts["commit"]), 4)
    return {"round_ms": round(whole, 3), "parts": told}


def varied(executor: Executor, runs: Runs) -> Runs:
    """Of a mixture, with drafts that are not all alike."""
    if executor._models.target.config.moe is None:
        return runs
    return VariedDrafts(runs, executor._buffers.proposed.device, executor._models.target.public_rows)


def experts_of(executor: Executor, lanes: Sequence[Lane]) -> Chosen:
    """What the layers of these lanes' rounds choose, of rounds that are launched one by one."""
    plain, executor._runs = executor._runs, varied(executor, eagerly)
    with chosen_experts() as chosen:
        for number in range(COUNTED):
            lanes_back(lanes)
            one_round(executor, lanes, number)
    executor._runs = plain
    return chosen


def lanes_back(lanes: Sequence[Lane]) -> None:
    """Keeps frontiers within the pages: what lies there is as random as before."""
    for lane in lanes:
        if lane.frontier + 2 * max(KEPT) > len(lane.memory.pages) * PAGE_TOKENS:
            lane.memory.settle(lane.prompt_tokens)
            lane.memory.context_frontier = lane.prompt_tokens - lane.pending


def operators(executor: Executor, lanes: Sequence[Lane], count: int = 4) -> dict[str, Any]:
    """Milliseconds a round of all products, and of each kernel that is none, the longest first, as `shares` counts."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for number in range(count):
            lanes_back(lanes)
            one_round(executor, lanes, number)
        torch.cuda.synchronize()
    ran = [event for event in profiled.events() or () if event.device_type.name == "CUDA"]
    spent = shares([(event.name, event.time_range.start, event.time_range.end) for event in ran])
    spent = {name: us / 1e3 / count for name, us in spent.items()}
    products = spent.pop("products", 0.0)
    ranked = sorted(spent.items(), key=lambda item: -item[1])
    longest = {re.sub(r"[<(].*", "", name)[-48:]: round(ms, 4) for name, ms in ranked[:14]}
    return {
        "products_ms": round(products, 3),
        "other_ms": round(sum(spent.values()), 3),
        "operators": longest,
    }


def shares(spans: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Of kernels (name, begin, end), every moment once: it is the products' if one runs, or else that of the kernel
    which began first. A kernel that overlaps waits for most of its time for the one before it."""
    found: dict[str, float] = defaultdict(float)
    reached, busy = -math.inf, list[tuple[float, float]]()
    for name, begin, end in sorted(spans, key=lambda span: span[1]):
        if PRODUCTS.search(name) and end > reached:
            busy.append((max(begin, reached), end))
            found["products"] += end - busy[-1][0]
            reached = end
    reached, first = -math.inf, 0
    for name, begin, end in sorted(spans, key=lambda span: span[1]):
        if PRODUCTS.search(name) or end <= reached:
            continue
        begin, reached = max(begin, reached), end
        while first < len(busy) and busy[first][1] <= begin:
            first += 1
        hidden = itertools.takewhile(lambda span, end=end: span[0] < end, itertools.islice(busy, first, None))
        found[name] += end - begin - sum(min(late, end) - max(early, begin) for early, late in hidden)
    return found


# ------------------------------------------------------------------------------------------------ floor


def floor_bytes(
    target: Target,
    drafter: Drafter,
    geometry: StateGeometry,
    batch: int,
    context: int,
    chosen: Chosen | None = None,
) -> int:
    """`chosen`: of a mixture."""
    weights = bytes_of(target.blocks) + bytes_of(target.head) + bytes_of(drafter.layers) + bytes_of(drafter.feature)
    weights += bytes_of(drafter.head.weight) + bytes_of(drafter._context_weight)
    if chosen is not None:
        weights -= chosen.unread_bytes(target)
    rings = geometry.ring_bytes * min(context, geometry.window) // max(geometry.window, 1)
    pages = (geometry.target_page_bytes + geometry.draft_page_bytes) * context // PAGE_TOKENS
    return weights + batch * (pages + geometry.gdn_bytes + geometry.conv_bytes + rings)


def bytes_of(value: Any) -> int:
    """Of all tensors in a value of dataclasses and tuples."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, tuple):
        return sum(map(bytes_of, value))
    return sum(bytes_of(getattr(value, field.name)) for field in fields(value)) if is_dataclass(value) else 0
