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
