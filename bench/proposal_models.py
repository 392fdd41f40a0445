"""Drafters of the official geometries with random weights on the card, and draft context at any frontier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.acceptance import Proposal, RowSampling
from kernels.block_attention import full_block_attention, local_block_attention
from kernels.linear import Linear
from model.config import DraftConfig, RotaryConfig
from model.drafter import Convolution, DraftContext, Drafter, DraftLayer, DraftRows, Selector
from model.heads import ProposalHead

VOCABULARY, PUBLIC, PAGE = 248320, 248077, 64
LOCAL, FULL = "sliding_attention", "full_attention"
Block = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v of a block."""

DFLASH2_27B = DraftConfig(
    kind="dflash2",
    vocab_size=VOCABULARY,
    hidden_size=5120,
    intermediate_size=17408,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    layer_types=(LOCAL,) * 5,
    window=2048,
    causal=None,
    rotary=RotaryConfig(theta=1e7, dim=128, sections=None, interleaved=False, yarn=None),
    max_positions=262144,
    block_size=8,
    mask_token_id=248070,
    target_layer_ids=(5, 19, 33, 47, 61),
    output_multiplier=1.0,
    logit_softcap=None,
    embedding_scale=1.0,
    conv_taps=2,
    conv_group=16,
    selector_rank=256,
    selector_top_k=16,
    num_target_layers=64,
)
DFLASH_35B = DraftConfig(
    kind="dflash",
    vocab_size=VOCABULARY,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=6,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    layer_types=(LOCAL,) * 5 + (FULL,),
    window=4096,
    causal=None,
    rotary=RotaryConfig(theta=1e7, dim=128, sections=None, interleaved=False, yarn=None),
    max_positions=262144,
    block_size=16,
    mask_token_id=248070,
    target_layer_ids=(1, 6, 11, 16, 22, 27, 32, 37),
    output_multiplier=1.0,
    logit_softcap=None,
    embedding_scale=1.0,
    conv_taps=None,
    conv_group=None,
    selector_rank=None,
    selector_top_k=None,
    num_target_layers=40,
)
MODELS = {"27B DFlash2": DFLASH2_27B, "35B-A3B DFlash": DFLASH_35B}


