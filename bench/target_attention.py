"""The target's attention and the copies of checkpoints on a card, for `bench/target_kernels.py`.

Sizes are 27B's: 24 query heads on 4 key heads of 256, 16 layers, pages of 64 tokens, an image of 187 MiB. Rows are at
random places of pools that all layers share, and calls rotate over the layers. Gather and scatter read and write every
byte once, so their floor counts it twice; what they can reach is their peer, a plain copy of as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench.gpu import norm_error, sets
from bench.state_sizes import GEOMETRY_27B
from bench.target_works import DEVICE, Peer, Work
from kernels.image_copy import image_gather, image_scatter
from kernels.paged_attention import paged_attention, read_pages
from state.geometry import PAGE_TOKENS, pages_for

MODEL = "27B"
LAYERS, KV_HEADS, QUERY_HEADS, DIM = GEOMETRY_27B.kv_layers, GEOMETRY_27B.kv_heads, 24, GEOMETRY_27B.kv_head_dim
SCALE = DIM**-0.5
LONG = 128 * 1024
VERIFY = [(batch, width, 4096) for batch in (1, 8, 32) for width in (8, 16)] + [(1, 8, LONG), (1, 16, LONG)]
MIXED = [LONG, *[1024] * 7]
PREFILL = [(columns, context) for columns in (2048, 8192) for context in (0, 8192, 65536)]
CHECKED = 61
"""Every so many columns of a chunk are compared with the oracle, and its last one."""
COPIED_PAGES, COPIED_IMAGES = 256, 4


def works() -> Iterator[Work]:
    yield from attention_works()
    yield from copy_works()


# ------------------------------------------------------------------------------------------------ attention


@dataclass(frozen=True)
class Pool:
    """Random K and V [pages, layers, 64, Hkv, D] of all layers."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, pages: int) -> Pool:
        shape = (pages, LAYERS, PAGE_TOKENS, KV_HEADS, DIM)
        return cls(*(torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_() for _ in range(2)))

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[:, layer % LAYERS], self.values[:, layer % LAYERS]


def attention_works() -> Iterator[Work]:
    pool = Pool.of(32 * pages_for(4096 + 16) + pages_for(LONG))
    for batch, width, context in VERIFY:
        yield attention_work("attention_verify", MODEL, pool, [context] * batch, width)
    yield attention_work("attention_verify", f"{MODEL}, one lane of 128k among seven of 1k", pool, MIXED, 8)
    for width, context in PREFILL:
        yield attention_work("attention_prefill", MODEL, pool, [context], width)


def attention_work(op: str, model: str, pool: Pool, contexts: list[int], width: int) -> Work:
    batch = len(contexts)
    start = torch.tensor(contexts, device=DEVICE)
    valid = torch.full((batch,), width, device=DEVICE)
    table = page_table(pool, [pages_for(context + width) for context in contexts])
    q = torch.randn(batch, width, QUERY_HEADS, 2, DIM, device=DEVICE).bfloat16()
    q, gate = q[..., 0, :].contiguous(), q[..., 1, :]
    extents = (table, start, valid)
    moved = sum(contexts) * KV_HEADS * DIM * 4 + batch * width * (2 * KV_HEADS * DIM * 2 + 3 * QUERY_HEADS * DIM * 2)
    return Work(
        op,
        model,
        batch,
        width,
        max(contexts),
        [partial(paged_attention, q, gate, *pool.layer(i), *extents, SCALE) for i in range(min(sets(moved), LAYERS))],
        moved,
        partial(attention_error, q, gate, *pool.layer(0), *extents),
        sdpa(q, pool, table, contexts) if len(set(contexts)) == 1 else None,
    )


def page_table(pool: Pool, needed: list[int]) -> torch.Tensor:
    """int64 [B, M] of random pages, no page twice; what a row does not need names no page."""
    free = torch.randperm(len(pool.keys), device=DEVICE)[: sum(needed)].split(needed)
    return torch.nn.utils.rnn.pad_sequence(list(free), batch_first=True, padding_value=-1)


