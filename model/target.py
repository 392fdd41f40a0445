"""The Qwen3.5 target: gated delta net layers and gated full-attention layers, over state that the caller owns.

    x <- x + mixer(offset_norm(x));  x <- x + ffn(offset_norm(x))           per block, no biases
    full attention: q|gate per head, k, v; offset head norms; partial rotary; causal over pages; * sigmoid(gate); o_proj
    gated delta net: q|k|v through a short convolution, the gated delta rule, gated norm with z, out_proj

A forward runs T columns of B rows. `prefill` advances recurrent state and convolution history in place; `verify`
changes neither and returns records, from which `commit` folds the N columns that were kept. Both write K/V of their
live columns into pages: columns beyond the frontier are unreachable until they are committed.

Source: specification; research of transformers' Qwen3.5 (names, norms, gate order); decisions 4, 5, 10.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels import gated_delta_net as gdn
from kernels.delta_gates import gates
from kernels.delta_prefill import prefill
from kernels.head import head_scores
from kernels.linear import Linear
from kernels.norms import add_offset_rms_norm, gated_rms_norm, offset_rms_norm
from kernels.paged_attention import paged_attention
from kernels.place_heads import place_heads, queries_and_gates
from kernels.short_convolution import advance_histories, short_convolution
from model.config import TargetConfig
from model.mlp import DenseMlp, MoeMlp, read_mlp, run_mlp
from model.reader import WeightReader, WeightSource
from model.rotary import Rotary


@dataclass(frozen=True)
class TargetState:
    """Views of the caller's pools. `keys`, `values` [pages, full layers, 64, Hkv, D]; `recurrent` FP32
    [slots, GDN layers, Hv, Dk, Dv]; `history` [slots, GDN layers, C, taps - 1]."""

    keys: torch.Tensor
    values: torch.Tensor
    recurrent: torch.Tensor
    history: torch.Tensor


@dataclass(frozen=True)
class Inserted:
    """Embeddings of media, [n, H], that stand in place of those of the token ids at `columns`, int64 [n], which count
    through all rows: b * T + i. Both on the model's device."""

    embeddings: torch.Tensor
    columns: torch.Tensor


@dataclass(frozen=True)
class Columns:
    """B rows of T input columns. `token_ids` [B, T]; `start` [B], the cache ordinal of column 0; `valid` [B], live
    columns; `page_table` [B, M]; `slots` [B], the rows' images. All int64 on the model's device.

    `positions` are those of the rotary alone, [B, T] or, where media stand in the columns, [B, T, 3] (time, height,
    width); None: the cache ordinals, as in every sequence of text. `inserted`: None where all columns are tokens.

    `parent`, `depth` [B, T] are kept free for trees of drafts: which column of its row a column follows, and how many
    after the frontier it is. Columns are a chain so far, i - 1 and i, which None stands for; ValueError for all else.
    """

    token_ids: torch.Tensor
    start: torch.Tensor
    valid: torch.Tensor
    page_table: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor | None = None
    inserted: Inserted | None = None
    parent: torch.Tensor | None = None
    depth: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("parent", "depth"):
            if getattr(self, name) is not None:
                raise ValueError(f"columns: {name} is given, must be None: trees of drafts are not verified yet")

    @property
    def rotary_positions(self) -> torch.Tensor:
        if self.positions is not None:
            return self.positions
        return self.start[:, None] + torch.arange(self.token_ids.shape[1], device=self.token_ids.device)


@dataclass(frozen=True)
class Forward:
    """`hidden` [B, T, H] after the final norm; `features` [B, T, n H], the tapped residuals in tap order (None without
    taps); `records` of all GDN layers after `verify`, of none after `prefill`."""

    hidden: torch.Tensor
    features: torch.Tensor | None
    records: gdn.Records


@dataclass(frozen=True)
class AttentionWeights:
    """`qkv` [2 Hq D + 2 Hkv D, H]: q and gate of each query head, then k, then v; `output` [H, Hq D]."""

    qkv: Linear
    output: Linear
    q_norm: torch.Tensor
    k_norm: torch.Tensor


@dataclass(frozen=True)
class DeltaNetWeights:
    """`projection` [C + Hv Dv + 2 Hv, H]: q | k | v, z, b and a; `output` [H, Hv Dv]."""

    projection: Linear
    convolution: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    output: Linear


@dataclass(frozen=True)
class Block:
    input_norm: torch.Tensor
    mixer: AttentionWeights | DeltaNetWeights
    post_norm: torch.Tensor
    mlp: DenseMlp | MoeMlp


