"""The drafting side on a card, at the official geometries: right against FP64 oracles, and how near to the floor.

    python -m bench.proposal_kernels [--output bench/results/proposal_kernels.h200.json] [--quick]

First the errors (`bench/proposal_checks.py`). Then the time of each operator beside its floor and beside the obvious
way to write it in torch (SDPA, torch.topk, the library's products), both captured in graphs, on inputs that rotate.
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

from bench.gpu import card, median_ms, read_tbps, sets, write_results
from bench.proposal_checks import Errors, check
from bench.proposal_models import (
    MODELS,
    PUBLIC,
    Scene,
    attend,
    noise,
    propose_call,
    qkv,
    random_drafter,
    scene,
    shape_of,
)
from kernels import grouped_convolution
from kernels.norms import plain_rms_norm_reference
from kernels.ordering import argmax_rows
from kernels.rotary import apply_rotary, rotary_tables
from kernels.selector import select_path, select_path_reference
from kernels.shortlist import shortlist
from model.drafter import Drafter

Call = Callable[[], Any]


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
    convolution = grouped_convolution
    branches = [(convolution.enter(x, norm), base, projection) for norm, base, projection in copies]
    _, delta = convolution.prepare(*branches[0], eps)
    size = copies[0][2].nbytes + copies[0][1].nbytes // 2 + 3 * x.nbytes + delta.nbytes
    yield Work(
        "conv_prepare",
        batch,
        width,
        0,
        [lambda b=b: convolution.prepare(*b, eps) for b in branches],
        [lambda b=b: convolution.prepare_reference(*b, eps) for b in branches],
        size,
    )
    norm, base = copies[0][:2]
    size = 4 * x.nbytes + delta.nbytes + base.nbytes // 2
    inputs = [(x.clone(), z.clone(), base, delta.clone(), norm) for _ in range(min(sets(size), 64))]
    yield Work(
        "conv_finish",
        batch,
        width,
        0,
        [lambda i=i: convolution.finish(*i) for i in inputs],
        [lambda i=i: convolution.finish_reference(*i) for i in inputs],
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
        tensors += [linear.weight for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
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
