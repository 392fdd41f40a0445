"""A stand-in for the model: the next token is a hash of all tokens so far, of the seed, and of where the round began.

It keeps its state where the real executor keeps it, in images and pages, and goes on from there alone; so whoever mixes
up slots, pages, rows or frontiers gets other tokens, or an AssertionError that says what was mixed up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from deployment.engine.commands import Submit
from deployment.engine.engine import Engine
from deployment.engine.events import Event
from deployment.engine.lane import Lane
from deployment.engine.options import EngineOptions
from state.geometry import PAGE_TOKENS, StateGeometry
from state.memory import UNSETTLED, StateMemory
from state.pages import PagePool
from tests.engine.driving import TARGET

VOCABULARY = 61
DRAFT_TOKENS = 4
GEOMETRY = StateGeometry(
    kv_layers=1,
    kv_heads=1,
    kv_head_dim=1,
    kv_dtype=torch.float32,
    gdn_layers=1,
    gdn_heads=1,
    gdn_key_dim=1,
    gdn_value_dim=4,
    conv_channels=1,
    conv_history=1,
    conv_dtype=torch.float32,
    hidden_size=1,
    hidden_dtype=torch.float32,
    full_layers=1,
    draft_kv_heads=1,
    draft_head_dim=1,
)


def mixed(*values: int) -> int:
    """64 bits that depend on all values and their order."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ value) * 0xBF58476D1CE4E5B9 % (1 << 64)
        state ^= state >> 29
    return state


def drawn(submit: Submit, state: int, place: int) -> int:
    return mixed(submit.sampling.seed, state, place) % VOCABULARY


def round_of(submit: Submit, state: int, anchor: int, left: int) -> list[int]:
    """What a round licenses: like DFlash2's, its tokens depend on where it begins."""
    extent = min(DRAFT_TOKENS, left - 1)
    accepted = mixed(submit.sampling.seed, state, anchor) % (extent + 1)
    return [drawn(submit, mixed(state, anchor), place) for place in range(1, accepted + 2)]


def undisturbed(submit: Submit, context: int) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """The whole turn, run alone: published ids, accepted drafts of each round, finish reason."""
    state = 0
    for token in submit.prompt_ids:
        state = mixed(state, token)
    left = min(context - len(submit.prompt_ids), submit.max_tokens or context)
    published: list[int] = []
    rounds: list[int] = []
    licensed = [drawn(submit, state, 0)]
    while True:
        for token in licensed:
            if token in submit.stop_ids:
                return tuple(published), tuple(rounds), "stop"
            published.append(token)
            if len(published) == left:
                return tuple(published), tuple(rounds), "length"
        anchor = licensed[-1]
        licensed = round_of(submit, state, anchor, left - len(published))
        rounds.append(len(licensed) - 1)
        for token in (anchor, *licensed[:-1]):
            state = mixed(state, token)


