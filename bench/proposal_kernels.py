"""The drafting side on a card, at the official geometries: right against FP64 oracles, and how near to the floor.

    python -m bench.proposal_kernels [--output bench/results/proposal_kernels.h200.json] [--quick]

First the errors: random inputs, NaN in every place that nobody may read and in every output before it is written, graph
replay bit for bit like the eager run. Then the time of each operator beside its floor and beside the obvious way to
write it in torch (SDPA, torch.topk, the library's products), both captured in graphs, both on inputs that rotate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench import proposal_oracles as oracle
from bench.gpu import card, median_ms, norm_error, read_tbps, replayed, sets, write_results
from bench.proposal_models import MODELS, PUBLIC, Scene, noise, random_drafter, scene
from kernels import grouped_convolution
from kernels.block_attention import full_block_attention, local_block_attention
from kernels.norms import plain_rms_norm_reference
from kernels.ordering import argmax_rows
from kernels.rotary import apply_rotary, rotary_tables
from kernels.selector import select_path, select_path_reference
from kernels.shortlist import shortlist
from model.drafter import Drafter

BATCHES = (1, 3, 8, 32)
Call = Callable[[], Any]
Block = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v of a block."""


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


def qkv(drafter: Drafter, batch: int, width: int) -> Block:
    c = drafter.config
    both = (c.num_kv_heads, c.head_dim)
    return noise(batch, width, c.num_heads, c.head_dim), noise(batch, width, *both), noise(batch, width, *both)


def shape_of(drafter: Drafter) -> tuple[int, float]:
    return drafter.config.head_dim, drafter.config.rms_norm_eps


# ------------------------------------------------------------------------------------------------ correctness


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


def attend(drafter: Drafter, at: Scene, layer: int, block: Block, causal: bool) -> torch.Tensor:
    keys, values = drafter._stores(at.rows, at.context).planes(layer)
    scale = drafter.config.head_dim**-0.5
    if drafter.local[layer]:
        return local_block_attention(*block, keys, values, at.rows.slots, at.frontier, at.columns, causal, scale)
    return full_block_attention(*block, keys, values, at.rows.page_table, at.frontier, at.columns, causal, scale)


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
        return grouped_convolution.prepare(x, layer.input_norm, convolution.base, convolution.projection, eps)

    prepared, delta = cloned(prepare())
    errors.same("conv_prepare", (prepared, delta), replayed(prepare))
    n = oracle.plain_norm(x, layer.input_norm, eps)
    expected = (n @ convolution.projection.double().T).unflatten(-1, (2, convolution.base.shape[1], -1))
    errors.add("conv_prepare", norm_error(prepared, oracle.convolution(n, convolution.base[0], expected[:, :, 0])))
    errors.add("conv_prepare", norm_error(delta, expected[:, :, 1]))

    def finish() -> torch.Tensor:
        return grouped_convolution.finish(x, z, convolution.base, delta)

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
        heads = (n @ layer.qkv.double().T).unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=-2)
        q = oracle.rotate(oracle.plain_norm(q, layer.q_norm, eps), positions, drafter.rotary.frequencies)
        k = oracle.rotate(oracle.plain_norm(k, layer.k_norm, eps), positions, drafter.rotary.frequencies)
        past, window = past_of(drafter, at, index, frontier), config.window if drafter.local[index] else None
        a = oracle.block_attention(q, k, v, past, frontier, at.columns, window, False)
        x = x + oracle_finish(a.flatten(-2) @ layer.output.double().T, layer.attention_conv, delta)
        m, delta = oracle_prepare(oracle.plain_norm(x, layer.post_norm, eps), layer.mlp_conv)
        gate, up = (m @ layer.gate_up.double().T).chunk(2, dim=-1)
        x = x + oracle_finish(oracle.silu_product(gate, up) @ layer.down.double().T, layer.mlp_conv, delta)
    live = torch.arange(width, device="cuda") < at.columns[:, None]
    errors.add("propose_total", norm_error(hidden[live], oracle.plain_norm(x, drafter.final_norm, eps)[live]))


