"""docs/performance.md says of kernels what the results files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def microseconds(ms: float | None) -> str:
    """As the page writes it: two digits below ten, whole numbers above."""
    if ms is None:
        return "-"
    return f"{ms * 1e3:.1f}" if ms < 0.00995 else f"{ms * 1e3:,.0f}"


def measured(name: str) -> dict[tuple[str, str, str, str, int], list[str]]:
    """Cells of the page by operator, model, columns, context and lanes."""
    rows: list[dict[str, Any]] = json.loads((ROOT / "bench/results" / name).read_text())["rows"]
    return {
        (row["op"], row["model"], f"{row.get('W', row.get('Q')):,}", f"{row['context']:,}", row["B"]): [
            microseconds(row[time]) for time in ("ms", "floor_ms", "torch_ms" if "torch_ms" in row else "peer_ms")
        ]
        for row in rows
    }


def test_every_row_of_the_table_of_kernels_is_in_a_results_file() -> None:
    files = measured("proposal_kernels.h200.json") | measured("target_kernels.h200.json")
    section = (ROOT / "docs/performance.md").read_text().split("## ")[1]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    assert {row[0] for row in table} == {op for op, *_ in files}
    for op, model, columns, context, *cells in table:
        missing = ["-"] * 3
        found = [files.get((op, model, columns, context, lanes), missing) for lanes in (1, 8)]
        assert found != [missing] * 2 and cells == [x for times in found for x in times], op


def test_every_row_of_the_tables_of_a_mixture_is_in_a_results_file() -> None:
    """Rounds, and then the mixture's own kernels."""
    page = (ROOT / "docs/performance.md").read_text().split("## A mixture on one H200")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rounds = [line for line in lines if len(line) == 12 and line[0].isdigit()]
    kernels = [line for line in lines if line[0].startswith("mixture_")]
    assert rounds and kernels
    results = json.loads((ROOT / "bench/results/round.h200.json").read_text())["rounds"]
    found = [row for row in results if row["model"] == "35B-A3B" and row["temperature"] > 0]
    measured_rounds = {(row["K"], row["B"], row["context"]): row for row in found}
    for drafts, lanes, context, *cells in rounds:
        row = measured_rounds[int(drafts), int(lanes), int(context.replace(",", ""))]
        parts = [row["parts"][name] for name in ("append", "propose", "verify", "accept", "commit", "host")]
        assert cells == [f"{row['experts']:.0f}", *(f"{ms:.2f}" for ms in (row["round_ms"], row["floor_ms"], *parts))]
    of_kernels = json.loads((ROOT / "bench/results/moe_kernels.h200.json").read_text())["rows"]
    known = {(row["op"], row["B"], row["Q"]): row for row in of_kernels}
    for op, lanes, columns, *cells in kernels:
        row = known[op, int(lanes), int(columns.replace(",", ""))]
        assert cells == [microseconds(row[time]) for time in ("ms", "floor_ms", "peer_ms")]