class HashExecutor:
    """The methods of `Executor`, over the same memory."""

    def __init__(self, memory: StateMemory) -> None:
        self._memory = memory
        self._pending: dict[int, tuple[Lane, list[int]]] = {}

    def prefill(self, lane: Lane, end: int) -> tuple[()]:
        assert lane.frontier < end <= lane.prefill_end and not lane.pending
        tokens = lane.ledger[lane.frontier : end]
        self._advance(lane, tokens)
        assert self._memory.draft is not None
        self._write(self._memory.draft, lane.memory.draft_pages, end - len(tokens), tokens)
        lane.memory.context_frontier = end
        return ()

    def first_token(self, lane: Lane) -> tuple[int, tuple[()]]:
        return drawn(lane.submit, self._state(lane), 0), ()

    def run(self, lanes: Sequence[Lane], meanwhile: Callable[[], None]) -> Any:
        self.catch_up(lanes)
        rows = [lane.row for lane in lanes]
        assert len(set(rows)) == len(rows), "two lanes have one row"
        licensed = [tuple(round_of(lane.submit, self._state(lane), lane.anchor, lane.tokens_left)) for lane in lanes]
        accepted = tuple(len(tokens) - 1 for tokens in licensed)
        meanwhile()
        untold = ((),) * len(lanes)
        drafted = (DRAFT_TOKENS,) * len(lanes)
        return SimpleNamespace(
            lanes=tuple(lanes), licensed=tuple(licensed), drafted=drafted, accepted=accepted, logprobs=untold,
            dead_ends=(),
        )  # fmt: skip

    def commit(self, done: Any, counts: Sequence[int]) -> None:
        for lane, tokens, kept in zip(done.lanes, done.licensed, counts, strict=True):
            inputs = [lane.anchor, *tokens][:kept]
            self._advance(lane, inputs)
            self._pending[lane.row] = (lane, inputs)
            lane.pending = kept

    def catch_up(self, lanes: Sequence[Lane]) -> None:
        assert self._memory.draft is not None
        for lane in [lane for lane in lanes if lane.pending]:
            owner, tokens = self._pending[lane.row]
            assert owner is lane and len(tokens) == lane.pending, "pending features are another lane's"
            self._write(self._memory.draft, lane.memory.draft_pages, lane.memory.context_frontier, tokens)
            lane.memory.context_frontier += lane.pending
            lane.pending = 0

    def _state(self, lane: Lane) -> int:
        """The hash at the frontier, after a check that the pages hold what the ledger says."""
        assert lane.memory.context_frontier == lane.frontier != UNSETTLED
        assert self._memory.draft is not None
        expected = lane.ledger[: lane.frontier]
        for pool, pages in ((self._memory.target, lane.memory.pages), (self._memory.draft, lane.memory.draft_pages)):
            held = pool.keys[pages].flatten()[: lane.frontier].tolist()
            assert held == expected, f"{pool.name} do not hold what the ledger says"
        return self._read(lane)

    def _read(self, lane: Lane) -> int:
        parts = self._memory.images.gdn[lane.memory.slot].flatten().tolist()
        return sum(int(part) << (16 * index) for index, part in enumerate(parts))

    def _advance(self, lane: Lane, tokens: Sequence[int]) -> None:
        state = self._read(lane)
        for token in tokens:
            state = mixed(state, token)
        parts = [float(state >> (16 * index) & 0xFFFF) for index in range(4)]
        self._memory.images.gdn[lane.memory.slot] = torch.tensor(parts).view(1, 1, 1, 4)
        self._write(self._memory.target, lane.memory.pages, lane.frontier, tokens)
        lane.memory.settle(lane.frontier + len(tokens))

    def _write(self, pool: PagePool, pages: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        places = range(start, start + len(tokens))
        index = torch.tensor([pages[place // PAGE_TOKENS] for place in places])
        columns = torch.tensor([place % PAGE_TOKENS for place in places])
        pool.keys[index, 0, columns, 0, 0] = torch.tensor([float(token) for token in tokens])


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def hash_engine(
    clock: Clock, events: list[Event], context: int = 256, beside: bool | None = None, **more: Any
) -> Engine:
    """An engine whose model is a hash. `beside`: as an `Engine` has it; `more`: options."""
    options = EngineOptions(model=TARGET, context=context, **{"check_invariants": True, **more})
    models: Any = SimpleNamespace(
        context=context,
        target=SimpleNamespace(public_rows=VOCABULARY),
        tokenizer=SimpleNamespace(public_rows=VOCABULARY),
        defaults=SimpleNamespace(eos_ids=()),
        geometry=GEOMETRY,
        device=torch.device("cpu"),
        vision=None,
        drafter=None,
        taps=(),
        draft_tokens=DRAFT_TOKENS,
        fingerprint=None,
    )
    engine = Engine(models, options, events.append, clock, beside=beside)
    engine._executor = HashExecutor(engine.memory)  # pyright: ignore
    return engine
