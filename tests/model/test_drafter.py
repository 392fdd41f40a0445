"""Whole proposals of tiny random drafters against an FP64 oracle that reads the same checkpoint by its tensor names.

The oracle has no rings, pages or slots: it keeps every committed feature and filters by the specification's rules.
Contexts lie below, at and beyond the window, and are appended in pieces.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kernels.acceptance import Proposal, RowSampling
from model.config import load_draft_config
from model.drafter import DraftContext, Drafter, DraftRows
from model.heads import ProposalHead
from model.weights import WeightFiles
from tests.kernels import oracles
from tests.kernels.oracles import POISON, PROPOSAL

VOCABULARY, PUBLIC, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 50, 44, 32, 48, 4, 2, 8
WINDOW, TAPS, MASK, GROUP, RANK, TOP = 12, 2, 47, 16, 6, 8
CONTEXTS = [0, 1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 40, 70]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tables:
    """The parts of a target that a drafter uses: `embedding`, `head` [V, H], of which PUBLIC rows count, and the ids
    that may be proposed."""

    embedding: torch.Tensor
    head: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class Setup:
    drafter: Drafter
    weights: Weights
    head: Tables
    settings: dict[str, Any]


def draft_settings(kind: str, layer_types: list[str], **changes: Any) -> dict[str, Any]:
    nested: dict[str, Any] = {"target_layer_ids": [1, 3], "mask_token_id": MASK, "block_size": 8}
    if kind == "dflash2":
        nested |= {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": TOP}
    settings = {
        "architectures": ["DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": len(layer_types),
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "rms_norm_eps": 1e-2,  # large, so that a norm with another epsilon shows
        "layer_types": layer_types,
        "sliding_window": WINDOW,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "num_target_layers": 5,
        "dflash_config": nested,
    }
    return settings | changes


def random_weights(settings: dict[str, Any], seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    def gain(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    weights = {
        "fc.weight": matrix(HIDDEN, TAPS * HIDDEN),
        "hidden_norm.weight": gain(HIDDEN),
        "norm.weight": gain(HIDDEN),
    }
    two = settings["architectures"] == ["DFlash2DraftModel"]
    for i in range(settings["num_hidden_layers"]):
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * DIM),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            weights[f"layers.{i}.{name}.weight"] = matrix(rows, columns) * 2
        for name, size in (
            ("input_layernorm", HIDDEN),
            ("post_attention_layernorm", HIDDEN),
            ("self_attn.q_norm", DIM),
            ("self_attn.k_norm", DIM),
        ):
            weights[f"layers.{i}.{name}.weight"] = gain(size)
        for branch in ("attention_conv", "mlp_conv") if two else ():
            weights[f"layers.{i}.{branch}.base_kernel"] = matrix(2, 2, HIDDEN) * 4
            weights[f"layers.{i}.{branch}.kernel_projection.weight"] = matrix(4 * HIDDEN // GROUP, HIDDEN) / 2
    if two:
        weights["candidate_selector.hidden_projection.weight"] = matrix(RANK, HIDDEN)
        weights["candidate_selector.predecessor_codebook"] = matrix(VOCABULARY, RANK) * 3
        weights["candidate_selector.successor_codebook"] = matrix(VOCABULARY, RANK) * 3
    return weights


def build(
    directory: Path,
    settings: dict[str, Any],
    causal: bool = False,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    rows: list[int] | None = None,
) -> Setup:
    """`rows`: an indexed proposal head of these token ids, ascending; None: the full head."""
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(settings, seed).items()}
    (directory / "config.json").write_text(json.dumps(settings))
    save_file(weights, directory / "model.safetensors")
    config = load_draft_config(directory)
    flags = (causal,) * config.num_layers
    generator = torch.Generator().manual_seed(seed + 1)
    embedding, head = (torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    ids = torch.arange(PUBLIC) if rows is None else torch.tensor(rows)
    proposal_head = ProposalHead(head[ids], len(ids), None if rows is None else ids)
    drafter = Drafter.load(WeightFiles.open_draft(directory), config, flags, embedding, proposal_head)
    return Setup(drafter, weights, Tables(embedding, head, ids), settings)


# ------------------------------------------------------------------------------------------------ the oracle


class Oracle:
    """One row of a drafter in FP64, position by position."""

    def __init__(self, setup: Setup, causal: bool) -> None:
        self.weights = {name: tensor.double() for name, tensor in setup.weights.items()}
        self.settings, self.head, self.causal = setup.settings, setup.head, causal
        self.eps = setup.settings["rms_norm_eps"]
        self.frequencies, self.factor = frequencies(setup.settings)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.weights[f"{name}.weight"] * oracles.rms(x, self.eps)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def heads(self, x: torch.Tensor, name: str, positions: torch.Tensor, norm: str | None) -> torch.Tensor:
        y = self.linear(x, name).unflatten(-1, (-1, DIM))
        if norm is None:
            return y
        return oracles.rotate(self.norm(y, norm), positions, self.frequencies, self.factor)

    def convolve(self, x: torch.Tensor, source: torch.Tensor, name: str, side: int) -> torch.Tensor:
        if f"{name}.base_kernel" not in self.weights:
            return x
        delta = self.linear(source, f"{name}.kernel_projection").reshape(len(x), 2, 2, HIDDEN // GROUP)
        return oracles.grouped_convolution(x, self.weights[f"{name}.base_kernel"][side], delta[:, side])

    def sees(self, kind: str, query: int, key: int) -> bool:
        return (kind == "full_attention" or abs(key - query) < WINDOW) and not (self.causal and key > query)

    def hidden(self, features: torch.Tensor, anchor: int, live: int) -> torch.Tensor:
        """`features` [F, n H] of the committed tokens, `live` columns -> mask hidden [live - 1, H]."""
        frontier = len(features)
        c = self.norm(self.linear(features.double(), "fc"), "hidden_norm")
        past, block = torch.arange(frontier), torch.arange(frontier, frontier + live)
        x = self.head.embedding[[anchor] + [MASK] * (live - 1)].double()
        x = x * self.settings.get("input_embedding_scale", 1.0)
        for i, kind in enumerate(self.settings["layer_types"]):
            attn, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
            n = self.norm(x, f"layers.{i}.input_layernorm")
            prepared = self.convolve(n, n, f"layers.{i}.attention_conv", 0)
            q = self.heads(prepared, f"{attn}.q_proj", block, f"{attn}.q_norm")
            keys = [self.heads(s, f"{attn}.k_proj", p, f"{attn}.k_norm") for s, p in ((c, past), (prepared, block))]
            values = [self.heads(s, f"{attn}.v_proj", past, None) for s in (c, prepared)]
            k, v = torch.cat(keys), torch.cat(values)
            a = []
            for column in range(live):
                seen = [key for key in range(frontier + live) if self.sees(kind, frontier + column, key)]
                a.append(oracles.attention(q[column], k[seen], v[seen], DIM**-0.5).flatten())
            out = self.linear(torch.stack(a), f"{attn}.o_proj")
            y = x + self.convolve(out, n, f"layers.{i}.attention_conv", 1)
            m = self.norm(y, f"layers.{i}.post_attention_layernorm")
            prepared = self.convolve(m, m, f"layers.{i}.mlp_conv", 0)
            gate, up = self.linear(prepared, f"{mlp}.gate_proj"), self.linear(prepared, f"{mlp}.up_proj")
            z = self.linear(gate * gate.sigmoid() * up, f"{mlp}.down_proj")
            x = y + self.convolve(z, m, f"layers.{i}.mlp_conv", 1)
        return self.norm(x, "norm")[1:]

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """FP64 [K, V]: rows that may not be proposed are -inf."""
        scores = hidden @ self.head.head.double().T * self.settings.get("output_multiplier", 1.0)
        cap = self.settings.get("final_logit_softcapping")
        scores = scores if cap is None else (scores / cap).tanh() * cap
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self.head.rows] = scores[:, self.head.rows]
        return allowed


def frequencies(settings: dict[str, Any]) -> tuple[torch.Tensor, float]:
    rope = settings["rope_parameters"]
    if rope["rope_type"] == "default":
        return oracles.plain_frequencies(DIM, rope["rope_theta"]), 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Qwen3Config(hidden_size=HIDDEN, num_attention_heads=HEADS, head_dim=DIM, max_position_embeddings=512)
    config.rope_parameters = dict(rope)
    return ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))


# ------------------------------------------------------------------------------------------------ a run of the drafter


@dataclass(frozen=True)
class Run:
    features: list[torch.Tensor]
    anchors: torch.Tensor
    live: torch.Tensor
    sampling: RowSampling
    proposal: Proposal
    hidden: torch.Tensor


def features_of(row: int, count: int) -> torch.Tensor:
    return torch.randn(count, TAPS * HIDDEN, generator=torch.Generator().manual_seed(500 + row))


def run(setup: Setup, contexts: list[int], live: list[int], width: int, temperature: float, piece: int = 17) -> Run:
    """Appends each row's context in pieces, all rows at once with ragged counts, then proposes. Planes start as NaN."""
    batch, drafter = len(contexts), setup.drafter
    kinds = setup.settings["layer_types"]
    local, full = kinds.count("sliding_attention"), kinds.count("full_attention")
    slots, pages = batch + 2, 2 * batch + 1
    dtype = drafter.feature.dtype
    formats = (dtype, torch.float16 if dtype == torch.bfloat16 else dtype)  # of K and V
    context = DraftContext(
        *(torch.full((slots, local, WINDOW, KV_HEADS, DIM), POISON, dtype=kept) for kept in formats),
        *(torch.full((pages, full, 64, KV_HEADS, DIM), POISON, dtype=kept) for kept in formats),
    )
    order = torch.Generator().manual_seed(3)
    rows = DraftRows(
        torch.randperm(slots, generator=order)[:batch],
        torch.randperm(pages, generator=order)[: 2 * batch].view(batch, 2),
    )
    features = [features_of(row, count) for row, count in enumerate(contexts)]
    start = torch.zeros(batch, dtype=torch.int64)
    while bool((start < torch.tensor(contexts)).any()):
        counts = (torch.tensor(contexts) - start).clamp(max=piece)
        chunk = torch.full((batch, piece, TAPS * HIDDEN), POISON, dtype=dtype)
        for row in range(batch):
            chunk[row, : counts[row]] = features[row][start[row] : start[row] + counts[row]]
        drafter.append_context(chunk, start, counts, rows, context)
        start = start + counts
    anchors = torch.arange(batch) * 5 % PUBLIC
    sampling = RowSampling(
        torch.full((batch,), temperature),
        torch.zeros(batch, dtype=torch.int64),
        torch.ones(batch),
        torch.arange(batch) + 77,
        torch.arange(batch) % 2,
    )
    arguments = anchors, torch.tensor(contexts), torch.tensor(live), width, rows, context
    proposal = drafter.propose(*arguments, sampling)
    return Run(features, anchors, torch.tensor(live), sampling, proposal, drafter._block(*arguments)[:, 1:])