def noise(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def weight(rows: int, columns: int) -> torch.Tensor:
    """A matrix that keeps the size of what it is applied to."""
    return noise(rows, columns, scale=columns**-0.5)


def gain(size: int) -> torch.Tensor:
    return (1.0 + 0.1 * torch.randn(size, device="cuda")).to(torch.bfloat16)


def random_drafter(config: DraftConfig) -> Drafter:
    h, d, inner = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_heads * d, config.num_kv_heads * d

    def convolution() -> Convolution | None:
        if config.conv_taps is None or config.conv_group is None:
            return None
        return Convolution(
            noise(2, config.conv_taps, h, scale=0.5), weight(2 * config.conv_taps * h // config.conv_group, h)
        )

    layers = tuple(
        DraftLayer(
            input_norm=gain(h),
            qkv=Linear(weight(q + 2 * kv, h)),
            q_norm=gain(d),
            k_norm=gain(d),
            output=Linear(weight(h, q)),
            post_norm=gain(h),
            gate_up=Linear(weight(2 * inner, h)),
            down=Linear(weight(h, inner)),
            attention_conv=convolution(),
            mlp_conv=convolution(),
        )
        for _ in range(config.num_layers)
    )
    selector = None
    if config.selector_rank is not None:
        rank = config.selector_rank
        selector = Selector(weight(rank, h), noise(VOCABULARY, rank), noise(VOCABULARY, rank, scale=rank**-0.5))
    head = weight(VOCABULARY, h)
    return Drafter(
        config,
        (False,) * config.num_layers,
        weight(h, len(config.target_layer_ids) * h),
        gain(h),
        layers,
        gain(h),
        selector,
        noise(VOCABULARY, h),
        ProposalHead(head, PUBLIC, None),
    )


@dataclass(frozen=True)
class Scene:
    """B rows at one frontier, with draft context of random contents, and NaN wherever nobody may look."""

    context: DraftContext
    rows: DraftRows
    frontier: torch.Tensor
    columns: torch.Tensor
    anchors: torch.Tensor
    sampling: RowSampling


def scene(config: DraftConfig, batch: int, width: int, frontier: int, ragged: bool = False) -> Scene:
    """`ragged`: rows compute between 1 and `width` columns, where the drafter's kind has it so (DFlash)."""
    local, full, window = len(config.sliding_layers), len(config.full_layers), config.window or 0
    heads, dim = config.num_kv_heads, config.head_dim
    slots, spread = batch + 1, torch.randperm(batch + 1, device="cuda")[:batch]
    table_width = -(-(frontier + width) // PAGE)
    pages = 1 + batch * table_width * bool(full)
    table = (torch.randperm(pages - 1, device="cuda") + 1)[: batch * table_width] if full else None

    def rings(dtype: torch.dtype) -> torch.Tensor:
        plane = torch.full((slots, local, window, heads, dim), torch.nan, dtype=dtype, device="cuda")
        live = torch.arange(max(0, frontier - window), frontier, device="cuda") % window
        for slot in spread.tolist():
            plane[slot, :, live] = noise(local, len(live), heads, dim, dtype=dtype)
        return plane

    def planes(dtype: torch.dtype) -> torch.Tensor | None:
        if table is None:
            return None
        plane = torch.full((pages, full, PAGE, heads, dim), torch.nan, dtype=dtype, device="cuda")
        for row in table.view(batch, table_width):
            whole, rest = divmod(frontier, PAGE)
            plane[row[:whole]] = noise(whole, full, PAGE, heads, dim, dtype=dtype)
            if rest:
                plane[row[whole], :, :rest] = noise(full, rest, heads, dim, dtype=dtype)
        return plane

    context = DraftContext(rings(torch.bfloat16), rings(torch.float16), planes(torch.bfloat16), planes(torch.float16))
    live = torch.full((batch,), width, device="cuda")
    if ragged and config.kind == "dflash":
        live = torch.randint(1, width + 1, (batch,), device="cuda")
    sampling = RowSampling(
        torch.where(torch.arange(batch, device="cuda") % 2 == 0, 0.0, 0.8),
        torch.zeros(batch, dtype=torch.int64, device="cuda"),
        torch.ones(batch, device="cuda"),
        torch.randint(0, 1 << 62, (batch,), device="cuda"),
        torch.zeros(batch, dtype=torch.int64, device="cuda"),
        None,
        torch.arange(batch, device="cuda") % 4 == 1,
    )
    tables = torch.zeros((batch, 0), dtype=torch.int64, device="cuda") if table is None else table.view(batch, -1)
    return Scene(
        context,
        DraftRows(spread, tables),
        torch.full((batch,), frontier, device="cuda"),
        live,
        torch.randint(0, PUBLIC, (batch,), device="cuda"),
        sampling,
    )


# ------------------------------------------------------------------------------------------------ work on a scene


def qkv(drafter: Drafter, batch: int, width: int) -> Block:
    c = drafter.config
    both = (c.num_kv_heads, c.head_dim)
    return noise(batch, width, c.num_heads, c.head_dim), noise(batch, width, *both), noise(batch, width, *both)


def shape_of(drafter: Drafter) -> tuple[int, float]:
    return drafter.config.head_dim, drafter.config.rms_norm_eps


def attend(drafter: Drafter, at: Scene, layer: int, block: Block, causal: bool) -> torch.Tensor:
    keys, values = drafter._stores(at.rows, at.context).planes(layer)
    scale = drafter.config.head_dim**-0.5
    if drafter.local[layer]:
        return local_block_attention(*block, keys, values, at.rows.slots, at.frontier, at.columns, causal, scale)
    return full_block_attention(*block, keys, values, at.rows.page_table, at.frontier, at.columns, causal, scale)


def propose_call(drafter: Drafter, at: Scene, width: int) -> Callable[[], Proposal]:
    return lambda: drafter.propose(at.anchors, at.frontier, at.columns, width, at.rows, at.context, at.sampling)
