"""The drafting operators are right on a card: against FP64 oracles, at the official geometries.

Random inputs, NaN in every place that nobody may read and in every output before it is written; a graph's replay must
equal the eager run bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench import proposal_oracles as oracle
from bench.gpu import norm_error, replayed
from bench.proposal_models import PUBLIC, Scene, attend, noise, propose_call, qkv, scene, shape_of
from kernels import grouped_convolution
from kernels.ordering import argmax_rows
from kernels.selector import select_path
from kernels.shortlist import shortlist
from model.drafter import Drafter

BATCHES = (1, 3, 8, 32)


@dataclass
class Errors:
    """The largest error of each operator of a model."""

    of: dict[str, float]
    replays_differ: list[str]

    def add(self, op: str, error: float) -> None:
        self.of[op] = max(self.of.get(op, 0.0), error)

    def same(self, op: str, eager: Any, replay: Any) -> None:
        pairs = zip(eager, replay, strict=True) if isinstance(eager, tuple) else ((eager, replay),)
        if not all(torch.equal(a, b) for a, b in pairs):
            self.replays_differ.append(op)


def cloned(out: Any) -> Any:
    return tuple(x.clone() for x in out) if isinstance(out, tuple) else out.clone()


def contexts(window: int) -> tuple[int, ...]:
    return 0, 1, window - 1, window, window + 1, 5 * window


def check(drafter: Drafter, width: int) -> Errors:
    errors, config = Errors({}, []), drafter.config
    window = config.window or 0
    for batch in BATCHES:
        for frontier in contexts(window):
            check_attention(drafter, scene(config, batch, width, frontier, ragged=True), errors, width)
            check_context(drafter, scene(config, batch, width, frontier), errors, width)
            torch.cuda.empty_cache()
        if config.conv_taps is not None:
            check_convolution(drafter, batch, width, errors)
        check_head(drafter, batch, width, errors)
        check_total(drafter, batch, width, errors)
    return errors


def past_of(drafter: Drafter, at: Scene, layer: int, frontier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer's context in logical order, [B, L, Hkv, D] each."""
    keys, values = drafter._stores(at.rows, at.context).planes(layer)
    if drafter.local[layer]:
        window = keys.shape[1]
        spot = torch.arange(max(0, frontier - window), frontier, device="cuda") % window
        slots = at.rows.slots[:, None]
        return keys[slots, spot], values[slots, spot]
    table = at.rows.page_table
    return keys[table].flatten(1, 2)[:, :frontier], values[table].flatten(1, 2)[:, :frontier]


def check_attention(drafter: Drafter, at: Scene, errors: Errors, width: int) -> None:
    block = qkv(drafter, len(at.anchors), width)
    frontier = int(at.frontier[0])
    dead = torch.arange(width, device="cuda") >= at.columns[:, None]
    for local in (True, False):
        if local not in drafter.local:
            continue
        layer, name = drafter.local.index(local), "window_attention" if local else "full_attention"
        window = drafter.config.window if local else None
        for causal in (False, True):
            run = partial(attend, drafter, at, layer, block, causal)
            out = run().clone()
            errors.same(name, out, replayed(run))
            past = past_of(drafter, at, layer, frontier)
            expected = oracle.block_attention(*block, past, frontier, at.columns, window, causal)
            errors.add(name, float("inf") if bool((out[dead] != 0).any()) else norm_error(out, expected))


