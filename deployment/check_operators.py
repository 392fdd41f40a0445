"""What runs each operator of a geometry on a card, as those say it who pick it.

A product says it by its number of rows: cuBLAS, or our kernel that streams the weight. Every other operator has our
Triton kernel if its file has one, and torch elsewhere; what a kernel would refuse, as its launcher does, is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from itertools import groupby
from types import ModuleType

import torch

from kernels import (
    acceptance,
    block_attention,
    context_kv,
    delta_gates,
    delta_prefill,
    experts,
    gated_delta_net,
    gated_mlp,
    grouped_convolution,
    head_norm_rotary,
    norms,
    ordering,
    paged_attention,
    penalties,
    place_heads,
    router,
    selector,
    short_convolution,
)
from kernels.head import head_product
from kernels.launch_checks import require_head_dim
from kernels.linear import Linear
from kernels.shortlist import has_kernel
from model.config import DraftConfig, TargetConfig
from model.drafter import Drafter
from model.heads import ProposalHead
from model.target import Target

Rows = list[tuple[str, str]]

MOST_ROWS = 1024
"""Of a round: 64 lanes of 16 columns. Prefill has more, and what runs so many."""


class AnyWeights:
    """A source of tensors that has all of them, and no numbers: for models on the meta device."""

    def __contains__(self, name: str) -> bool:
        return True

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        pass

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        pass


def operator_rows(config: TargetConfig, draft: DraftConfig | None, public_rows: int, dtype: torch.dtype) -> Rows:
    """(operator, what runs it) of a target, its drafter if there is one, and sampling."""
    target = Target.load(AnyWeights(), config, public_rows, torch.device("meta"), dtype)
    rows = [*_target_rows(target), ("head", _scores(target.head, public_rows))]
    if draft is not None:
        causal = (False,) * draft.num_layers
        drafter = Drafter.load(AnyWeights(), draft, causal, target.embedding, ProposalHead.full(target))
        rows += _drafter_rows(drafter)
    names = (acceptance, "accept", "acceptance"), (penalties, "adjust_logits", "penalties and masks")
    return [*rows, *((name, _form(module, operator)) for module, operator, name in names)]


def _target_rows(target: Target) -> Iterator[tuple[str, str]]:
    config = target.config
    kinds = (
        ("full attention", config.full_layers, _full_attention),
        ("gated delta net", config.gdn_layers, _delta_net),
    )
    for name, layers, rest in kinds:
        if layers:
            yield from _products(name, target.blocks[layers[0]].mixer)
            yield from rest(config)
    yield "block norms", _form(norms, "add_offset_rms_norm")
    if config.moe is not None:
        yield "feed-forward: router", _form(router, "route")
        yield "feed-forward: experts, routed and shared", _form(experts, "run_experts")
        return
    yield from _products("feed-forward", target.blocks[0].mlp)
    yield "feed-forward: SiLU", _form(gated_mlp, "silu_product")


def _full_attention(config: TargetConfig) -> Rows:
    dims = (config.head_dim,)
    return [
        ("full attention: norms, rotary, pages", _form(place_heads, "place_heads", *dims)),
        ("full attention: attention, gate", _form(paged_attention, "paged_attention", *dims)),
    ]


def _delta_net(config: TargetConfig) -> Rows:
    dims = config.gdn_key_dim, config.gdn_value_dim
    return [
        ("gated delta net: convolution", _form(short_convolution, "short_convolution")),
        ("gated delta net: gates", _form(delta_gates, "gates")),
        ("gated delta net: verification", _form(gated_delta_net, "verify", *dims)),
        ("gated delta net: Fold", _form(gated_delta_net, "fold", *dims)),
        ("gated delta net: prefill", _form(delta_prefill, "prefill", *dims)),
        ("gated delta net: gated norm", _form(norms, "gated_rms_norm")),
    ]


def _drafter_rows(drafter: Drafter) -> Iterator[tuple[str, str]]:
    config = drafter.config
    yield "drafter: features", _by_rows(Linear(drafter.feature).product)
    yield "drafter: context K/V", _form(context_kv, "store_context_kv", config.head_dim)
    yield from _products("drafter", drafter.layers[0])
    yield "drafter: head norms, rotary", _form(head_norm_rotary, "head_norm_rotary", config.head_dim)
    yield "drafter: attention", _form(block_attention, "block_attention", config.head_dim)
    yield "drafter: SiLU", _form(gated_mlp, "silu_product")
    if config.conv_taps is None:
        yield "drafter: norms", _form(norms, "add_plain_rms_norm")
    else:
        yield "drafter: convolution, norms", _form(grouped_convolution, "prepare")
    yield "drafter: head", _scores(drafter.head.weight, drafter.head.rows)
    if config.selector_top_k is None:
        yield "drafter: argmax", _form(ordering, "argmax_rows")
    else:
        yield "drafter: shortlist", "triton" if has_kernel(config.selector_top_k) else "torch"
        yield "drafter: selector", _form(selector, "select_path")


def _products(name: str, part: object) -> Iterator[tuple[str, str]]:
    """Every matrix that a part of a model is applied with, by the name of its field."""
    if not is_dataclass(part):
        return
    for field in fields(part):
        value = getattr(part, field.name)
        label = f"{name}: {field.name.replace('_', ' ')}"
        if isinstance(value, Linear):
            n, depth = value.shape
            yield f"{label} [{n} x {depth}]", _by_rows(value.product)
        else:
            yield from _products(label, value)


def _scores(weight: torch.Tensor, rows: int) -> str:
    return _by_rows(lambda count, card: head_product(count, rows, weight, card)[1])


def _by_rows(product: Callable[[int, bool], str]) -> str:
    """As in "streaming up to 64 rows, cuBLAS above"."""
    picked = [product(rows, True) for rows in range(1, MOST_ROWS + 1)]
    spans = [(kind, len(list(same))) for kind, same in groupby(picked)]
    last, end, text = spans[-1][0], 0, ""
    for kind, count in spans[:-1]:
        end += count
        text += f"{kind} up to {end} rows, "
    return f"{text}{last} above" if text else last


def _form(module: ModuleType, operator: str, *head_dims: int) -> str:
    """The rule of `kernels/`: the public function launches `operator_triton` of its file for tensors on a card."""
    if not hasattr(module, f"{operator}_triton"):
        return "torch"
    try:
        for size in head_dims:
            require_head_dim("head", size)
    except ValueError as error:
        return f"refused: {error}"
    return "triton"
