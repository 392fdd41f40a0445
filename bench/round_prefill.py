"""Prefill and plain decoding of a target on a card, for `bench/round.py`, beside what the library's products take.

prefill   a prompt of one lane in chunks, launched from the host: target with its taps, the drafter's context, and the
          scores of the last column. Operations are counted as 2 x (weights of the products) x T + 2 T^2 Hq D x (full
          attention layers): of the target's matrices and of causal attention, and of nothing else.
products  the target's matrices alone, with as many rows as a chunk has: what prefill cannot go below. Of a mixture's
          experts one stands for all that are chosen, with as many rows as those have together.
plain     one token of each lane: verification of one column, scores, argmax, commit
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.gpu import elapsed_ms, median_ms
from bench.round_models import DEVICE, DTYPE, Lanes, draft_context, draft_rows, product_weights
from kernels.ordering import argmax_rows
from model.drafter import Drafter
from model.target import Target

TOKENS, CHUNKS = 8192, (2048, 8192)
PLAIN_BATCHES, PLAIN_CONTEXT, PLAIN_ROOM = (1, 8), 1024, 2048


def prefill_rows(model: str, target: Target, drafter: Drafter) -> list[dict[str, Any]]:
    lanes = Lanes.at(target.config, 1, 0, TOKENS)
    context, rows = draft_context(drafter.config, lanes), draft_rows(drafter.config, lanes)
    token_ids = torch.randint(0, target.public_rows, (1, TOKENS), device=DEVICE)

    def prefill(chunk: int) -> None:
        for begin in range(0, TOKENS, chunk):
            start = torch.full_like(lanes.frontier, begin)
            columns = lanes.columns(token_ids[:, begin : begin + chunk], start)
            forward = target.prefill(columns, lanes.state, drafter.config.target_layer_ids)
            assert forward.features is not None
            skipped = drafter.first_kept(chunk)
            features = forward.features[:, skipped:]
            drafter.append_context(features, start + skipped, columns.valid - skipped, rows, context)
        target.logits(forward.hidden[:, -1])

    found: list[dict[str, Any]] = []
    for chunk in CHUNKS:
        ms = elapsed_ms(lambda chunk=chunk: prefill(chunk), samples=3)
        products = TOKENS // chunk * products_ms(target, chunk)
        tflops = operations(target, TOKENS) / ms / 1e9
        found.append(
            {
                "model": model,
                "tokens": TOKENS,
                "chunk": chunk,
                "ms": round(ms, 2),
                "tflops": round(tflops, 1),
                "products_ms": round(products, 2),
            }
        )
        print(f"prefill of {TOKENS} in chunks of {chunk}: {ms:.1f} ms, {tflops:.0f} TFLOP/s, products {products:.1f}")
    return found


def operations(target: Target, tokens: int) -> int:
    """Of a prompt's prefill."""
    config = target.config
    weights = sum(weight.numel() * times for weight, times in product_weights(target))
    attention = 2 * tokens**2 * config.num_heads * config.head_dim * len(config.full_layers)
    return 2 * weights * tokens + attention


def products_ms(target: Target, rows: int) -> float:
    """The products of a forward of so many columns, one after the other."""
    weights = product_weights(target)
    inputs = {
        (depth, times): torch.randn(rows * times, depth, dtype=DTYPE, device=DEVICE)
        for depth, times in {(weight.shape[1], times) for weight, times in weights}
    }

    def products() -> None:
        for weight, times in weights:
            torch.nn.functional.linear(inputs[weight.shape[1], times], weight)

    return elapsed_ms(products, samples=3)


def matmul_tflops(size: int = 8192, seconds: float = 0.5) -> tuple[float, float]:
    """BF16 products of square matrices: for a moment, and for as long as a prefill lasts (a card gets warmer, and its
    clock slower)."""
    a, b = (torch.randn(size, size, dtype=DTYPE, device=DEVICE) for _ in range(2))
    once = elapsed_ms(lambda: torch.mm(a, b), samples=9)
    times = max(1, int(seconds * 1e3 / once))

    def many() -> None:
        for _ in range(times):
            torch.mm(a, b)

    lasting = elapsed_ms(many, samples=3) / times
    return 2 * size**3 / once / 1e9, 2 * size**3 / lasting / 1e9


# ------------------------------------------------------------------------------------------------ plain decoding


def plain_rows(model: str, target: Target) -> list[dict[str, Any]]:
    """Launched one by one from the host, and as one captured graph."""
    found: list[dict[str, Any]] = []
    for batch in PLAIN_BATCHES:
        step = plain_step(target, batch)
        for how, ms in (("eager", elapsed_ms(step, samples=9)), ("graph", median_ms([step], samples=9))):
            found.append({"model": model, "B": batch, "launched": how, "ms_per_token": round(ms, 3)})
            print(f"plain decoding of {batch} lanes, {how}: {ms:.2f} ms")
    return found


def plain_step(target: Target, batch: int) -> Callable[[], None]:
    """Every call moves all lanes by one token."""
    lanes = Lanes.at(target.config, batch, PLAIN_CONTEXT, PLAIN_ROOM)
    token_ids = torch.randint(0, target.public_rows, (batch, 1), device=DEVICE)
    one = torch.ones_like(lanes.slots)

    def step() -> None:
        forward = target.verify(lanes.columns(token_ids), lanes.state)
        token_ids.copy_(argmax_rows(target.logits(forward.hidden[:, 0]))[:, None])
        target.commit(forward.records, one, lanes.slots, lanes.state)
        lanes.frontier.add_(1)

    return step
