"""The DFlash and DFlash2 drafters: one masked-block forward proposes K tokens, conditioned on target features.

    n = plain_norm(x);  [n, delta] = attention_conv.prepare(n)                     (DFlash2 only)
    q, k, v of n; plain head norms on q and k; full-head rotary at F, F+1, ..      k, v are scratch of the block
    a = attention(q, context ++ block);  y = x + [attention_conv.finish](W_output a)
    m = plain_norm(y);  [m, delta] = mlp_conv.prepare(m);  x = y + [mlp_conv.finish](W_down(SiLU(W_gate m) * W_up m))
    mask hidden = plain_norm(x)[1:]

Input is the target's embedding of [anchor, MASK x K]; mask column i predicts the token at its own position F + i. The
same backbone serves both kinds; a DFlash2 layer has two convolutions, and a DFlash2 drafter a selector.

Context comes only from committed target features: `append_context` projects them into rings (local layers) and pages
(full layers) that the caller owns.

Source: specification; decisions 1-4, 8, 10; tensor names from research/peers.md 1.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels import grouped_convolution
from kernels.acceptance import Proposal, RowSampling
from kernels.block_attention import full_block_attention, local_block_attention
from kernels.context_kv import context_features, context_keys_values
from kernels.gated_mlp import gated_mlp
from kernels.head_norm_rotary import head_norm_rotary
from kernels.norms import plain_rms_norm
from kernels.ordering import argmax_rows
from kernels.paged_attention import write_pages
from kernels.ring import write_ring
from kernels.selector import select_path
from kernels.shortlist import shortlist
from model.config import DraftConfig
from model.heads import ProposalHead
from model.reader import WeightReader
from model.rotary import Rotary
from model.weights import WeightFiles


@dataclass(frozen=True)
class DraftContext:
    """Views of the caller's draft planes. Rings `ring_keys`, `ring_values` [slots, local layers, S, Hkv, D]; pages
    `page_keys`, `page_values` [pages, full layers, 64, Hkv, D], None for a drafter without full layers."""

    ring_keys: torch.Tensor
    ring_values: torch.Tensor
    page_keys: torch.Tensor | None
    page_values: torch.Tensor | None

    def rings(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one local layer: [slots, S, Hkv, D] each."""
        return self.ring_keys[:, layer], self.ring_values[:, layer]

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one full layer: [pages, 64, Hkv, D] each."""
        assert self.page_keys is not None and self.page_values is not None
        return self.page_keys[:, layer], self.page_values[:, layer]


@dataclass(frozen=True)
class DraftRows:
    """Where B rows keep their context: `slots` [B], `page_table` [B, M], int64."""

    slots: torch.Tensor
    page_table: torch.Tensor


@dataclass(frozen=True)
class Convolution:
    base: torch.Tensor
    projection: torch.Tensor


@dataclass(frozen=True)
class DraftLayer:
    input_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    output: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    attention_conv: Convolution | None
    mlp_conv: Convolution | None


@dataclass(frozen=True)
class Selector:
    hidden: torch.Tensor
    predecessor: torch.Tensor
    successor: torch.Tensor


class Drafter:
    """Weights and the two passes of a drafter. `embedding` [V, H] is the target's table, `head` rows of its head."""

    def __init__(
        self,
        config: DraftConfig,
        causal: tuple[bool, ...],
        feature: torch.Tensor,
        context_norm: torch.Tensor,
        layers: tuple[DraftLayer, ...],
        final_norm: torch.Tensor,
        selector: Selector | None,
        embedding: torch.Tensor,
        head: ProposalHead,
    ) -> None:
        self.config = config
        self.causal = causal
        self.feature = feature
        self.context_norm = context_norm
        self.layers = layers
        self.final_norm = final_norm
        self.selector = selector
        self.embedding = embedding
        self.head = head
        self.rotary = Rotary.of(config.rotary, feature.device)

    @classmethod
    def load(
        cls,
        files: WeightFiles,
        config: DraftConfig,
        causal: tuple[bool, ...],
        embedding: torch.Tensor,
        head: ProposalHead,
    ) -> Drafter:
        """Reads all tensors by their Hugging Face names, as the dtype and to the device of `embedding`.

        Raises ModelError for a missing or misshapen one.
        """
        h, d, inner = config.hidden_size, config.head_dim, config.intermediate_size
        q, kv = config.num_heads * d, config.num_kv_heads * d

        reader = WeightReader(files, embedding.device, embedding.dtype)
        vocabulary = embedding.shape[0]

        def convolution(name: str) -> Convolution | None:
            if config.conv_taps is None or config.conv_group is None:
                return None
            rows = grouped_convolution.SIDES * config.conv_taps * (h // config.conv_group)
            return Convolution(
                reader.tensor(f"{name}.base_kernel", grouped_convolution.SIDES, config.conv_taps, h),
                reader.tensor(f"{name}.kernel_projection.weight", rows, h),
            )

        def layer(i: int) -> DraftLayer:
            name = f"layers.{i}."
            attention, mlp = f"{name}self_attn.", f"{name}mlp."
            heads = (("q", q), ("k", kv), ("v", kv))
            return DraftLayer(
                input_norm=reader.tensor(f"{name}input_layernorm.weight", h),
                qkv=reader.rows(h, *((f"{attention}{part}_proj.weight", rows) for part, rows in heads)),
                q_norm=reader.tensor(f"{attention}q_norm.weight", d),
                k_norm=reader.tensor(f"{attention}k_norm.weight", d),
                output=reader.tensor(f"{attention}o_proj.weight", h, q),
                post_norm=reader.tensor(f"{name}post_attention_layernorm.weight", h),
                gate_up=reader.rows(h, (f"{mlp}gate_proj.weight", inner), (f"{mlp}up_proj.weight", inner)),
                down=reader.tensor(f"{mlp}down_proj.weight", h, inner),
                attention_conv=convolution(f"{name}attention_conv"),
                mlp_conv=convolution(f"{name}mlp_conv"),
            )

        selector = None
        if config.selector_rank is not None:
            rank = config.selector_rank
            selector = Selector(
                reader.tensor("candidate_selector.hidden_projection.weight", rank, h),
                reader.tensor("candidate_selector.predecessor_codebook", vocabulary, rank),
                reader.tensor("candidate_selector.successor_codebook", vocabulary, rank),
            )
        return cls(
            config,
            causal,
            reader.tensor("fc.weight", h, len(config.target_layer_ids) * h),
            reader.tensor("hidden_norm.weight", h),
            tuple(layer(i) for i in range(config.num_layers)),
            reader.tensor("norm.weight", h),
            selector,
            embedding,
            head,
        )

    # -------------------------------------------------------------------------------------------- context

    def append_context(
        self,
        features: torch.Tensor,
        start: torch.Tensor,
        counts: torch.Tensor,
        rows: DraftRows,
        context: DraftContext,
    ) -> None:
        """Projects the first counts[b] of `features` [B, T, n H], at start[b] + i, into each layer's context."""
        config = self.config
        c = context_features(features, self.feature, self.context_norm, config.rms_norm_eps)
        positions = start[:, None] + torch.arange(features.shape[1], device=features.device)
        cos, sin = self.rotary.tables(positions)
        for layer, (local, index) in zip(self.layers, self._stores(), strict=True):
            _, key_weight, value_weight = layer.qkv.split([heads * config.head_dim for heads in self._heads])
            k, v = context_keys_values(c, key_weight, value_weight, layer.k_norm, config.rms_norm_eps, cos, sin)
            keys, values = context.rings(index) if local else context.pages(index)
            for store, entries in ((keys, k), (values, v)):
                if local:
                    write_ring(store, entries, rows.slots, start, counts)
                else:
                    write_pages(store, entries, rows.page_table, start, counts)

    # -------------------------------------------------------------------------------------------- proposal

    def propose(
        self,
        anchors: torch.Tensor,
        frontier: torch.Tensor,
        columns: torch.Tensor,
        width: int,
        rows: DraftRows,
        context: DraftContext,
        sampling: RowSampling,
    ) -> Proposal:
        """One block of `width` columns: `anchors`, `frontier` int64 [B]; `columns` int64 [B], the columns each row
        computes (DFlash: Q, DFlash2: W). The context frontier of every row is `frontier`."""
        hidden = self._block(anchors, frontier, columns, width, rows, context)[:, 1:]
        scores = self._scores(hidden)
        if self.selector is None:
            return Proposal(self.head.tokens(argmax_rows(scores.flatten(0, 1)).view(scores.shape[:-1])))
        assert self.config.selector_top_k is not None
        batch, drafts, available = scores.shape
        unary, ranked = shortlist(scores.view(-1, available), self.config.selector_top_k)
        candidates = self.head.tokens(ranked)
        path, law = select_path(
            candidates.view(batch, drafts, -1),
            unary.view(batch, drafts, -1),
            F.linear(hidden, self.selector.hidden),
            self.selector.predecessor,
            self.selector.successor,
            anchors,
            frontier,
            sampling.temperature,
            sampling.seeds,
            sampling.sub,
            sampling.reproducible,
        )
        return Proposal(path, candidates.view(batch, drafts, -1), law)

    def _scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [B, K, H] -> FP32 scores over the head's rows [B, K, N]; multiplier, then softcap (decision 3)."""
        scores = self.head.scores(hidden) * self.config.output_multiplier
        cap = self.config.logit_softcap
        return scores if cap is None else (scores / cap).tanh() * cap

    def _block(
        self,
        anchors: torch.Tensor,
        frontier: torch.Tensor,
        columns: torch.Tensor,
        width: int,
        rows: DraftRows,
        context: DraftContext,
    ) -> torch.Tensor:
        """The draft residual stack over [anchor, MASK x (width - 1)] -> [B, width, H] after the final norm."""
        config = self.config
        ids = torch.full((anchors.shape[0], width), config.mask_token_id, device=anchors.device)
        ids[:, 0] = anchors
        x = F.embedding(ids, self.embedding) * config.embedding_scale
        cos, sin = self.rotary.tables(frontier[:, None] + torch.arange(width, device=anchors.device))
        scale = config.head_dim**-0.5
        for layer, causal, (local, index) in zip(self.layers, self.causal, self._stores(), strict=True):
            n, finish_a = _prepare(layer.attention_conv, x, layer.input_norm, config.rms_norm_eps)
            qkv = F.linear(n, layer.qkv).unflatten(-1, (-1, config.head_dim))
            q, k = head_norm_rotary(qkv, layer.q_norm, layer.k_norm, cos, sin, config.num_kv_heads, config.rms_norm_eps)
            v = qkv[..., -config.num_kv_heads :, :]
            if local:
                keys, values = context.rings(index)
                a = local_block_attention(q, k, v, keys, values, rows.slots, frontier, columns, causal, scale)
            else:
                keys, values = context.pages(index)
                a = full_block_attention(q, k, v, keys, values, rows.page_table, frontier, columns, causal, scale)
            x = _finish(layer.attention_conv, x, F.linear(a.flatten(-2), layer.output), finish_a)
            m, finish_m = _prepare(layer.mlp_conv, x, layer.post_norm, config.rms_norm_eps)
            x = _finish(layer.mlp_conv, x, gated_mlp(m, layer.gate_up, layer.down), finish_m)
        return plain_rms_norm(x, self.final_norm, config.rms_norm_eps)

    @property
    def _heads(self) -> tuple[int, int, int]:
        """Heads of q, k and v, in the order of the fused projection's rows."""
        return self.config.num_heads, self.config.num_kv_heads, self.config.num_kv_heads

    def _stores(self) -> list[tuple[bool, int]]:
        """Per layer: whether its context is a ring, and its index among the rings or among the page planes."""
        counts = {True: 0, False: 0}
        stores: list[tuple[bool, int]] = []
        for kind in self.config.layer_types:
            local = kind == "sliding_attention"
            stores.append((local, counts[local]))
            counts[local] += 1
        return stores


def _prepare(
    convolution: Convolution | None, x: torch.Tensor, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if convolution is None:
        return plain_rms_norm(x, norm, eps), None
    return grouped_convolution.prepare(x, norm, convolution.base, convolution.projection, eps)


def _finish(
    convolution: Convolution | None, x: torch.Tensor, z: torch.Tensor, finish_delta: torch.Tensor | None
) -> torch.Tensor:
    if convolution is None or finish_delta is None:
        return x + z
    return grouped_convolution.finish(x, z, convolution.base, finish_delta)