class Target:
    """Weights and forward passes. One device, one dtype; A_log and dt_bias are kept in FP32."""

    def __init__(
        self,
        config: TargetConfig,
        embedding: torch.Tensor,
        blocks: tuple[Block, ...],
        final_norm: torch.Tensor,
        head: torch.Tensor,
        public_rows: int,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.blocks = blocks
        self.final_norm = final_norm
        self.head = head
        self.public_rows = public_rows
        self.rotary = Rotary.of(config.rotary, embedding.device)

    @classmethod
    def load(
        cls,
        source: WeightSource,
        config: TargetConfig,
        public_rows: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Target:
        """Reads all tensors by their Hugging Face names. Raises ModelError for a missing or misshapen one."""

        def block(i: int) -> Block:
            prefix = f"layers.{i}."
            full = config.layer_types[i] == "full_attention"
            return Block(
                input_norm=reader.tensor(f"{prefix}input_layernorm.weight", config.hidden_size),
                mixer=_read_attention(reader, prefix, config) if full else _read_delta_net(reader, prefix, config),
                post_norm=reader.tensor(f"{prefix}post_attention_layernorm.weight", config.hidden_size),
                mlp=read_mlp(reader, prefix, config),
            )

        vocabulary = (config.vocab_size, config.hidden_size)
        with WeightReader(source, device, dtype) as reader:
            embedding = reader.tensor("embed_tokens.weight", *vocabulary)
            blocks = tuple(block(i) for i in range(config.num_layers))
            final_norm = reader.tensor("norm.weight", config.hidden_size)
            head = embedding if config.tie_embeddings else reader.tensor("lm_head.weight", *vocabulary)
        return cls(config, embedding, blocks, final_norm, head, public_rows)

    # -------------------------------------------------------------------------------------------- forward passes

    def prefill(self, columns: Columns, state: TargetState, taps: tuple[int, ...] = ()) -> Forward:
        """One row's chunk, all of its columns live: writes K/V and advances recurrent state and history in place."""
        return self._forward(columns, state, taps, advance=True)

    def verify(
        self, columns: Columns, state: TargetState, taps: tuple[int, ...] = (), records: gdn.Records | None = None
    ) -> Forward:
        """Up to W columns a row, valid[b] live: writes K/V beyond the frontier, changes no image, returns records: in
        those that are given, if any."""
        return self._forward(columns, state, taps, advance=False, records=records)

    def commit(self, records: gdn.Records, counts: torch.Tensor, slots: torch.Tensor, state: TargetState) -> None:
        """Folds the first counts[b] recorded columns into the images `slots`; counts[b] = 0 changes nothing."""
        gdn.fold(records, state.recurrent, slots, counts)
        advance_histories(state.history, slots, records.columns, counts)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [..., H] -> FP32 [..., public rows]: rows above the public vocabulary are never chosen."""
        return head_scores(hidden, self.head, self.public_rows)

    def _forward(
        self,
        columns: Columns,
        state: TargetState,
        taps: tuple[int, ...],
        advance: bool,
        records: gdn.Records | None = None,
    ) -> Forward:
        config = self.config
        x = self._embedded(columns)
        tables = self.rotary.tables(columns.rotary_positions)
        tapped: dict[int, torch.Tensor] = {}
        records = records or self._new_records(columns, 1 if advance else len(config.gdn_layers))
        next_norms = (*(block.input_norm for block in self.blocks[1:]), self.final_norm)
        full_layers = delta_layers = 0
        n = offset_rms_norm(x, self.blocks[0].input_norm, config.rms_norm_eps)
        for i, (block, next_norm) in enumerate(zip(self.blocks, next_norms, strict=True)):
            if isinstance(block.mixer, AttentionWeights):
                y = self._attention(block.mixer, n, columns, tables, state, full_layers)
                full_layers += 1
            else:
                y = self._delta_net(block.mixer, n, columns, state, delta_layers, records, advance)
                delta_layers += 1
            x, m = add_offset_rms_norm(x, y, block.post_norm, config.rms_norm_eps)
            x, n = add_offset_rms_norm(x, run_mlp(block.mlp, m), next_norm, config.rms_norm_eps)
            if i in taps:
                tapped[i] = x
        features = torch.cat([tapped[i] for i in taps], dim=-1) if taps else None
        return Forward(n, features, self._new_records(columns, 0) if advance else records)

    def _embedded(self, columns: Columns) -> torch.Tensor:
        x = F.embedding(columns.token_ids, self.embedding)
        if columns.inserted is not None:
            media = columns.inserted
            x.view(-1, x.shape[-1]).index_copy_(0, media.columns, media.embeddings.to(x.dtype))
        return x

    def _new_records(self, columns: Columns, layers: int) -> gdn.Records:
        """Prefill keeps one layer's at a time: only verification's layers are folded together, later."""
        config, (batch, width) = self.config, columns.token_ids.shape
        dtype, device = self.embedding.dtype, self.embedding.device
        return gdn.Records.empty(layers, batch, width, config.conv_channels, config.gdn_value_heads, dtype, device)

    def _attention(
        self,
        weights: AttentionWeights,
        n: torch.Tensor,
        columns: Columns,
        tables: tuple[torch.Tensor, torch.Tensor],
        state: TargetState,
        layer: int,
    ) -> torch.Tensor:
        config = self.config
        keys, values = state.keys[:, layer], state.values[:, layer]
        extents = (columns.page_table, columns.start, columns.valid)
        projected = weights.qkv(n)
        q = place_heads(projected, weights.q_norm, weights.k_norm, *tables, keys, values, *extents, config.rms_norm_eps)
        _, gate = queries_and_gates(projected, config.num_heads, config.head_dim)
        out = paged_attention(q, gate, keys, values, *extents, config.head_dim**-0.5)
        return weights.output.parts(out.flatten(-2))

    def _delta_net(
        self,
        weights: DeltaNetWeights,
        n: torch.Tensor,
        columns: Columns,
        state: TargetState,
        layer: int,
        records: gdn.Records,
        advance: bool,
    ) -> torch.Tensor:
        config = self.config
        values_width = config.gdn_value_heads * config.gdn_value_dim
        heads = config.gdn_value_heads
        projected, z, b, a = weights.projection(n).split((config.conv_channels, values_width, heads, heads), dim=-1)
        kept = 0 if advance else layer
        mixed, g, beta = records.mixed[kept], records.g[kept], records.beta[kept]
        histories, recurrent = state.history[:, layer], state.recurrent[:, layer]
        short_convolution(projected, histories, columns.slots, weights.convolution, mixed, records.columns[kept])
        gates(a, b, weights.a_log, weights.dt_bias, g, beta)
        if advance:
            out = prefill(mixed, g, beta, recurrent, columns.slots, columns.valid)
            advance_histories(state.history[:, layer : layer + 1], columns.slots, records.columns, columns.valid)
        else:
            out = gdn.verify(mixed, g, beta, recurrent, columns.slots, columns.valid)
        z = z.unflatten(-1, (heads, config.gdn_value_dim))
        normed = gated_rms_norm(out, z, weights.norm, config.rms_norm_eps)
        return weights.output.parts(normed.flatten(-2))


def _read_attention(reader: WeightReader, prefix: str, config: TargetConfig) -> AttentionWeights:
    h, d = config.hidden_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    name = f"{prefix}self_attn."
    parts = ((f"{name}q_proj.weight", 2 * q), (f"{name}k_proj.weight", kv), (f"{name}v_proj.weight", kv))
    return AttentionWeights(
        qkv=Linear(reader.rows(h, *parts)),
        output=Linear(reader.tensor(f"{name}o_proj.weight", h, q)),
        q_norm=reader.tensor(f"{name}q_norm.weight", d),
        k_norm=reader.tensor(f"{name}k_norm.weight", d),
    )


def _read_delta_net(reader: WeightReader, prefix: str, config: TargetConfig) -> DeltaNetWeights:
    h, heads, channels = config.hidden_size, config.gdn_value_heads, config.conv_channels
    values = heads * config.gdn_value_dim
    name = f"{prefix}linear_attn."
    parts = (
        (f"{name}in_proj_qkv.weight", channels),
        (f"{name}in_proj_z.weight", values),
        (f"{name}in_proj_b.weight", heads),
        (f"{name}in_proj_a.weight", heads),
    )
    return DeltaNetWeights(
        projection=Linear(reader.rows(h, *parts)),
        convolution=reader.tensor(f"{name}conv1d.weight", channels, 1, config.conv_kernel)[:, 0],
        a_log=reader.tensor(f"{name}A_log", heads, dtype=torch.float32),
        dt_bias=reader.tensor(f"{name}dt_bias", heads, dtype=torch.float32),
        norm=reader.tensor(f"{name}norm.weight", config.gdn_value_dim),
        output=Linear(reader.tensor(f"{name}out_proj.weight", h, values)),
    )