def check_context(drafter: Drafter, at: Scene, errors: Errors, width: int) -> None:
    config = drafter.config
    batch, (dim, eps) = len(at.anchors), shape_of(drafter)
    heads, window = config.num_kv_heads, config.window or 0
    features = noise(batch, width, drafter.feature.shape[1])
    counts = torch.randint(0, width + 1, (batch,), device="cuda")
    features[torch.arange(width, device="cuda") >= counts[:, None]] = torch.nan
    planes = [x for x in (at.context.ring_keys, at.context.ring_values) if x is not None]
    planes += [x for x in (at.context.page_keys, at.context.page_values) if x is not None]
    before = [plane.clone() for plane in planes]

    def run() -> None:
        drafter.append_context(features, at.frontier, counts, at.rows, at.context)

    run()
    eager = [plane.clone() for plane in planes]
    for plane, old in zip(planes, before, strict=True):
        plane.copy_(old)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    if not all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(planes, eager, strict=True)):
        errors.replays_differ.append("context_kv")
    c = oracle.context_features(features, drafter.feature, drafter.context_norm, eps).to(torch.bfloat16)
    positions = at.frontier[:, None] + torch.arange(width, device="cuda")
    stores = drafter._stores(at.rows, at.context)
    untouched = [torch.ones(plane.shape[:3], dtype=torch.bool, device="cuda") for plane in planes]
    for layer, weights in enumerate(drafter._context_weight.unflatten(0, (config.num_layers, 2, -1))):
        local = drafter.local[layer]
        index = drafter.local[:layer].count(local)
        got: list[torch.Tensor] = []
        want: list[torch.Tensor] = []
        for row in range(batch):
            n = int(counts[row])
            if n == 0:
                continue
            spot = positions[row, :n]
            if local:
                where = (at.rows.slots[row].expand(n), spot % window)
            else:
                where = (at.rows.page_table[row][spot // 64], spot % 64)
            for plane, flag in zip(stores.planes(layer), untouched[0 if local else 2 :][:2], strict=False):
                got.append(plane[where].double().flatten())
                flag[where[0], index, where[1]] = False
            key_norm = drafter._context_key_norms[layer]
            want.append(
                oracle.context_keys(c[row, :n], weights[0], key_norm, eps, spot, drafter.rotary.frequencies).flatten()
            )
            value = (c[row, :n].double() @ weights[1].double().T).unflatten(-1, (heads, dim))
            want.append(value.flatten())
        if got:
            errors.add("context_kv", norm_error(torch.cat(got), torch.cat(want)))
    for plane, old, flag in zip(planes, before, untouched, strict=True):
        if not torch.equal(plane.view(torch.int16)[flag], old.view(torch.int16)[flag]):
            errors.add("context_kv", float("inf"))


def check_convolution(drafter: Drafter, batch: int, width: int, errors: Errors) -> None:
    layer, eps = drafter.layers[0], drafter.config.rms_norm_eps
    convolution = layer.attention_conv
    assert convolution is not None
    x, z = (noise(batch, width, drafter.config.hidden_size) for _ in range(2))

    def prepare() -> tuple[torch.Tensor, torch.Tensor]:
        residual = grouped_convolution.enter(x, layer.input_norm)
        return grouped_convolution.prepare(residual, convolution.base, convolution.projection, eps)

    prepared, delta = cloned(prepare())
    errors.same("conv_prepare", (prepared, delta), replayed(prepare))
    n = oracle.plain_norm(x, layer.input_norm, eps)
    expected = (n @ convolution.projection.double().T).unflatten(-1, (2, convolution.base.shape[1], -1))
    errors.add("conv_prepare", norm_error(prepared, oracle.convolution(n, convolution.base[0], expected[:, :, 0])))
    errors.add("conv_prepare", norm_error(delta, expected[:, :, 1]))

    def finish() -> torch.Tensor:
        return grouped_convolution.finish(x, z, convolution.base, delta, layer.post_norm).x

    out = finish().clone()
    errors.same("conv_finish", out, replayed(finish))
    errors.add("conv_finish", norm_error(out, x.double() + oracle.convolution(z, convolution.base[1], delta)))


def differing(ids: torch.Tensor, scores: torch.Tensor, k: int) -> float:
    """The fraction of ranks whose id is not the oracle's, among those with a margin above 1e-2 on both sides."""
    best, order = scores.topk(k + 1, dim=-1)
    gaps = best[:, :-1] - best[:, 1:]
    clear = gaps > 1e-2
    clear[:, 1:] &= gaps[:, :-1] > 1e-2
    return float(((ids != order[:, :k]) & clear).sum() / clear.sum().clamp(min=1))


def check_head(drafter: Drafter, batch: int, width: int, errors: Errors) -> None:
    config, drafts = drafter.config, width - 1
    hidden = noise(batch * drafts, config.hidden_size)
    expected = oracle.scores(hidden, drafter.head.weight[:PUBLIC])
    if config.selector_top_k is None:

        def best() -> torch.Tensor:
            return argmax_rows(drafter.head.scores(hidden))

        ids = best().clone()
        errors.same("argmax", ids, replayed(best))
        errors.add("argmax", differing(ids[:, None], expected, 1))
        return
    k = config.selector_top_k

    def ranked() -> tuple[torch.Tensor, torch.Tensor]:
        return shortlist(drafter.head.scores(hidden), k)

    unary, ids = cloned(ranked())
    errors.same("shortlist", (unary, ids), replayed(ranked))
    errors.add("shortlist", norm_error(unary, expected.topk(k, dim=-1).values))
    errors.add("shortlist", differing(ids, expected, k))
    tied = torch.randint(0, 40, (3, PUBLIC), device="cuda").float()
    order = tied.double() * PUBLIC - torch.arange(PUBLIC, device="cuda")
    if not torch.equal(shortlist(tied, k)[1], order.topk(k, dim=-1).indices):
        errors.add("shortlist", float("inf"))
    check_selector(drafter, batch, drafts, unary, ids, errors)


def check_selector(
    drafter: Drafter, batch: int, drafts: int, unary: torch.Tensor, ids: torch.Tensor, errors: Errors
) -> None:
    selector, config = drafter.selector, drafter.config
    assert selector is not None and config.selector_rank is not None
    at = scene(config, batch, 1, 1)
    projected = noise(batch, drafts, config.selector_rank)
    candidates, scores = ids.view(batch, drafts, -1), unary.view(batch, drafts, -1)
    for temperature in (0.0, 0.7):
        warmth = torch.full((batch,), temperature, device="cuda")

        def walk(warmth: torch.Tensor = warmth) -> tuple[torch.Tensor, torch.Tensor]:
            return select_path(
                candidates,
                scores,
                projected,
                selector.predecessor,
                selector.successor,
                at.anchors,
                at.frontier,
                warmth,
                at.sampling.seeds,
                at.sampling.sub,
                at.sampling.reproducible,
            )

        path, law = cloned(walk())
        errors.same("selector", (path, law), replayed(walk))
        expected, gap = oracle.walk(
            candidates, scores, projected, selector.predecessor, selector.successor, at.anchors, path, temperature
        )
        if temperature > 0:
            errors.add("selector", norm_error(law, expected))
        else:
            clear = gap > 1e-2
            wrong = (law.argmax(-1) != expected.argmax(-1)) & clear
            errors.add("selector", float(wrong.sum() / clear.sum().clamp(min=1)))


def check_total(drafter: Drafter, batch: int, width: int, errors: Errors) -> None:
    """The mask hidden of a whole block. Their context is what lies in the stores, and 100 tokens are enough."""
    config = drafter.config
    (_, eps), frontier = shape_of(drafter), 100
    at = scene(config, batch, width, frontier, ragged=True)

    def block() -> torch.Tensor:
        return drafter._block(at.anchors, at.frontier, at.columns, width, at.rows, at.context)

    hidden = block().clone()
    errors.same("propose_total", hidden, replayed(block))
    propose = propose_call(drafter, at, width)
    proposal = propose()
    errors.same("propose_total", proposal.drafts.clone(), replayed(lambda: propose().drafts))
    ids = torch.full((batch, width), config.mask_token_id, device="cuda")
    ids[:, 0] = at.anchors
    x = drafter.embedding[ids].double()
    positions = at.frontier[:, None] + torch.arange(width, device="cuda")
    for index, layer in enumerate(drafter.layers):
        n = oracle.plain_norm(x, layer.input_norm, eps)
        n, delta = oracle_prepare(n, layer.attention_conv)
        heads = (n @ layer.qkv.weight.double().T).unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=-2)
        q = oracle.rotate(oracle.plain_norm(q, layer.q_norm, eps), positions, drafter.rotary.frequencies)
        k = oracle.rotate(oracle.plain_norm(k, layer.k_norm, eps), positions, drafter.rotary.frequencies)
        past, window = past_of(drafter, at, index, frontier), config.window if drafter.local[index] else None
        a = oracle.block_attention(q, k, v, past, frontier, at.columns, window, False)
        x = x + oracle_finish(a.flatten(-2) @ layer.output.weight.double().T, layer.attention_conv, delta)
        m, delta = oracle_prepare(oracle.plain_norm(x, layer.post_norm, eps), layer.mlp_conv)
        gate, up = (m @ layer.gate_up.weight.double().T).chunk(2, dim=-1)
        x = x + oracle_finish(oracle.silu_product(gate, up) @ layer.down.weight.double().T, layer.mlp_conv, delta)
    live = torch.arange(width, device="cuda") < at.columns[:, None]
    errors.add("propose_total", norm_error(hidden[live], oracle.plain_norm(x, drafter.final_norm, eps)[live]))


def oracle_prepare(n: torch.Tensor, convolution: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    if convolution is None:
        return n, None
    delta = (n @ convolution.projection.double().T).unflatten(-1, (2, convolution.base.shape[1], -1))
    return oracle.convolution(n, convolution.base[0], delta[:, :, 0]), delta[:, :, 1]


def oracle_finish(z: torch.Tensor, convolution: Any, delta: torch.Tensor | None) -> torch.Tensor:
    return z if delta is None else oracle.convolution(z, convolution.base[1], delta)