def attention_error(
    q: torch.Tensor,
    gate: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    valid: torch.Tensor,
) -> float:
    """Against a softmax in FP64, the first row and the last."""
    out = paged_attention(q, gate, keys, values, table, start, valid, SCALE)
    width, group = q.shape[1], QUERY_HEADS // KV_HEADS
    columns = torch.arange(0, width, CHECKED if width > CHECKED else 1, device=DEVICE)
    columns = torch.cat((columns, columns.new_tensor([width - 1]))).unique()
    worst = 0.0
    for row in {0, len(q) - 1}:
        total = int(start[row]) + width
        position = torch.arange(total, device=DEVICE)
        hidden = position[None, :] > (start[row] + columns)[:, None]
        k, v = (read_pages(pool, table[row], total) for pool in (keys, values))
        for head in range(QUERY_HEADS):
            scores = q[row, columns, head].double() @ k[:, head // group].double().T * SCALE
            mixture = scores.masked_fill_(hidden, float("-inf")).softmax(-1) @ v[:, head // group].double()
            expected = mixture * gate[row, columns, head].double().sigmoid()
            worst = max(worst, norm_error(out[row, columns, head], expected))
    return worst


def sdpa(q: torch.Tensor, pool: Pool, table: torch.Tensor, contexts: list[int]) -> Peer:
    """Flash attention of torch on the same K and V without pages, gathered beforehand; without the gate."""
    total = contexts[0] + q.shape[1]
    name = "torch SDPA (flash), contiguous K and V, no gate"
    bias = causal_lower_right(q.shape[1], total)
    heads = q.transpose(1, 2)

    def contiguous(plane: torch.Tensor) -> torch.Tensor:
        return torch.stack([read_pages(plane, row, total).transpose(0, 1) for row in table]).contiguous()

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(heads, k, v, attn_mask=bias, scale=SCALE, enable_gqa=True)

    size = len(contexts) * total * KV_HEADS * DIM * 4
    planes = [[contiguous(plane) for plane in pool.layer(i)] for i in range(min(sets(size), LAYERS))]
    try:
        call(*planes[0])
    except RuntimeError as error:
        return Peer(f"{name}: {str(error).splitlines()[0]}")
    return Peer(name, [partial(call, k, v) for k, v in planes])


# ------------------------------------------------------------------------------------------------ copies


def copy_works() -> Iterator[Work]:
    """A plane of 16k tokens' pages, a plane of an image's rings, and the recurrent states of a few images."""
    g = GEOMETRY_27B
    page = LAYERS * PAGE_TOKENS * KV_HEADS * DIM
    state = g.gdn_layers * g.gdn_heads * g.gdn_key_dim * g.gdn_value_dim
    position, ring = g.draft_kv_heads * g.draft_head_dim, g.ring_layers * g.window
    for what, width, count, dtype in (
        ("pages", page, COPIED_PAGES, torch.bfloat16),
        ("rings", position, ring, torch.bfloat16),
        ("states", state, COPIED_IMAGES, torch.float32),
    ):
        context = {"pages": count * PAGE_TOKENS, "rings": g.window, "states": 0}[what]
        batch = count if what == "states" else 1
        yield from copy_pair(f"{MODEL} {what}", batch, context, width, count, dtype)


def copy_pair(model: str, batch: int, context: int, width: int, count: int, dtype: torch.dtype) -> Iterator[Work]:
    size = 2 * count * width * dtype.itemsize
    rounds = sets(size)
    plane = torch.randn(2 * rounds * count, width, device=DEVICE, dtype=dtype)
    rows = [torch.randn(count, width, device=DEVICE, dtype=dtype) for _ in range(rounds)]
    indices = torch.randperm(len(plane), device=DEVICE)[: rounds * count].view(rounds, count)
    pairs = list(zip(indices, rows, strict=True))

    def gather_error() -> float:
        image_gather(plane, indices[0], rows[0])
        return 0.0 if torch.equal(rows[0], plane[indices[0]]) else float("inf")

    def scatter_error() -> float:
        others = torch.ones(len(plane), dtype=torch.bool, device=DEVICE)
        others[indices[0]] = False
        before = plane[others]
        image_scatter(plane, indices[0], rows[0])
        right = torch.equal(plane[indices[0]], rows[0]) and torch.equal(plane[others], before)
        return 0.0 if right else float("inf")

    copies = Peer(
        "a plain copy of as many bytes", [partial(rows[i].copy_, plane[i * count :][:count]) for i in range(rounds)]
    )
    gathers = [partial(image_gather, plane, index, out) for index, out in pairs]
    scatters = [partial(image_scatter, plane, index, out) for index, out in pairs]
    yield Work("image_gather", model, batch, 0, context, gathers, size, gather_error, copies)
    yield Work("image_scatter", model, batch, 0, context, scatters, size, scatter_error, copies)
