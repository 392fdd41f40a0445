"""Pictures of docs/pictures/, drawn as SVG from what bench/results/ says.

    python -m bench.pictures [--output DIRECTORY]

acceptance.svg   acceptance length of the demo model by drafter and kind of text (`bench/demo_model.py`)
migration.svg    a streamed answer whose session moves back and forth: when its texts came (`bench/moves.py --timeline`)

The same results give the same bytes. Colours are those of the page, dark or light.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PICTURES = ROOT / "docs" / "pictures"

STYLE = (
    "text{font:12px sans-serif;fill:#333}.axis{stroke:#999;stroke-width:1}.c0{fill:#3b6fb6}.c1{fill:#e08a2e}"
    ".c2{fill:#4b9a5b}.band{fill:#e08a2e;fill-opacity:.25}.line{stroke:#3b6fb6;stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)


@dataclass
class Drawing:
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, said: str, anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(said)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, said: str = "") -> None:
        """`said`: shown where the pointer rests on it."""
        title = f"<title>{escape(said)}</title>" if said else ""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect class="{kind}" {place}>{title}</rect>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "axis") -> None:
        self.parts.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    @property
    def svg(self) -> str:
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        return "\n".join(
            [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}</style>", *self.parts, "</svg>", ""]
        )


def acceptance(rows: Sequence[dict[str, Any]]) -> str:
    """Bars by kind of text, one a drafter. `rows`: of `bench/demo_model.py`."""
    drafted = [row for row in rows if row["backend"] != "none"]
    drafters = list(dict.fromkeys((row["backend"], row["K"]) for row in drafted))
    texts = list(dict.fromkeys(row["text"] for row in drafted))
    of = {(row["backend"], row["K"], row["text"]): row["acceptance_length"] for row in drafted}
    left, top, bar, high = 40, 40, 22, 220
    group = bar * len(drafters) + 26
    most = max(of.values())
    drawing = Drawing(left + group * len(texts) + 10, top + high + 40)
    drawing.text(left, 16, "Acceptance length of the demo model: tokens after the first, by rounds; one lane, greedy")
    for number, (backend, k) in enumerate(drafters):
        drawing.box(left + 130 * number, 22, 10, 10, f"c{number}")
        drawing.text(left + 130 * number + 15, 31, f"{backend}, K = {k}")
    base = top + high
    for mark in range(int(most) + 1):
        y = base - high * mark / most * 0.95
        drawing.text(left - 8, y + 4, str(mark), "end")
        drawing.line(left - 4, y, left, y)
    for index, text in enumerate(texts):
        x = left + 13 + group * index
        for number, (backend, k) in enumerate(drafters):
            value = of[backend, k, text]
            tall = high * value / most * 0.95
            drawing.box(x + bar * number, base - tall, bar - 3, tall, f"c{number}", f"{backend}, {text}: {value:.2f}")
            drawing.text(x + bar * (number + 0.5) - 1.5, base - tall - 3, f"{value:.1f}", "middle")
        drawing.text(x + bar * len(drafters) / 2, base + 18, text, "middle")
    drawing.line(left, base, drawing.width - 10, base)
    drawing.line(left, top, left, base)
    return drawing.svg


def migration(timeline: dict[str, Any]) -> str:
    """A line a text, and a band from each move's request to its answer. `timeline`: of `bench/moves.py`; seconds."""
    chunks, moves = timeline["chunks"], timeline["moves"]
    left, top, high, wide = 20, 46, 60, 820
    scale = wide / max(chunks[-1], *(move["answered"] for move in moves))
    drawing = Drawing(wide + 2 * left, top + high + 84)
    gaps = [after - before for before, after in itertools.pairwise(chunks)]
    drawing.text(left, 16, f"Texts of one streamed answer, whose session moves {len(moves)} times meanwhile")
    drawing.box(left, 22, 10, 10, "band")
    drawing.text(left + 15, 31, "from a move's request to its answer")
    drawing.box(left + 260, 22, 10, 10, "c1")
    drawing.text(left + 275, 31, "longest gap around it")
    for move in moves:
        begin, end = move["asked"], move["answered"]
        drawing.box(left + scale * begin, top, scale * (end - begin), high, "band")
        pause = max(range(len(gaps)), key=lambda n: (chunks[n + 1] >= begin and chunks[n] <= end + 0.3) * gaps[n])
        x = left + scale * chunks[pause]
        drawing.box(x, top + high + 4, scale * gaps[pause], 6, "c1", f"{1e3 * gaps[pause]:.0f} ms")
        drawing.text(x, top + high + 26, f"{1e3 * gaps[pause]:.0f} ms")
    for at in chunks:
        drawing.line(left + scale * at, top, left + scale * at, top + high, "line")
    base = top + high + 40
    drawing.line(left, base, left + wide, base)
    for second in range(int(wide / scale) + 1):
        drawing.line(left + scale * second, base, left + scale * second, base + 4)
        drawing.text(left + scale * second, base + 18, f"{second} s", "middle")
    usual = 1e3 * sorted(gaps)[len(gaps) // 2]
    drawing.text(left, base + 38, f"The usual gap is {usual:.0f} ms. Two replicas of one node, demo model on a CPU.")
    return drawing.svg


OF_RESULTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "acceptance.svg": ("demo_model.cpu.json", lambda found: acceptance(found["rows"])),
    "migration.svg": ("moves_timeline.cpu.json", migration),
}


def draw(output: Path) -> tuple[str, ...]:
    """Returns the results files that are not there, so that their pictures are not drawn."""
    output.mkdir(parents=True, exist_ok=True)
    missing: list[str] = []
    for picture, (results, drawn) in OF_RESULTS.items():
        if (RESULTS / results).exists():
            found = json.loads((RESULTS / results).read_text(encoding="utf-8"))
            (output / picture).write_text(drawn(found), encoding="utf-8")
        else:
            missing.append(results)
    return tuple(missing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PICTURES)
    for missing in draw(parser.parse_args().output):
        print(f"bench/results/{missing} is not there")


if __name__ == "__main__":
    main()
