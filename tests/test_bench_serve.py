"""bench/serve.py measures what it says, and bench/pictures.py draws what the results say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest

from bench import pictures, serve
from deployment.engine.service import EngineService
from deployment.load.traffic import Load
from tests.deployment.serving import serving
from tests.engine.driving import models, options

RECT = "{http://www.w3.org/2000/svg}rect"


def test_its_rows_are_of_all_turns_that_were_asked_for():
    engine = EngineService(models("dflash2"), options("dflash2", lanes=1, images=2))
    try:
        with serving() as url:
            chunk = serve.chunk_row(url, engine, Load(conversations=2, at_once=1, tokens=12))
            agents = serve.load_row("agents", url, Load(conversations=2, at_once=2, turns=2, tokens=4))
    finally:
        engine.close()
    assert chunk["texts"] > 0 and 0 <= chunk["rounds"] - chunk["texts"] <= 3, "the same turn over HTTP and by itself"
    assert chunk["http"]["count"] == chunk["texts"] and chunk["engine"]["count"] == chunk["rounds"]
    assert (agents["turns"], agents["tokens"], agents["cold"]["count"], agents["warm"]["count"]) == (4, 16, 2, 2)
    assert agents["reused_tokens"] > 0 and agents["bytes_written"] > 100_000 and agents["durable_bytes_written"] == 0


def test_bytes_are_counted_by_the_tier_that_they_went_to(monkeypatch: pytest.MonkeyPatch):
    told = {("host", "out"): 3, ("host", "in"): 50, ("durable", "out"): 7e6, ("durable", "in"): 900}
    lines = [
        f'dflash_tier_bytes_total{{direction="{direction}",replica="{replica}",tier="{tier}"}} {size}'
        for (tier, direction), size in told.items()
        for replica in ("a", "about")
    ]
    page = httpx.Response(200, text="\n".join(lines), request=httpx.Request("GET", "http://x"))
    monkeypatch.setattr(httpx, "get", lambda *_, **__: page)
    assert serve.written("http://x") == {"host": 6, "durable": 14_000_000}


def test_the_page_says_what_a_durable_directory_takes_once_that_was_measured():
    rows = json.loads((Path(__file__).parents[1] / "bench/results/serve.json").read_text())["rows"]
    without = [row for row in rows if row["what"] != serve.DURABLE]
    (agents,) = [row for row in rows if row["what"] == "agents"]
    durable = {**agents, "what": serve.DURABLE, "seconds": 61.2, "bytes_written": 5e6, "durable_bytes_written": 9e6}
    said = serve.sentence([*without, durable]).removeprefix(serve.sentence(without))
    assert said == " With a durable directory they take 61 s, and write 9 MB there beside 5 MB to the host store."


def test_bars_are_as_tall_as_the_acceptance_that_they_show():
    rows = [
        {"backend": backend, "K": 7, "text": text, "acceptance_length": length}
        for backend, text, length in [("dflash", "a", 2.0), ("dflash", "b", 4.0), ("none", "a", 1.0)]
    ]
    drawn = ElementTree.fromstring(pictures.acceptance(rows))
    bars = [bar for bar in drawn.iter(RECT) if len(bar)]
    tall = [float(bar.attrib["height"]) for bar in bars]
    assert len(bars) == 2 and tall[1] == 2 * tall[0] > 0
    assert [bar[0].text for bar in bars] == ["dflash, a: 2.00", "dflash, b: 4.00"]


def test_a_move_is_marked_with_the_longest_gap_around_it():
    chunks = [0.0, 0.1, 0.2, 0.5, 0.6, 0.7, 1.5, 1.6]
    drawn = pictures.migration({"chunks": chunks, "moves": [{"asked": 0.15, "answered": 0.25, "stands": 0.1}]})
    assert re.findall(r"<title>(.*?)</title>", drawn) == ["300 ms"], "not that of 800 ms, which is another matter"
    assert "The usual gap is 100 ms" in drawn and drawn.count('class="line"') == len(chunks)


def test_the_pictures_of_the_documentation_are_drawn_from_the_results(tmp_path: Path):
    pictures.draw(tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in pictures.PICTURES.iterdir()}
    pages = "".join(page.read_text(encoding="utf-8") for page in pictures.PICTURES.parent.glob("*.md"))
    assert "acceptance.svg" in drawn and all(f"(pictures/{name})" in pages for name in drawn)
