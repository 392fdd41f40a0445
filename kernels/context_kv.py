"""Context K/V of the drafter: where committed positions leave their target features, for every draft layer.

    c_t = plain_rmsnorm(W_feature s_t, context_norm)                      once, common to all layers
    K_t = rope_1d(plain_head_rmsnorm(W_key c_t, key_norm), t)             per layer; no cast before the head norm
    V_t = W_value c_t                                                     per layer

Local layers store into rings (position p in slot p mod S), full layers into pages of 64. K is rounded to the store's
key dtype; V first to the model's dtype, then to the store's value dtype (BF16, then FP16 RNE, in the official formats).
A row's chunk may be longer than a ring: only its last S columns are stored, and no column at or beyond counts[b].

On a card the features' product is summed where it is normalised, if it comes in parts of its depth. K and V rows of all
layers are one matrix, since one layer's are too few to stream well, and its FP32 product goes to
the stores in one launch: a program takes one column of one layer.

Source: specification (conditioning, context K/V, prefill longer than the ring); decision 8.
"""

# A launch takes num_warps and num_stages beside the kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.launch_checks import require_contiguous, require_head_dim
from kernels.linear import linear, streamed_parts, streaming, streams
from kernels.norms import plain_rms_norm, summed_plain_rms_norm
from kernels.overlap import let_next_start, overlaps, wait_for_earlier
from kernels.paged_attention import write_pages
from kernels.ring import write_ring
from kernels.rotary import apply_rotary, rotary_tables_reference, turn

MOST_LAYERS = 31
"""Which layers are local travels as the bits of one 32-bit number."""