def check(setup: Setup, contexts: list[int], live: list[int], width: int, temperature: float, causal: bool) -> None:
    got = run(setup, contexts, live, width, temperature)
    oracle = Oracle(setup, causal)
    two = setup.drafter.selector is not None
    for row, frontier in enumerate(contexts):
        drafts = live[row] - 1
        anchor = int(got.anchors[row])
        hidden = oracle.hidden(got.features[row], anchor, live[row])
        oracles.close(got.hidden[row, :drafts], hidden, 1e-4)
        scores = oracle.scores(hidden)
        order = scores.sort(dim=-1, descending=True)
        if not two:
            assert drafts == 0 or float((order.values[:, 0] - order.values[:, 1]).min()) > 1e-4, "a near tie"
            assert got.proposal.drafts[row, :drafts].tolist() == order.indices[:, 0].tolist()
            assert got.proposal.law is None
            continue
        assert got.proposal.candidates is not None and got.proposal.law is not None
        assert float((order.values[:, :TOP] - order.values[:, 1 : TOP + 1]).min()) > 1e-5, "a near tie"
        assert torch.equal(got.proposal.candidates[row], order.indices[:, :TOP])
        seed, sub = int(got.sampling.seeds[row]), int(got.sampling.sub[row])
        path, law, margin = oracles.walk(
            order.indices[:, :TOP],
            order.values[:, :TOP],
            hidden @ oracle.weights["candidate_selector.hidden_projection.weight"].T,
            oracle.weights["candidate_selector.predecessor_codebook"],
            oracle.weights["candidate_selector.successor_codebook"],
            anchor,
            temperature,
            [oracles.uniform(seed, frontier + i, PROPOSAL, sub) for i in range(drafts)],
        )
        assert margin > 1e-4, "a near tie: choose other inputs"
        assert got.proposal.drafts[row].tolist() == path
        oracles.close(got.proposal.law[row], law, 1e-4)


