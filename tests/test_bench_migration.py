"""bench/migration.py and bench/moves.py move state of 27B without a model; here its sizes are small ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bench import migration, moves
from bench.state_sizes import GEOMETRY_27B
from state.geometry import PAGE_TOKENS

SMALL = replace(
    GEOMETRY_27B, kv_layers=1, kv_heads=1, kv_head_dim=8, gdn_layers=1, gdn_heads=1, gdn_key_dim=8, gdn_value_dim=8,
    conv_channels=24, hidden_size=8, ring_layers=1, draft_kv_heads=1, draft_head_dim=8, window=64,
)  # fmt: skip
FULL_PAGES = migration.FRONTIER // PAGE_TOKENS


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "GEOMETRY_27B", SMALL)
    monkeypatch.setattr(migration, "RUNS", 1)
    monkeypatch.setattr(moves, "RUNS_OF_27B", 1)


def test_pages_that_went_ahead_are_not_in_the_pause():
    together, *ahead = migration.moves_of_27b()
    assert together["ahead_bytes"] == 0
    for row in ahead:
        assert row["ahead_bytes"] >= FULL_PAGES * SMALL.target_page_bytes
        assert row["ahead_bytes"] + row["pause_bytes"] == together["pause_bytes"]
    assert all(row["seconds"]["pause"] > 0 for row in (together, *ahead))


@pytest.mark.parametrize("hashed", [True, False])
def test_a_move_from_replica_to_replica_sends_as_many_bytes(hashed: bool):
    row = asyncio.run(moves.moves_of_27b(hashed))
    whole = migration.move_of_27b(migration.Way(ahead=True, hashed=hashed))
    assert (row["bytes_ahead"], row["bytes_in_pause"]) == (whole["ahead_bytes"], whole["pause_bytes"])
    assert row["moves"] == 1 and row["seconds"]["stands_p50"] > 0
