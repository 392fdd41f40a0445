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
from kernels.context_kv import ContextStores, context_features, store_context_kv
from kernels.gated_mlp import silu_product
from kernels.head_norm_rotary import head_norm_rotary
from kernels.linear import Linear, linear
from kernels.norms import add_plain_rms_norm, plain_rms_norm
from kernels.ordering import argmax_rows
from kernels.selector import select_path
from kernels.shortlist import shortlist
from model.config import DraftConfig
from model.heads import ProposalHead
from model.reader import WeightReader, WeightSource
from model.rotary import Rotary


@dataclass(frozen=True)
class DraftContext:
    """Views of the caller's draft planes. Rings `ring_keys`, `ring_values` [slots, local layers, S, Hkv, D]; pages
    `page_keys`, `page_values` [pages, full layers, 64, Hkv, D], None for a drafter without full layers."""

    ring_keys: torch.Tensor
    ring_values: torch.Tensor
    page_keys: torch.Tensor | None
    page_values: torch.Tensor | None


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
    qkv: Linear
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    attention_conv: Convolution | None
    mlp_conv: Convolution | None


@dataclass(frozen=True)
class _Branch:
    """What an attention or MLP branch begins with: the residual, its normalised (DFlash2: prepared) input, both [B, W,
    H], and what DFlash2's convolution needs at its end."""

    residual: torch.Tensor
    input: torch.Tensor
    convolution: Convolution | None
    finish_delta: torch.Tensor | None

    def product(self, matrix: Linear, x: torch.Tensor) -> torch.Tensor:
        """The branch's output, in parts if a norm adds it."""
        return matrix.parts(x) if self.convolution is None else matrix(x)


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
        self.local = tuple(kind == "sliding_attention" for kind in config.layer_types)
        kv_rows = 2 * config.num_kv_heads * config.head_dim
        # A copy of all layers' K and V rows: as one matrix they are read at full speed.
        self._context_weight = torch.cat([layer.qkv.weight[-kv_rows:] for layer in layers])
        self._context_key_norms = torch.stack([layer.k_norm for layer in layers])

    @classmethod
    def load(
        cls,
        source: WeightSource,
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
                qkv=Linear(reader.rows(h, *((f"{attention}{part}_proj.weight", rows) for part, rows in heads))),
                q_norm=reader.tensor(f"{attention}q_norm.weight", d),
                k_norm=reader.tensor(f"{attention}k_norm.weight", d),
                output=Linear(reader.tensor(f"{attention}o_proj.weight", h, q)),
                post_norm=reader.tensor(f"{name}post_attention_layernorm.weight", h),
                gate_up=Linear(reader.rows(h, (f"{mlp}gate_proj.weight", inner), (f"{mlp}up_proj.weight", inner))),
                down=Linear(reader.tensor(f"{mlp}down_proj.weight", h, inner)),
                attention_conv=convolution(f"{name}attention_conv"),
                mlp_conv=convolution(f"{name}mlp_conv"),
            )

        def selector() -> Selector | None:
            rank = config.selector_rank
            if rank is None:
                return None
            return Selector(
                reader.tensor("candidate_selector.hidden_projection.weight", rank, h),
                reader.tensor("candidate_selector.predecessor_codebook", vocabulary, rank),
                reader.tensor("candidate_selector.successor_codebook", vocabulary, rank),
            )

        with WeightReader(source, embedding.device, embedding.dtype) as reader:
            feature = reader.tensor("fc.weight", h, len(config.target_layer_ids) * h)
            context_norm = reader.tensor("hidden_norm.weight", h)
            layers = tuple(layer(i) for i in range(config.num_layers))
            final_norm = reader.tensor("norm.weight", h)
            paths = selector()
        return cls(config, causal, feature, context_norm, layers, final_norm, paths, embedding, head)

    # -------------------------------------------------------------------------------------------- context

    def first_kept(self, columns: int) -> int:
        """Of so many new columns of a row, the first that the context keeps: rings hold the last S."""
        if not all(self.local) or self.config.window is None:
            return 0
        return max(0, columns - self.config.window)

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
        store_context_kv(
            context_features(features, self.feature, self.context_norm, config.rms_norm_eps),
            self._context_weight,
            self._context_key_norms,
            config.rms_norm_eps,
            self.rotary.frequencies,
            self.rotary.factor,
            start,
            counts,
            self._stores(rows, context),
        )

    def _stores(self, rows: DraftRows, context: DraftContext) -> ContextStores:
        return ContextStores(
            self.local,
            rows.slots,
            rows.page_table,
            context.ring_keys,
            context.ring_values,
            context.page_keys,
            context.page_values,
        )

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
        hidden = self._block(anchors, frontier, columns, width, rows, context)[:, 1:].contiguous()
        batch, drafts = hidden.shape[:2]
        scores = self._scores(hidden.flatten(0, 1))
        if self.selector is None:
            return Proposal(self.head.tokens(argmax_rows(scores)).view(batch, drafts))
        assert self.config.selector_top_k is not None
        unary, ranked = shortlist(scores, self.config.selector_top_k)
        candidates = self.head.tokens(ranked)
        path, law = select_path(
            candidates.view(batch, drafts, -1),
            unary.view(batch, drafts, -1),
            linear(hidden, self.selector.hidden),
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
        """`hidden` [R, H] -> FP32 scores over the head's rows [R, N]; multiplier, then softcap (decision 3)."""
        scores, cap = self.head.scores(hidden), self.config.logit_softcap
        if self.config.output_multiplier != 1.0:
            scores = scores * self.config.output_multiplier
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
        config, stores = self.config, self._stores(rows, context)
        ids = torch.full((anchors.shape[0], width), config.mask_token_id, device=anchors.device)
        ids[:, 0] = anchors
        x = F.embedding(ids, self.embedding)
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        cos, sin = self.rotary.tables(frontier[:, None] + torch.arange(width, device=anchors.device))
        scale, eps = config.head_dim**-0.5, config.rms_norm_eps
        following = [(layer.input_norm, layer.attention_conv) for layer in self.layers[1:]]
        branch = self._enter(x, self.layers[0].input_norm, self.layers[0].attention_conv)
        for index, (layer, after) in enumerate(zip(self.layers, [*following, (self.final_norm, None)], strict=True)):
            qkv = layer.qkv(branch.input).unflatten(-1, (-1, config.head_dim))
            q, k = head_norm_rotary(qkv, layer.q_norm, layer.k_norm, cos, sin, config.num_kv_heads, eps)
            v = qkv[..., -config.num_kv_heads :, :]
            keys, values = stores.planes(index)
            causal = self.causal[index]
            if self.local[index]:
                a = local_block_attention(q, k, v, keys, values, rows.slots, frontier, columns, causal, scale)
            else:
                a = full_block_attention(q, k, v, keys, values, rows.page_table, frontier, columns, causal, scale)
            branch = self._leave(branch, branch.product(layer.output, a.flatten(-2)), layer.post_norm, layer.mlp_conv)
            activated = silu_product(layer.gate_up(branch.input))
            branch = self._leave(branch, branch.product(layer.down, activated), *after)
        return branch.input

    def _enter(self, x: torch.Tensor, norm: torch.Tensor, convolution: Convolution | None) -> _Branch:
        """The branch that begins at the residual `x`."""
        if convolution is None:
            return _Branch(x, plain_rms_norm(x, norm, self.config.rms_norm_eps), None, None)
        return self._convolved(grouped_convolution.enter(x, norm), convolution)

    def _convolved(self, residual: grouped_convolution.Residual, convolution: Convolution) -> _Branch:
        prepared, delta = grouped_convolution.prepare(
            residual, convolution.base, convolution.projection, self.config.rms_norm_eps
        )
        return _Branch(residual.x, prepared, convolution, delta)

    def _leave(self, branch: _Branch, z: torch.Tensor, norm: torch.Tensor, convolution: Convolution | None) -> _Branch:
        """Adds a branch's output `z` to its residual, and enters the next branch there."""
        if branch.convolution is None or branch.finish_delta is None:
            x, n = add_plain_rms_norm(branch.residual, z, norm, self.config.rms_norm_eps)
            return _Branch(x, n, None, None)
        residual = grouped_convolution.finish(branch.residual, z, branch.convolution.base, branch.finish_delta, norm)
        if convolution is None:
            return self._enter(residual.x, norm, None)
        return self._convolved(residual, convolution)
