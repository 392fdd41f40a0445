"""Engines over the demo model, driven step by step, and what their events say."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from typing import Any

from deployment.engine.commands import Command, Sampling, Submit
from deployment.engine.engine import Engine
from deployment.engine.events import Captured, Event, Evicted, Failed, Finished, Started, Tokens
from deployment.engine.loading import Models, load_models
from deployment.engine.options import EngineOptions
from model import DEMO

TARGET = DEMO / "target"
LOADED = ("context", "dtype", "device", "proposal_head", "yarn_factor", "public_rows")
"""Options that decide what is loaded; the others only what is done with it."""
DRAFT_TOKENS = 7
_turns = itertools.count()


@functools.cache
def golden() -> list[dict[str, Any]]:
    return json.loads((DEMO / "golden_public.json").read_text())["prompts"]


def prompt(index: int) -> tuple[int, ...]:
    return tuple(golden()[index]["prompt"])


def options(backend: str = "none", draft_tokens: int | None = None, **more: Any) -> EngineOptions:
    """Who does not say otherwise gets the rounds of DFlash2 with DFlash, too: the 15 drafts that its block has room for
    take a CPU twice as long."""
    if backend == "dflash" and draft_tokens is None and "device" not in more:
        draft_tokens = DRAFT_TOKENS
    draft = None if backend == "none" else DEMO / backend
    return EngineOptions(model=TARGET, draft=draft, backend=backend, draft_tokens=draft_tokens, **more)  # pyright: ignore


@functools.cache
def models(backend: str, draft_tokens: int | None = None, **more: Any) -> Models:
    """`more`: some of the `LOADED` options."""
    if "context" in more:  # nothing that is loaded depends on it
        context = more.pop("context")
        return replace(models(backend, draft_tokens, **more), context=context)
    return load_models(options(backend, draft_tokens, **more))


@functools.cache
def alone(
    ids: tuple[int, ...],
    tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    backend: str = "none",
    draft_tokens: int | None = None,
) -> Finished:
    """A turn of that many tokens in an engine of its own, end tokens ignored; by default without a drafter."""
    driver = Driver(backend, draft_tokens, lanes=1, images=0)
    return driver.run(ids, sampling=sampling, max_tokens=tokens, ignore_eos=True)


class Driver:
    """An engine and all events that it has emitted."""

    def __init__(
        self, backend: str = "none", draft_tokens: int | None = None, beside: bool | None = None, **more: Any
    ) -> None:
        """`beside`: as an `Engine` has it; `more`: options."""
        self.events: list[Event] = []
        more.setdefault("check_invariants", True)
        loaded = {name: more[name] for name in LOADED if name in more}
        self.engine = Engine(
            models(backend, draft_tokens, **loaded),
            options(backend, draft_tokens, **more),
            self.events.append,
            beside=beside,
        )

    def submit(self, prompt_ids: tuple[int, ...], **fields: Any) -> str:
        turn = fields.pop("turn", None) or f"turn-{next(_turns)}"
        self.engine.execute(Submit(turn=turn, prompt_ids=prompt_ids, **fields))
        return turn

    def steps(self, limit: int = 10_000) -> None:
        """Runs until nothing is left to do. The books are checked after every step."""
        for _ in range(limit):
            if not self.engine.step():
                return
        raise AssertionError(f"the engine is still busy after {limit} steps")

    def run(self, prompt_ids: tuple[int, ...], **fields: Any) -> Finished:
        """One turn to its end."""
        turn = self.submit(prompt_ids, **fields)
        self.steps()
        return self.finished(turn)

    def call(self, command: Command) -> Any:
        """The one answer of a command that has one."""
        before = len(self.events)
        self.engine.execute(command)
        (answer,) = [event for event in self.events[before:] if not isinstance(event, Evicted)]
        return answer

    def of(self, turn: str) -> list[Event]:
        return [event for event in self.events if getattr(event, "turn", getattr(event, "ref", None)) == turn]

    def finished(self, turn: str) -> Finished:
        last = self.of(turn)[-1]
        assert isinstance(last, Finished), last
        return last

    def failed(self, turn: str) -> Failed:
        last = self.of(turn)[-1]
        assert isinstance(last, Failed), last
        return last

    def started_events(self, turn: str) -> list[Started]:
        return [event for event in self.of(turn) if isinstance(event, Started)]

    def started(self, turn: str) -> Started:
        (event,) = self.started_events(turn)
        return event

    def streamed(self, turn: str) -> tuple[int, ...]:
        """The published ids as they came, checked to be without gaps or repeats."""
        ids: list[int] = []
        expected: int | None = None
        for event in self.of(turn):
            if isinstance(event, Tokens):
                assert expected in (None, event.start), "a gap or a repeat in the stream"
                ids.extend(event.token_ids)
                expected = event.start + len(event.token_ids)
        return tuple(ids)

    def captured(self, turn: str) -> list[Captured]:
        return [event for event in self.of(turn) if isinstance(event, Captured)]


def seeded(seed: int = 7, **more: Any) -> Sampling:
    return replace(Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=seed), **more)