def oracle_prepare(n: torch.Tensor, convolution: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    if convolution is None:
        return n, None
    delta = (n @ convolution.projection.double().T).unflatten(-1, (2, convolution.base.shape[1], -1))
    return oracle.convolution(n, convolution.base[0], delta[:, :, 0]), delta[:, :, 1]


def oracle_finish(z: torch.Tensor, convolution: Any, delta: torch.Tensor | None) -> torch.Tensor:
    return z if delta is None else oracle.convolution(z, convolution.base[1], delta)


# ------------------------------------------------------------------------------------------------ time


@dataclass(frozen=True)
class Work:
    """One operator at one size: calls on rotating inputs, the obvious torch calls, and the bytes that must move."""

    op: str
    batch: int
    width: int
    context: int
    calls: list[Call]
    torch_calls: list[Call]
    size: int


def propose_call(drafter: Drafter, at: Scene, width: int) -> Call:
    return lambda: drafter.propose(at.anchors, at.frontier, at.columns, width, at.rows, at.context, at.sampling)


def works(drafter: Drafter, batch: int, width: int, frontier: int) -> Iterator[Work]:
    yield context_work(drafter, batch, width, frontier)
    yield from attention_works(drafter, batch, width, frontier)
    if drafter.config.conv_taps is not None:
        yield from convolution_works(drafter, batch, width)
    yield from head_works(drafter, batch, width)
    yield total_work(drafter, batch, width, frontier)


def context_work(drafter: Drafter, batch: int, width: int, frontier: int) -> Work:
    config, (dim, eps) = drafter.config, shape_of(drafter)
    at = scene(config, batch, width, frontier)
    features = noise(batch, width, drafter.feature.shape[1])
    counts = torch.full((batch,), width, device="cuda")
    stores = drafter._stores(at.rows, at.context)
    positions = at.frontier[:, None] + torch.arange(width, device="cuda")
    weights = drafter._context_weight.unflatten(0, (config.num_layers, 2, -1))

    def obvious() -> None:
        c = plain_rms_norm_reference(F.linear(features, drafter.feature), drafter.context_norm, eps)
        cos, sin = rotary_tables(positions, drafter.rotary.frequencies, drafter.rotary.factor)
        for layer, (key_weight, value_weight) in enumerate(weights):
            raw = F.linear(c, key_weight).unflatten(-1, (-1, dim))
            k = apply_rotary(plain_rms_norm_reference(raw, drafter._context_key_norms[layer], eps), cos, sin)
            v = F.linear(c, value_weight).unflatten(-1, (-1, dim))
            keys, values = stores.planes(layer)
            if drafter.local[layer]:
                where = (at.rows.slots[:, None], positions % keys.shape[1])
            else:
                where = (at.rows.page_table.gather(1, positions // 64), positions % 64)
            keys[where] = k.to(keys.dtype)
            values[where] = v.to(values.dtype)

    moved = drafter.feature.nbytes + drafter._context_weight.nbytes + features.nbytes
    moved += batch * width * config.num_layers * 2 * 2 * config.num_kv_heads * dim
    return Work(
        "context_kv",
        batch,
        width,
        frontier,
        [lambda: drafter.append_context(features, at.frontier, counts, at.rows, at.context)],
        [obvious],
        moved,
    )


def attention_works(drafter: Drafter, batch: int, width: int, frontier: int) -> Iterator[Work]:
    for local in (True, False):
        if local in drafter.local:
            yield attention_work(drafter, batch, width, frontier, local)


def attention_work(drafter: Drafter, batch: int, width: int, frontier: int, local: bool) -> Work:
    config, dim, window = drafter.config, drafter.config.head_dim, drafter.config.window or 0
    scale, layer = dim**-0.5, drafter.local.index(local)
    rows = min(frontier, window - 1) if local else frontier
    moved = batch * rows * config.num_kv_heads * dim * 4
    moved += batch * width * dim * 2 * (2 * config.num_heads + 2 * config.num_kv_heads)
    scenes = [scene(config, batch, width, frontier) for _ in range(min(sets(moved), 12))]
    q, k, v = qkv(drafter, batch, width)
    past = torch.arange(frontier - rows, frontier, device="cuda")
    block = torch.arange(frontier, frontier + width, device="cuda")
    distance = torch.cat((past, block)) - block[:, None]
    visible = distance.abs() < (window if local else frontier + width)

    def sdpa(at: Scene) -> torch.Tensor:
        planes = drafter._stores(at.rows, at.context).planes(layer)
        if local:
            old = [plane[at.rows.slots[:, None], past % window] for plane in planes]
        else:
            old = [plane[at.rows.page_table].flatten(1, 2)[:, :frontier] for plane in planes]
        both = [torch.cat((x.to(q.dtype), new), 1) for x, new in zip(old, (k, v), strict=True)]
        heads = [x.transpose(1, 2) for x in (q, *both)]
        return F.scaled_dot_product_attention(*heads, attn_mask=visible, scale=scale, enable_gqa=True)

    return Work(
        "window_attention" if local else "full_attention",
        batch,
        width,
        frontier,
        [partial(attend, drafter, at, layer, (q, k, v), False) for at in scenes],
        [partial(sdpa, at) for at in scenes],
        moved,
    )


def convolution_works(drafter: Drafter, batch: int, width: int) -> Iterator[Work]:
    eps, h = drafter.config.rms_norm_eps, drafter.config.hidden_size
    pairs = [(layer.input_norm, layer.attention_conv) for layer in drafter.layers]
    pairs += [(layer.post_norm, layer.mlp_conv) for layer in drafter.layers]
    copies = [(norm, conv.base, conv.projection) for norm, conv in pairs if conv is not None]
    copies += [(norm.clone(), base.clone(), projection.clone()) for norm, base, projection in copies]
    x, z = noise(batch, width, h), noise(batch, width, h)
    prepare = grouped_convolution.prepare
    plain = grouped_convolution.prepare_reference
    _, delta = prepare(x, *copies[0], eps)
    size = copies[0][2].nbytes + copies[0][1].nbytes // 2 + 2 * x.nbytes + delta.nbytes
    yield Work(
        "conv_prepare",
        batch,
        width,
        0,
        [lambda c=c: prepare(x, *c, eps) for c in copies],
        [lambda c=c: plain(x, *c, eps) for c in copies],
        size,
    )
    base = copies[0][1]
    size = 3 * x.nbytes + delta.nbytes + base.nbytes // 2
    inputs = [(x.clone(), z.clone(), base, delta.clone()) for _ in range(min(sets(size), 64))]
    yield Work(
        "conv_finish",
        batch,
        width,
        0,
        [lambda i=i: grouped_convolution.finish(*i) for i in inputs],
        [lambda i=i: grouped_convolution.finish_reference(*i) for i in inputs],
        size,
    )


def head_works(drafter: Drafter, batch: int, width: int) -> Iterator[Work]:
    config, drafts = drafter.config, width - 1
    hidden = noise(batch * drafts, config.hidden_size)
    weight = drafter.head.weight
    size = weight[:PUBLIC].nbytes + hidden.nbytes
    if config.selector_top_k is None:
        yield Work(
            "argmax",
            batch,
            width,
            0,
            [lambda: argmax_rows(drafter.head.scores(hidden))],
            [lambda: F.linear(hidden, weight)[:, :PUBLIC].float().argmax(-1)],
            size,
        )
        return
    k, selector = config.selector_top_k, drafter.selector
    assert selector is not None and config.selector_rank is not None
    yield Work(
        "shortlist",
        batch,
        width,
        0,
        [lambda: shortlist(drafter.head.scores(hidden), k)],
        [lambda: F.linear(hidden, weight)[:, :PUBLIC].float().topk(k, dim=-1)],
        size,
    )
    unary, ids = shortlist(drafter.head.scores(hidden), k)
    at = scene(config, batch, width, 1)
    projected = noise(batch, drafts, config.selector_rank)
    sampling = at.sampling
    arguments = (
        ids.view(batch, drafts, k),
        unary.view(batch, drafts, k),
        projected,
        selector.predecessor,
        selector.successor,
        at.anchors,
        at.frontier,
        sampling.temperature,
        sampling.seeds,
        sampling.sub,
    )
    yield Work(
        "selector",
        batch,
        width,
        0,
        [lambda: select_path(*arguments, sampling.reproducible)],
        [lambda: select_path_reference(*arguments)],
        batch * drafts * (2 * k + 2) * config.selector_rank * 2,
    )


def total_work(drafter: Drafter, batch: int, width: int, frontier: int) -> Work:
    """Append and propose. The floor reads the drafter's and the head's weights once."""
    config = drafter.config
    at = scene(config, batch, width, frontier)
    features = noise(batch, width, drafter.feature.shape[1])
    counts = torch.full((batch,), width, device="cuda")
    propose = propose_call(drafter, at, width)

    def both() -> None:
        drafter.append_context(features, at.frontier - width, counts, at.rows, at.context)
        propose()

    tensors = [drafter.feature, drafter.head.weight[:PUBLIC]]
    for layer in drafter.layers:
        tensors += [layer.qkv, layer.output, layer.gate_up, layer.down]
        tensors += [conv.projection for conv in (layer.attention_conv, layer.mlp_conv) if conv is not None]
    weights = sum(tensor.nbytes for tensor in tensors)
    return Work("propose_total", batch, width, frontier, [both], [], weights)


def measure(name: str, drafter: Drafter, work: Work, errors: Errors, tbps: float) -> dict[str, Any]:
    row = {
        "op": work.op,
        "model": name,
        "B": work.batch,
        "W": work.width,
        "context": work.context,
        "ms": round(median_ms(work.calls), 5),
        "floor_ms": round(work.size / tbps / 1e9, 5),
        "torch_ms": round(median_ms(work.torch_calls), 5) if work.torch_calls else None,
        "max_error": errors.of.get(work.op),
    }
    ratio = row["ms"] / row["floor_ms"]
    plain = f"{row['torch_ms'] * 1e3:9.1f}" if row["torch_ms"] else "        -"
    print(
        f"{name:15s} {work.op:17s} B{work.batch:<3d} W{work.width:<3d} F{work.context:<6d}"
        f"{row['ms'] * 1e3:9.1f} us {row['floor_ms'] * 1e3:9.1f} {plain}   x{ratio:5.2f} "
        f"+{(row['ms'] - row['floor_ms']) * 1e3:6.1f}  error {row['max_error']}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quick", action="store_true", help="no correctness, B = 1 and 8 only")
    args = parser.parse_args()
    torch.manual_seed(0)
    tbps = read_tbps()
    print(f"{card()}; pure read {tbps:.2f} TB/s")
    print("model           operator          B    W    context      ours      floor     torch   over the floor")
    rows: list[dict[str, Any]] = []
    for name, config in MODELS.items():
        drafter = random_drafter(config)
        with torch.no_grad():
            errors = Errors({}, []) if args.quick else check(drafter, 8)
            if errors.replays_differ:
                print(f"{name}: a replay differs from the eager run: {sorted(set(errors.replays_differ))}")
            for batch in (1, 8) if args.quick else (1, 8, 32):
                for width in sorted({8, config.block_size}):
                    for work in works(drafter, batch, width, 4096):
                        rows.append(measure(name, drafter, work, errors, tbps))
                        del work
                    torch.cuda.empty_cache()
        if args.output:
            write_results(args.output, {**card(), "read_tbps": round(tbps, 3)}, rows)
        del drafter
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