MIXED = ["sliding_attention", "sliding_attention", "full_attention"]
LOCAL = ["sliding_attention", "sliding_attention"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [2, 8])
def test_dflash_proposes_what_the_oracle_proposes(tmp_path: Path, width: int, causal: bool) -> None:
    setup = build(tmp_path, draft_settings("dflash", MIXED), causal)
    check(setup, CONTEXTS, [width] * len(CONTEXTS), width, 0.0, causal)


def test_dflash_rows_of_their_own_extent_equal_narrower_blocks(tmp_path: Path) -> None:
    """Near a budget's end a row computes Q = P + 1 columns only; the others must not be seen, and none is left over."""
    setup = build(tmp_path, draft_settings("dflash", MIXED))
    live = [8, 1, 3, 5, 2, 8, 7, 4]
    check(setup, CONTEXTS, live, 8, 0.0, False)
    wide = run(setup, [40], [8], 8, 0.0).hidden
    narrow = run(setup, [40], [3], 8, 0.0).hidden
    assert float((wide[0, :2] - narrow[0, :2]).abs().max()) > 1e-2, "attention is not causal: width matters"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_dflash2_proposes_the_candidates_path_and_law_of_the_oracle(
    tmp_path: Path, temperature: float, causal: bool
) -> None:
    setup = build(tmp_path, draft_settings("dflash2", LOCAL), causal)
    check(setup, CONTEXTS, [6] * len(CONTEXTS), 6, temperature, causal)


