"""The order of the tests: what it names is there, and clusters share one process."""

from __future__ import annotations

from pathlib import Path

from tests.distribution import LONG, RAY, group_of, rank_of

ROOT = Path(__file__).parents[1]


def test_every_place_that_is_named_exists() -> None:
    assert [place for place in (*RAY, *LONG) if not (ROOT / place).exists()] == []


def test_clusters_come_first_and_in_one_process_and_other_files_each_have_their_own_turn() -> None:
    assert group_of("tests/e2e/test_durable.py") == group_of("tests/deployment/cluster/test_nodes.py") == "ray"
    assert group_of("tests/deployment/test_app.py") == "tests/deployment/test_app.py"
    files = [
        "tests/e2e/test_durable.py",
        "tests/engine/test_golden.py",
        "tests/deployment/test_app.py",
        "tests/test_bench.py",
    ]
    assert sorted(files, key=rank_of) == files and len({rank_of(file) for file in files}) == len(files)
