"""An engine from the start of its process to its first token, in parts: for `bench/round_ready.py`, which starts it.

    python -m bench.round_start OPTIONS PROMPT_TOKENS BEGUN        OPTIONS: JSON of engine options; one JSON object out

`imports`: Python, torch and ours. `load`: the card, weights and text. `pools`, `capture`: of the engine. `warm`: what
the loop does ahead of its first command. `first_token`: of a prompt that nobody has seen. Seconds, since the Unix time
BEGUN, before which nothing of the process ran. `compiled`: kernels that Triton had to compile, and how long all of that
took. Bytes of the card: what weights, pools, and a round's buffers and graphs take, and all that is taken in the end;
`context`: what was before the weights, of this process and of others, the one that measures among them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Clock:
    """`parts`: seconds of each part that is over."""

    last: float
    parts: dict[str, float] = field(default_factory=dict)

    def over(self, part: str) -> None:
        now = time.time()
        self.parts[part] = self.parts.get(part, 0.0) + now - self.last
        self.last = now


@dataclass
class Compiled:
    """What Triton compiled, as it tells its listener."""

    count: int = 0
    seconds: float = 0.0
    by_kernel: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            self.count += 1
            self.seconds += times.total / 1e6
            self.by_kernel.setdefault(src.name, []).append(round(times.total / 1e6, 2))


def main() -> None:
    fields, tokens, clock = json.loads(sys.argv[1]), int(sys.argv[2]), Clock(float(sys.argv[3]))
    import torch
    from triton import knobs

    from deployment.engine import engine as engine_module
    from deployment.engine.card import wait_for_card
    from deployment.engine.commands import Submit
    from deployment.engine.engine import Engine
    from deployment.engine.events import Event, Tokens
    from deployment.engine.loading import load_models
    from deployment.engine.options import EngineOptions

    clock.over("imports")
    compiled = Compiled()
    knobs.compilation.listener = compiled
    options = EngineOptions(**fields | {name: Path(fields[name]) for name in ("model", "draft")})

    def used() -> int:
        if options.device == "cpu":
            return 0
        free, whole = torch.cuda.mem_get_info()
        return whole - free

    wait_for_card(options)
    before = used()
    models = load_models(options)
    if options.device != "cpu":
        torch.cuda.synchronize()
    clock.over("load")
    memory = {"context": before, "weights": used() - before}
    split(engine_module, "state_memory", clock, "engine", "pools", lambda: memory.update(pools=used()))
    split(engine_module.Executor, "capture", clock, "engine", "capture", lambda: None)
    events: list[Event] = []
    engine = Engine(models, options, events.append)
    clock.over("engine")
    memory |= {"all": used(), "buffers": engine._executor._buffers.size}
    engine.warm()
    clock.over("warm")
    prompt = tuple(i % models.target.public_rows for i in range(tokens))
    engine.execute(Submit("first", prompt, max_tokens=2, ignore_eos=True))
    while not any(isinstance(event, Tokens) for event in events):
        assert engine.step(), "the turn has ended without a token"
    clock.over("first_token")
    memory["pools"] -= memory["context"] + memory["weights"]
    memory["graphs"] = max(0, memory["all"] - sum(memory[name] for name in ("context", "weights", "pools", "buffers")))
    slowest = sorted(compiled.by_kernel.items(), key=lambda item: -sum(item[1]))
    print(f"compiled: {slowest[:16]}", file=sys.stderr)
    parts = {name: round(seconds, 3) for name, seconds in clock.parts.items()}
    told = {"compiled": compiled.count, "compile_s": round(compiled.seconds, 2), "bytes": memory}
    print(json.dumps({"seconds": parts} | told))


def split(owner: Any, name: str, clock: Clock, before: str, part: str, over: Callable[[], None]) -> None:
    """Has the clock told of a part of a constructor: `owner.name`, and what ran before it."""
    run = getattr(owner, name)

    def timed(*args: Any) -> Any:
        clock.over(before)
        result = run(*args)
        clock.over(part)
        over()
        return result

    setattr(owner, name, timed)


if __name__ == "__main__":
    main()
