"""The demo model decodes greedily with and without drafting: where do the two answers part, and how near a tie was it?

    python -m bench.demo_parity [--device cuda] [--dtype bfloat16] [--output bench/results/demo_parity.h200.json]

In exact arithmetic they never part. In BF16 a target's scores depend in their last bits on how many columns it sees at
once, and a near tie falls the other way: `gap` is by how much, in nats, the plain run preferred its own token at the
first place where the other answer has another. What comes after such a place is another text, and is not compared.

`acceptance_length`: committed tokens a round, with an interval of 95 % from resampling the prompts. The twelve golden
prompts, `TOKENS` tokens each, one lane.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deployment.engine.commands import Sampling, Submit, TokenLogprob
from deployment.engine.engine import Engine
from deployment.engine.events import Event, Finished, Tokens
from deployment.engine.loading import load_models
from deployment.engine.options import Backend, EngineOptions
from model import DEMO

CONFIGURATIONS: list[tuple[Backend, int]] = [("dflash", 15), ("dflash2", 7)]
TOKENS, ALTERNATIVES = 96, 20
RESAMPLES = 2000


class Decoder:
    """One lane, and the answers that it gives."""

    def __init__(self, backend: Backend, draft_tokens: int | None, device: str, dtype: str) -> None:
        draft = None if backend == "none" else DEMO / backend
        options = EngineOptions(
            DEMO / "target", draft, backend, draft_tokens, device=device, dtype=dtype, lanes=1, images=0
        )
        self._events: list[Event] = []
        self._engine = Engine(load_models(options), options, self._events.append)

    def answer(self, prompt: Sequence[int], logprobs: int | None = None) -> tuple[Finished, list[TokenLogprob]]:
        self._events.clear()
        sampling = Sampling(logprobs=logprobs)
        self._engine.execute(Submit("turn", tuple(prompt), sampling, max_tokens=TOKENS, ignore_eos=True))
        while self._engine.step():
            pass
        told = [entry for event in self._events if isinstance(event, Tokens) for entry in event.logprobs]
        last = self._events[-1]
        assert isinstance(last, Finished), last
        return last, told


def parting(plain: Sequence[int], told: Sequence[TokenLogprob], other: Sequence[int]) -> dict[str, Any] | None:
    """The first place where two answers differ, and the gap there: of what the plain run was told of its `ALTERNATIVES`
    best tokens, None where the other token is not among them."""
    place = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if place is None:
        return None
    scores = dict(told[place].top)
    there = scores.get(other[place])
    return {"place": place, "gap": None if there is None else round(told[place].logprob - there, 4)}


def acceptance(rounds: Sequence[Sequence[int]]) -> tuple[float, tuple[float, float]]:
    """Committed tokens a round, of the accepted drafts of each prompt's rounds, and an interval of 95 %."""

    def mean(chosen: Sequence[Sequence[int]]) -> float:
        return 1 + sum(map(sum, chosen)) / sum(map(len, chosen))

    draw = random.Random(0)
    means = sorted(mean(draw.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    return mean(rounds), (means[RESAMPLES // 40], means[-RESAMPLES // 40])


def parity_rows(device: str, dtype: str, prompts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    decoder = Decoder("none", None, device, dtype)
    plain = [decoder.answer(case["prompt"], ALTERNATIVES) for case in prompts]
    rows: list[dict[str, Any]] = []
    for backend, drafts in CONFIGURATIONS:
        decoder = Decoder(backend, drafts, device, dtype)
        answers = [decoder.answer(case["prompt"])[0] for case in prompts]
        found = [
            parting(mine.token_ids, told, answer.token_ids) for (mine, told), answer in zip(plain, answers, strict=True)
        ]
        length, interval = acceptance([answer.rounds for answer in answers])
        row = {
            "backend": backend,
            "K": drafts,
            "prompts": len(prompts),
            "tokens": sum(len(answer.token_ids) for answer in answers),
            "rounds": sum(len(answer.rounds) for answer in answers),
            "acceptance_length": round(length, 3),
            "interval": [round(end, 3) for end in interval],
            "parted": [part for part in found if part is not None],
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    prompts = json.loads((DEMO / "golden_public.json").read_text())["prompts"]
    rows = parity_rows(args.device, args.dtype, prompts)
    if args.output:
        card = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine()
        facts = {"card": card, "torch": torch.__version__, "dtype": args.dtype, "tokens": TOKENS}
        args.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
