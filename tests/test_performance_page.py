"""docs/performance.md says of kernels, rounds and starts what the results files say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench import serve

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


def tables(section: str) -> list[list[list[str]]]:
    """The rows of each table of a section, without its head."""
    page = (ROOT / "docs/performance.md").read_text()
    text = page.split(f"## {section}\n")[1].split("\n## ")[0]
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("| ")]
    return [[line.strip("| ").split(" | ") for line in block[2:]] for block in blocks]


def results(name: str, table: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "bench/results" / name).read_text())[table]


def rounds_of(model: str) -> list[dict[str, Any]]:
    return [row for row in results("round.h200.json", "rounds") if row["model"] == model]


def test_rounds_and_their_parts_are_those_of_the_results_file() -> None:
    drawn = {(row["B"], row["context"]): row for row in rounds_of("27B") if row["temperature"]}
    rounds, parts, _ = tables("A round of 27B on one H200")
    contexts = sorted({context for _, context in drawn})
    for lanes, *cells in rounds:
        for context, cell in zip(contexts, cells, strict=True):
            row = drawn.pop((int(lanes), context), None)
            assert cell == (f"{row['round_ms']:.1f} ({row['floor_ms']:.1f})" if row else "-")
    assert not drawn
    found = {(row["B"], row["context"], row["temperature"]): row for row in rounds_of("27B")}
    for lanes, context, *cells in parts:
        row = found[int(lanes), int(context.replace(",", "")), 0.7]
        assert cells == [f"{ms:.2f}" for ms in row["parts"].values()]


def test_what_drafting_costs_the_demo_model_is_what_the_results_file_says() -> None:
    rows = json.loads((ROOT / "bench/results/throughput.cpu.json").read_text())["rows"]
    by_place = {(row["backend"], row["lanes"]): f"{row['tokens_per_second']:.0f}" for row in rows}
    one, eight = ([by_place[name, lanes] for name in ("none", "dflash2", "dflash")] for lanes in (1, 8))
    told = rf"give {one[0]} tokens/s\s+on one CPU core without a drafter, {one[1]} with DFlash2 "
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    told += rf"[^;]* and {one[2]} with DFlash"
    assert re.search(rf"{told}; with eight lanes {eight[0]}, {eight[1]}\s+and {eight[2]}\.", page)


def test_starts_are_those_of_the_results_file() -> None:
    by_cache = {row["triton_cache"]: row for row in results("ready.h200.json", "ready")}
    *_, starts = tables("A round of 27B on one H200")
    names = ("imports", "load", "pools", "capture", "first_token")
    for cache, *cells in starts:
        row = by_cache.pop(cache)
        assert cells == [f"{seconds:.1f} s" for seconds in (*(row["seconds"][name] for name in names), row["total_s"])]
    assert not by_cache


def test_a_mixtures_rounds_and_kernels_are_those_of_the_results_files() -> None:
    rounds, kernels = tables("A mixture on one H200")
    drawn = {(row["K"], row["B"], row["context"]): row for row in rounds_of("35B-A3B") if row["temperature"]}
    for drafts, lanes, context, experts, *cells in rounds:
        row = drawn[int(drafts), int(lanes), int(context.replace(",", ""))]
        assert experts == f"{row['experts']:.0f}"
        assert cells == [f"{ms:.2f}" for ms in (row["round_ms"], row["floor_ms"], *row["parts"].values())]
    known = {(row["op"], row["B"], row["Q"]): row for row in results("moe_kernels.h200.json", "rows")}
    for op, lanes, columns, *cells in kernels:
        row = known.pop((op, int(lanes), int(columns.replace(",", ""))))
        assert cells == [microseconds(row[time]) for time in ("ms", "floor_ms", "peer_ms")]
    assert not known


def test_what_serving_costs_is_what_the_results_file_says() -> None:
    section = (ROOT / "docs/performance.md").read_text().split("## Serving the demo model\n")[1].split("\n## ")[0]
    rows = results("serve.json", "rows")
    assert serve.table(rows) in section
    assert serve.sentence(rows) in section.replace("\n", " ")


def test_what_a_client_notices_of_moves_is_what_the_results_file_says() -> None:
    page = (ROOT / "docs/performance.md").read_text()
    section = page.split("## Sessions on the move\n")[1].split("\n## ")[0].replace("\n", " ")
    *of_27b, demo = results("moves.cpu.json", "rows")
    ms = {name: f"{1e3 * seconds:.0f} ms" for name, seconds in demo["seconds"].items()}
    assert f"of {demo['moves']} moves" in section
    assert (
        f"{ms['pause_p50']} longer than the usual one ({ms['usual_gap']}) in the middle, and {ms['pause_p99']}"
        in section
    )
    assert f"{demo['bytes_ahead'] / 1e6:.1f} MB went while the turn decoded" in section
    assert f"{demo['bytes_in_pause'] / 1e6:.2f} MB while it stood" in section
    hashed, unhashed = (f"{row['seconds']['stands_p50']:.1f} s" for row in of_27b)
    assert f"{hashed} between two nodes, and {unhashed} on one" in section
