"""The rounds of bench/round.py run at a tiny geometry on a CPU, keep as many tokens as they say, and their floors are
what must be read. Their times are not tests."""

from __future__ import annotations

import pytest
import torch

from bench import round_mixture, round_models, round_parts
from bench.round_parts import KEPT, floor_bytes, rounds, shares
from deployment.engine.loading import state_geometry
from model.drafter import Drafter
from model.target import Target
from tests.test_bench_round import TINY, TINY_DFLASH, TINY_DRAFT, TINY_MOE


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_models, "DEVICE", "cpu")
    sizes = {"DEVICE": torch.device("cpu"), "BATCHES": (1, 2), "PROFILED": ((2, 70),)}
    for name, value in (sizes | {"ROUNDS": 4, "WARM": 1}).items():
        monkeypatch.setattr(round_parts, name, value)


@pytest.fixture
def models() -> tuple[Target, Drafter]:
    return round_models.random_models(TINY, TINY_DRAFT)


def test_each_batch_and_context_that_fits_has_a_row_with_its_parts(models, monkeypatch):
    monkeypatch.setattr(round_parts, "operators", lambda executor, lanes: {"other_ms": 0.0})
    counts: list[list[int]] = []
    commit = round_parts.Executor.commit

    def watched(self, done, kept):
        counts.append(list(kept))
        return commit(self, done, kept)

    monkeypatch.setattr(round_parts.Executor, "commit", watched)
    rows = list(rounds("tiny", *models, drafts=7, tbps=1.0, contexts=(70, 130, 1000)))
    assert [(row["B"], row["context"], row["temperature"]) for row in rows] == [
        (2, 70, 0.0),
        *((batch, context, 0.7) for batch in (1, 2) for context in (70, 130)),
    ]
    for row in rows:
        assert set(row["parts"]) == {"append", "propose", "verify", "accept", "commit", "host"} and row["round_ms"] > 0
        assert ("other_ms" in row) == (row["context"] == 70 and row["B"] == 2)
    assert [lane[0] for lane in counts if len(lane) == 1][:5] == list(KEPT[:5])
    assert sum(KEPT) == 4 * len(KEPT)


def test_a_moment_is_counted_once_and_is_the_products_where_one_runs():
    spans = [
        ("norm", 0.0, 4.0),
        ("gemm", 1.0, 2.0),
        ("_stream_kernel", 1.5, 3.0),
        ("late", 2.5, 6.0),  # hidden until 3, and behind the norm until 4
        ("inner", 4.5, 5.0),
        ("nvjet", 5.0, 5.5),
        ("alone", 9.0, 9.5),
    ]
    assert shares(spans) == {"products": 2.5, "norm": 2.0, "late": 1.5, "alone": 0.5}
    assert sum(shares(spans[::-1]).values()) == 6.5


def test_the_floor_is_weights_once_heads_twice_and_the_state_of_every_lane(models):
    target, drafter = models
    geometry = state_geometry(TINY, TINY_DRAFT, torch.bfloat16)
    head = target.head.nbytes
    weights = sum(p.nbytes for p, _ in round_models.product_weights(target))
    one, two = (floor_bytes(target, drafter, geometry, batch, 128) for batch in (1, 2))
    lane = two - one
    rings = geometry.ring_bytes
    assert lane == 2 * geometry.target_page_bytes + geometry.gdn_bytes + geometry.conv_bytes + rings
    assert one - lane > weights + 2 * head
    assert floor_bytes(target, drafter, geometry, 1, 64) == one - geometry.target_page_bytes


def test_the_floor_of_a_mixture_counts_the_experts_that_its_layers_chose(monkeypatch):
    """Also pages of the drafter's full layer, which a lane has as many of as of the target's."""
    monkeypatch.setattr(round_parts, "PROFILED", ())
    target, drafter = round_models.random_models(TINY_MOE, TINY_DFLASH)
    chosen: list[round_mixture.Chosen] = []
    floor = round_parts.floor_bytes

    def watched(*args):
        chosen.append(args[-1])
        return floor(*args)

    monkeypatch.setattr(round_parts, "floor_bytes", watched)
    alone, both = rounds("tiny", target, drafter, drafts=7, tbps=1.0, contexts=(70, 1000))
    assert 2 <= alone["experts"] < both["experts"] <= 16
    counts = chosen[0].counts
    assert len(counts) == 4 * round_parts.COUNTED and all(2 <= count <= 16 for count in counts)
    geometry = state_geometry(TINY_MOE, TINY_DFLASH, torch.bfloat16)
    everything = floor_bytes(target, drafter, geometry, 1, 64)
    one = 2 * (2 * 16 * 32 + 32 * 16)
    four_of_each = round_mixture.Chosen([4] * 4)
    assert everything - floor_bytes(target, drafter, geometry, 1, 64, four_of_each) == 4 * 12 * one
    further = floor_bytes(target, drafter, geometry, 1, 128)
    assert further - everything == geometry.target_page_bytes + geometry.draft_page_bytes


def test_drafts_are_replaced_behind_a_proposal_and_nowhere_else():
    drafts = torch.full((64,), -1)
    ran: list[str] = []
    runs = round_mixture.VariedDrafts(lambda key, segment: segment(), drafts, 8)
    runs(("append", 1), lambda: ran.append("append"))
    assert int(drafts.max()) == -1
    runs(("propose", 1), lambda: ran.append("propose"))
    assert ran == ["append", "propose"] and set(drafts.tolist()) == set(range(8))
