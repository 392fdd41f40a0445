"""One launch of every kernel at the official geometry (27B: H = 5120, 16 q and k heads and 48 v heads of 128, attention
of 24 and 4 heads of 256; drafts of 8 columns; mixtures as in 35B-A3B: H = 2048, 8 of 256 experts of 512), on tensors
without memory: what a launcher would start, without a card to start it on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels import gated_delta_net as gdn
from kernels.acceptance import Proposal, RowSampling, accept_triton
from kernels.block_attention import UNBOUNDED, BlockContext, block_attention_triton
from kernels.context_kv import ContextStores, store_context_kv_triton
from kernels.delta_gates import gates_triton
from kernels.delta_prefill import prefill_triton
from kernels.experts import Experts, run_experts_triton
from kernels.gated_mlp import silu_product_triton
from kernels.grouped_convolution import Residual, enter_triton, finish_triton, prepare_triton
from kernels.head_norm_rotary import head_norm_rotary_triton
from kernels.image_copy import image_gather_triton
from kernels.linear import linear_triton
from kernels.masking import TokenMasks
from kernels.norms import (
    add_offset_rms_norm_triton,
    add_plain_rms_norm_triton,
    gated_rms_norm_triton,
    summed_plain_rms_norm,
)
from kernels.ordering import argmax_rows_triton
from kernels.paged_attention import paged_attention_triton
from kernels.penalties import RowPenalties, adjust_logits_triton
from kernels.place_heads import place_heads_triton
from kernels.race import race_triton
from kernels.randomness import TARGET
from kernels.rotary import rotary_tables_triton
from kernels.router import Routing, route_triton
from kernels.selector import select_path_triton
from kernels.short_convolution import advance_histories_triton, short_convolution_triton
from kernels.shortlist import shortlist_triton

B, W, H, EPS = 8, 8, 5120, 1e-6
PUBLIC, VOCABULARY = 248077, 248320
HEADS, KV_HEADS, D, WINDOW, DRAFT_LAYERS = 32, 8, 128, 2048, 5
TARGET_HEADS, TARGET_KV_HEADS, TARGET_D, CHUNK = 24, 4, 256, 2048
KEY_HEADS, VALUE_HEADS, DELTA_LAYERS, TAPS, SLOTS = 16, 48, 48, 4, 64
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * D

BF16, FP32, INT64 = torch.bfloat16, torch.float32, torch.int64


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def rows() -> torch.Tensor:
    return tensor(B, dtype=INT64)


def delta_net() -> list[Callable[[], object]]:
    gates = tensor(2, DELTA_LAYERS, B, W, VALUE_HEADS, dtype=FP32)
    mixed, columns = tensor(2, DELTA_LAYERS, B, W, CHANNELS)
    states = tensor(SLOTS, DELTA_LAYERS, VALUE_HEADS, D, D, dtype=FP32)
    histories = tensor(SLOTS, DELTA_LAYERS, CHANNELS, TAPS - 1)
    # q | k | v, z, b and a of one projection
    projection = tensor(B, W, CHANNELS + VALUE_HEADS * (D + 2))
    projected, z, b, a = projection.split((CHANNELS, VALUE_HEADS * D, VALUE_HEADS, VALUE_HEADS), dim=-1)
    one_layer = mixed[0], gates[0, 0], gates[1, 0], states[:, 0]
    per_head = tensor(VALUE_HEADS, dtype=FP32)
    out = tensor(B, W, VALUE_HEADS, D)
    return [
        partial(
            short_convolution_triton, projected, histories[:, 0], rows(), tensor(CHANNELS, TAPS), mixed[0], mixed[0]
        ),
        partial(advance_histories_triton, histories, rows(), columns, rows()),
        partial(gates_triton, a, b, per_head, per_head, gates[0, 0], gates[1, 0]),
        partial(gdn.verify_triton, *one_layer, rows(), rows()),
        partial(gdn.fold_triton, gdn.Records(mixed, columns, gates[0], gates[1]), states, rows(), rows()),
        partial(prefill_triton, *one_layer, rows(), rows()),
        partial(gated_rms_norm_triton, out, z.unflatten(-1, (VALUE_HEADS, D)), tensor(D), EPS),
        partial(add_offset_rms_norm_triton, tensor(B, W, H), tensor(B, W, H), tensor(H), EPS),
    ]


def target_attention() -> list[Callable[[], object]]:
    """Verification of eight lanes, of few columns and of many, and one chunk of a prompt."""
    launches: list[Callable[[], object]] = []
    pages = tensor(4096, 64, TARGET_KV_HEADS, TARGET_D)
    norm = tensor(TARGET_D)
    for batch, width in ((B, W), (B, 2 * W), (1, CHUNK)):
        extents = tensor(batch, 512, dtype=INT64), tensor(batch, dtype=INT64), tensor(batch, dtype=INT64)
        projected = tensor(batch, width, 2 * (TARGET_HEADS + TARGET_KV_HEADS) * TARGET_D)
        tables = (tensor(batch, width, TARGET_D // 8, dtype=FP32),) * 2  # a quarter of a head is rotated
        q = tensor(batch, width, TARGET_HEADS, TARGET_D)
        launches += [
            partial(place_heads_triton, projected, norm, norm, *tables, pages, pages, *extents, EPS),
            partial(paged_attention_triton, q, q, pages, pages, *extents, scale=1.0),
        ]
    weights = tensor(B, PUBLIC, dtype=FP32)
    return [*launches, partial(race_triton, weights, rows(), rows(), TARGET, rows())]


def checkpoints() -> list[Callable[[], object]]:
    """A plane of pages: 16 layers of 64 tokens."""
    plane = tensor(4096, 16 * 64 * TARGET_KV_HEADS * TARGET_D)
    return [partial(image_gather_triton, plane, tensor(32, dtype=INT64), plane[:32])]


def draft_attention() -> list[Callable[[], object]]:
    q, kv = tensor(B, W, HEADS, D), tensor(B, W, KV_HEADS, D)
    ring = tensor(SLOTS, WINDOW, KV_HEADS, D), tensor(SLOTS, WINDOW, KV_HEADS, D, dtype=torch.float16)
    pages = tensor(4096, 64, KV_HEADS, D), tensor(4096, 64, KV_HEADS, D, dtype=torch.float16)
    rings = BlockContext(*ring, tensor(B, 1, dtype=INT64), WINDOW)
    table = BlockContext(*pages, tensor(B, 512, dtype=INT64), UNBOUNDED)
    all_rings = tensor(SLOTS, DRAFT_LAYERS, WINDOW, KV_HEADS, D)
    stores = ContextStores(
        (True,) * DRAFT_LAYERS, rows(), tensor(B, 512, dtype=INT64), all_rings, all_rings.half(), None, None
    )
    context = DRAFT_LAYERS * 2 * KV_HEADS * D
    half = tensor(D // 2, dtype=FP32)
    tables = tensor(B, W, D // 2, dtype=FP32)
    return [
        partial(block_attention_triton, q, kv, kv, rings, rows(), rows(), causal=False, scale=1.0),
        partial(block_attention_triton, q, kv, kv, table, rows(), rows(), causal=False, scale=1.0),
        partial(
            store_context_kv_triton,
            *(tensor(B, W, H), tensor(context, H), tensor(DRAFT_LAYERS, D), EPS, half, 1.0, rows(), rows(), stores),
        ),
        partial(rotary_tables_triton, tensor(B, W, dtype=INT64), half, 1.0),
        partial(
            head_norm_rotary_triton,
            *(tensor(B, W, HEADS + 2 * KV_HEADS, D), tensor(D), tensor(D), tables, tables, KV_HEADS, EPS),
        ),
    ]


def draft_block() -> list[Callable[[], object]]:
    x, base = tensor(B, W, H), tensor(2, 2, H)
    scores, choices = tensor(B * W, PUBLIC, dtype=FP32), tensor(B, W, 16, dtype=INT64)
    codebook, unary = tensor(VOCABULARY, 256), tensor(B, W, 16, dtype=FP32)
    heat = tensor(B, dtype=FP32)
    entered = Residual(x, tensor(H), x, tensor(B, W, 5, dtype=FP32))
    return [
        partial(enter_triton, x, tensor(H)),
        partial(prepare_triton, entered, base, tensor(4 * H // 16, H), EPS),
        partial(finish_triton, x, x, base, tensor(B, W, 2, H // 16), tensor(H)),
        partial(summed_plain_rms_norm, tensor(3, B * W, H, dtype=FP32), tensor(H), EPS),
        partial(silu_product_triton, tensor(B, W, 2 * 17408)),
        partial(linear_triton, tensor(B, W, 17408), tensor(H, 17408), BF16),
        partial(add_plain_rms_norm_triton, x, x, tensor(H), EPS),
        partial(argmax_rows_triton, scores),
        partial(shortlist_triton, scores, 16),
        partial(
            select_path_triton,
            *(choices, unary, tensor(B, W, 256), codebook, codebook, rows(), rows(), heat, rows(), rows()),
        ),
    ]


def mixtures() -> list[Callable[[], object]]:
    """The feed-forward of a round of one lane and of a chunk of a prompt, and the norm that adds its parts."""
    width, inner, count, top_k = 2048, 512, 256, 8
    shared = tensor(2 * inner, width), tensor(width, inner)
    experts = Experts(tensor(count, 2 * inner, width), tensor(count, width, inner), *shared)
    launches: list[Callable[[], object]] = [
        partial(route_triton, tensor(W, width), tensor(count, width), tensor(1, width), top_k),
        partial(add_offset_rms_norm_triton, tensor(1, W, width), tensor(1, W, top_k + 1, width), tensor(width), EPS),
    ]
    for columns in (W, CHUNK):
        routing = Routing(tensor(columns, top_k, dtype=torch.int32), tensor(columns, top_k + 1))
        launches.append(partial(run_experts_triton, tensor(columns, width), routing, experts))
    return launches


def acceptance() -> list[Callable[[], object]]:
    """Logits over the public rows, in memory of the whole vocabulary."""
    logits = tensor(B, W, VOCABULARY, dtype=FP32)[..., :PUBLIC]
    drafts, choices = tensor(B, W - 1, dtype=INT64), tensor(B, W - 1, 16, dtype=INT64)
    proposal = Proposal(drafts, choices, tensor(B, W - 1, 16, dtype=FP32))
    heat = tensor(B, dtype=FP32)
    sampling = RowSampling(heat, rows(), heat, rows(), rows(), heat, tensor(B, dtype=torch.bool))
    per_token = tensor(B, PUBLIC, dtype=FP32), tensor(B, PUBLIC, dtype=torch.bool), tensor(B, PUBLIC, dtype=FP32)
    masks = TokenMasks(tensor(4, W, VOCABULARY // 8, dtype=torch.uint8), rows())
    penalties = RowPenalties(heat, heat, heat, *per_token)
    return [
        partial(adjust_logits_triton, logits, drafts, penalties, masks),
        partial(adjust_logits_triton, logits, drafts, penalties, None),
        partial(adjust_logits_triton, logits, drafts, None, masks),
        partial(accept_triton, logits, proposal, rows(), rows(), sampling),
        partial(accept_triton, logits, Proposal(drafts), rows(), rows(), sampling),
        partial(accept_triton, logits, None, rows(), rows(), sampling),
    ]


def official_launches() -> list[Callable[[], object]]:
    return [
        *delta_net(),
        *target_attention(),
        *checkpoints(),
        *draft_attention(),
        *draft_block(),
        *mixtures(),
        *acceptance(),
    ]