@dataclass(frozen=True)
class ContextStores:
    """Where B rows keep K and V of all draft layers. Layer l lies in rings if `local[l]`, else in pages.

    Rings `ring_keys`, `ring_values` [slots, local layers, S, Hkv, D] and `slots` int64 [B]; pages `page_keys`,
    `page_values` [pages, full layers, 64, Hkv, D], None for a drafter without full layers, and `page_table` int64
    [B, M]. Layers of one kind are numbered in their order.
    """

    local: tuple[bool, ...]
    slots: torch.Tensor
    page_table: torch.Tensor
    ring_keys: torch.Tensor
    ring_values: torch.Tensor
    page_keys: torch.Tensor | None
    page_values: torch.Tensor | None

    def planes(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer: [slots, S, Hkv, D] or [pages, 64, Hkv, D]."""
        keys, values = (self.ring_keys, self.ring_values) if self.local[layer] else (self.page_keys, self.page_values)
        if keys is None or values is None:
            raise ValueError(f"page_keys: None, but layer {layer} is a full layer and keeps its context in pages")
        index = self.local[:layer].count(self.local[layer])
        return keys[:, index], values[:, index]


def context_features(
    features: torch.Tensor, feature_weight: torch.Tensor, norm: torch.Tensor, eps: float
) -> torch.Tensor:
    """`features` [B, T, n H] (taps concatenated in recorded order), `feature_weight` [H, n H] -> c [B, T, H]."""
    rows = features.shape[:-1].numel()
    if features.is_cuda and rows and streams(rows, features.dtype):
        tiling = streaming(rows, feature_weight.shape[0], features.dtype)
        parts = streamed_parts(features.reshape(rows, -1).contiguous(), feature_weight, tiling)
        return summed_plain_rms_norm(parts, norm, eps).view(*features.shape[:-1], -1)
    return plain_rms_norm(linear(features, feature_weight), norm, eps)


def context_keys_values(
    c: torch.Tensor,
    key_weight: torch.Tensor,
    value_weight: torch.Tensor,
    key_norm: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer: `c` [B, T, H], weights [Hkv D, H], `key_norm` [D], rotary tables of the positions [B, T, D/2] ->
    K FP32 [B, T, Hkv, D] and V in c's dtype [B, T, Hkv, D]."""
    head_dim = key_norm.shape[0]
    raw = F.linear(c.float(), key_weight.float()).unflatten(-1, (-1, head_dim))
    keys = apply_rotary(plain_rms_norm(raw, key_norm.float(), eps), cos, sin)
    values = F.linear(c, value_weight).unflatten(-1, (-1, head_dim))
    return keys, values


def store_context_kv(
    c: torch.Tensor,
    weight: torch.Tensor,
    key_norms: torch.Tensor,
    eps: float,
    frequencies: torch.Tensor,
    factor: float,
    start: torch.Tensor,
    counts: torch.Tensor,
    stores: ContextStores,
) -> None:
    """Projects the first counts[b] of `c` [B, T, H], at positions start[b] + i, into the stores of all L layers.

    `weight` [L * 2 * Hkv * D, H]: by layer, K rows before V rows. `key_norms` [L, D]; FP32 `frequencies` [D/2] and
    `factor` of the full-head rotary; `start`, `counts` int64 [B]. Without full layers a caller may leave out columns
    before the last S of all rows, and move `start` and `counts` by as many. Raises ValueError naming a tensor that does
    not fit.
    """
    store = store_context_kv_triton if c.is_cuda else store_context_kv_reference
    store(c, weight, key_norms, eps, frequencies, factor, start, counts, stores)


def store_context_kv_reference(
    c: torch.Tensor,
    weight: torch.Tensor,
    key_norms: torch.Tensor,
    eps: float,
    frequencies: torch.Tensor,
    factor: float,
    start: torch.Tensor,
    counts: torch.Tensor,
    stores: ContextStores,
) -> None:
    positions = start[:, None] + torch.arange(c.shape[1], device=c.device)
    cos, sin = rotary_tables_reference(positions, frequencies, factor)
    for layer, (key_weight, value_weight) in enumerate(weight.unflatten(0, (len(stores.local), 2, -1))):
        k, v = context_keys_values(c, key_weight, value_weight, key_norms[layer], eps, cos, sin)
        for plane, entries in zip(stores.planes(layer), (k, v), strict=True):
            if stores.local[layer]:
                write_ring(plane, entries, stores.slots, start, counts)
            else:
                write_pages(plane, entries, stores.page_table, start, counts)


@triton.jit
def _store_entry(keys_ptr, values_ptr, at, first, second, values, head, dim, present, HALF: tl.constexpr):
    """Rounds one position's K, in halves [Hkv, D/2], and V [Hkv, D] into planes at element `at`."""
    row = at + head[:, None] * (2 * HALF)
    half = tl.arange(0, HALF)
    key_type = keys_ptr.dtype.element_ty
    tl.store(keys_ptr + row + half[None, :], first.to(key_type), mask=present)
    tl.store(keys_ptr + row + HALF + half[None, :], second.to(key_type), mask=present)
    tl.store(values_ptr + row + dim[None, :], values.to(values_ptr.dtype.element_ty), mask=present)


@triton.jit
def _store_layers(
    raw_ptr,
    norms_ptr,
    frequencies_ptr,
    start_ptr,
    counts_ptr,
    slots_ptr,
    table_ptr,
    ring_keys_ptr,
    ring_values_ptr,
    page_keys_ptr,
    page_values_ptr,
    columns,
    table_width,
    eps,
    factor,
    MODEL_TYPE: tl.constexpr,
    LAYERS: tl.constexpr,
    LOCAL: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (column of a row, layer), layers fastest. `raw` FP32 [B, T, L, 2, Hkv, D]; bit l of LOCAL: l is local."""
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    layer, token = tl.program_id(0) % LAYERS, tl.program_id(0) // LAYERS
    batch, column = token // columns, token % columns
    count, slot = tl.load(counts_ptr + batch), tl.load(slots_ptr + batch)
    position = tl.load(start_ptr + batch) + column

    # Asked for before it is known whether the column counts: its product is there in any case.
    head, half, dim = tl.arange(0, HEADS_PADDED), tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    present = (head < HEADS)[:, None]
    at_raw = raw_ptr + (token.to(tl.int64) * LAYERS + layer) * (2 * HEADS * 2 * HALF)
    row = at_raw + head[:, None] * (2 * HALF)
    first = tl.load(row + half[None, :], mask=present, other=0.0)
    second = tl.load(row + HALF + half[None, :], mask=present, other=0.0)
    values = tl.load(row + HEADS * 2 * HALF + dim[None, :], mask=present, other=0.0)
    is_local = (LOCAL >> layer) & 1
    if (column >= count) | ((is_local == 1) & (column < count - WINDOW)):
        return

    values = values.to(MODEL_TYPE)
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    norm = norms_ptr + layer * (2 * HALF) + half
    first = tl.load(norm).to(tl.float32)[None, :] * (first * scale)
    second = tl.load(norm + HALF).to(tl.float32)[None, :] * (second * scale)
    cos, sin = turn(position, tl.load(frequencies_ptr + half), factor)
    turned_first = first * cos[None, :] - second * sin[None, :]
    turned_second = second * cos[None, :] + first * sin[None, :]

    rings = 0
    ring = 0
    for other in tl.static_range(LAYERS):  # pyright: ignore[reportGeneralTypeIssues]
        rings += (LOCAL >> other) & 1
        ring += tl.where(other < layer, (LOCAL >> other) & 1, 0)
    if is_local == 1:
        at = ((slot * rings + ring) * WINDOW + position % WINDOW) * (HEADS * 2 * HALF)
        _store_entry(ring_keys_ptr, ring_values_ptr, at, turned_first, turned_second, values, head, dim, present, HALF)
    else:
        page = tl.load(table_ptr + batch * table_width + position // PAGE_TOKENS)
        at = (page * (LAYERS - rings) + layer - ring) * PAGE_TOKENS + position % PAGE_TOKENS
        at = at * (HEADS * 2 * HALF)
        _store_entry(page_keys_ptr, page_values_ptr, at, turned_first, turned_second, values, head, dim, present, HALF)


def store_context_kv_triton(
    c: torch.Tensor,
    weight: torch.Tensor,
    key_norms: torch.Tensor,
    eps: float,
    frequencies: torch.Tensor,
    factor: float,
    start: torch.Tensor,
    counts: torch.Tensor,
    stores: ContextStores,
) -> None:
    _check(c, weight, key_norms, frequencies, start, counts, stores)
    batch, columns, _ = c.shape
    layers, (heads, head_dim) = len(stores.local), stores.planes(0)[0].shape[-2:]
    # A drafter without one kind of layer never follows the other kind's pointers.
    page_keys = stores.ring_keys if stores.page_keys is None else stores.page_keys
    page_values = stores.ring_values if stores.page_values is None else stores.page_values
    _store_layers[(batch * columns * layers,)](
        linear(c.reshape(-1, c.shape[-1]), weight, torch.float32),
        key_norms,
        frequencies,
        start,
        counts,
        stores.slots,
        stores.page_table,
        stores.ring_keys,
        stores.ring_values,
        page_keys,
        page_values,
        columns,
        stores.page_table.shape[1],
        eps,
        factor,
        MODEL_TYPE=tl.bfloat16 if c.dtype == torch.bfloat16 else tl.float32,
        LAYERS=layers,
        LOCAL=sum(is_local << layer for layer, is_local in enumerate(stores.local)),
        HEADS=heads,
        HEADS_PADDED=triton.next_power_of_2(heads),
        HALF=head_dim // 2,
        WINDOW=max(stores.ring_keys.shape[2], 1),
        PAGE_TOKENS=page_keys.shape[2],
        OVERLAPS=overlaps(c),
        num_warps=4,
        launch_pdl=overlaps(c),
    )


def _check(
    c: torch.Tensor,
    weight: torch.Tensor,
    key_norms: torch.Tensor,
    frequencies: torch.Tensor,
    start: torch.Tensor,
    counts: torch.Tensor,
    stores: ContextStores,
) -> None:
    batch, layers = c.shape[0], len(stores.local)
    if not 1 <= layers <= MOST_LAYERS:
        raise ValueError(f"stores.local: {layers} layers, must be 1 to {MOST_LAYERS}")
    keys = stores.planes(stores.local.index(False))[0] if False in stores.local else stores.ring_keys
    heads, head_dim = keys.shape[-2:]
    require_head_dim("stores", head_dim)
    require_contiguous("c", c, tuple(c.shape), torch.float32, torch.bfloat16)
    require_contiguous("weight", weight, (layers * 2 * heads * head_dim, c.shape[2]), c.dtype)
    require_contiguous("key_norms", key_norms, (layers, head_dim))
    require_contiguous("frequencies", frequencies, (head_dim // 2,), torch.float32)
    for name, tensor in (("start", start), ("counts", counts), ("stores.slots", stores.slots)):
        require_contiguous(name, tensor, (batch,), torch.int64)
    require_contiguous("stores.page_table", stores.page_table, (batch, stores.page_table.shape[-1]), torch.int64)
    for kind, planes in (
        (True, (stores.ring_keys, stores.ring_values)),
        (False, (stores.page_keys, stores.page_values)),
    ):
        for plane in planes:
            if plane is not None and kind in stores.local:
                name = "stores: ring planes" if kind else "stores: page planes"
                shape = (plane.shape[0], stores.local.count(kind), plane.shape[2], heads, head_dim)
                require_contiguous(name, plane, shape)