def test_scalars_of_a_config_scale_embedding_and_scores(tmp_path: Path) -> None:
    scalars = {"input_embedding_scale": 3.0, "output_multiplier": 0.3, "final_logit_softcapping": 2.0}
    setup = build(tmp_path, draft_settings("dflash2", MIXED, **scalars))
    check(setup, [0, 30], [5, 5], 5, 1.0, False)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_yarn_reaches_both_context_and_block(tmp_path: Path, kind: str) -> None:
    setup = build(tmp_path, draft_settings(kind, MIXED, rope_parameters=YARN))
    assert setup.drafter.rotary.factor > 1.1
    check(setup, [3, 70], [6, 6], 6, 0.0, False)


def test_leaked_partial_rotary_of_a_target_changes_nothing(tmp_path: Path) -> None:
    plain = draft_settings("dflash", MIXED)
    leaked = plain | {
        "rope_parameters": plain["rope_parameters"] | {"partial_rotary_factor": 0.25, "mrope_section": [1, 0, 0]}
    }
    setup = build(tmp_path, leaked)
    check(replace(setup, settings=plain), [20], [6], 6, 0.0, False)


def test_context_appended_in_any_pieces_gives_the_same_proposal(tmp_path: Path) -> None:
    setup = build(tmp_path, draft_settings("dflash2", MIXED))
    whole = run(setup, [70, 13], [6, 6], 6, 0.0, piece=70)
    for piece in (1, 5, 12, 64):
        pieces = run(setup, [70, 13], [6, 6], 6, 0.0, piece=piece)
        oracles.close(pieces.hidden, whole.hidden, 1e-5)
        assert torch.equal(pieces.proposal.drafts, whole.proposal.drafts)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@pytest.mark.parametrize(
    "rows", [list(range(1, PUBLIC, 3)), [4, 5, 6, 7, 8, 9, 10, 11, 40]], ids=["every third", "nine"]
)
def test_an_indexed_head_proposes_the_best_of_its_rows_by_their_token_ids(
    tmp_path: Path, kind: str, rows: list[int]
) -> None:
    setup = build(tmp_path, draft_settings(kind, MIXED), rows=rows)
    check(setup, CONTEXTS, [6] * len(CONTEXTS), 6, 0.0, False)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_bfloat16_with_its_ring_formats_stays_near_the_oracle(tmp_path: Path, kind: str) -> None:
    """Weights are the same BF16 numbers on both sides; activations and stored context differ by their rounding."""
    setup = build(tmp_path, draft_settings(kind, MIXED), dtype=torch.bfloat16)
    got = run(setup, CONTEXTS, [6] * len(CONTEXTS), 6, 0.0)
    oracle = Oracle(setup, False)
    for row, context in enumerate(got.features):
        exact = oracle.hidden(context.bfloat16(), int(got.anchors[row]), 6)
        error = float((got.hidden[row].double() - exact).norm() / exact.norm())
        assert error < 0.12, f"{len(context)} tokens of context"
