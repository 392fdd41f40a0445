"""The dashboard asks for metrics that there are, by labels that they have, and leaves none out."""

from __future__ import annotations

import json
import re
from importlib import resources
from itertools import combinations
from typing import Any

from deployment.metrics import catalog

DASHBOARD = json.loads((resources.files("deployment") / "dashboards" / "grafana.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]

KNOWN = {
    name: family
    for family in catalog.ALL
    for name in (
        [f"{family.name}_{part}" for part in ("bucket", "sum", "count")]
        if family.kind == "histogram"
        else [family.name]
    )
}


def asked_for(query: str) -> list[str]:
    return re.findall(r"\bdflash_\w+", query)


def test_every_metric_that_it_shows_exists_and_every_one_that_exists_is_shown():
    shown = {name for query in QUERIES for name in asked_for(query)}
    assert shown <= set(KNOWN)
    assert {KNOWN[name] for name in shown} == set(catalog.ALL)


def test_it_groups_by_labels_that_its_metrics_have_and_names_lines_by_labels_that_are_left():
    for panel in PANELS:
        for target in panel["targets"]:
            query = target["expr"]
            groups = re.findall(r"sum by \(([^)]*)\) \((?:rate\()?(dflash_\w+)", query)
            assert len(groups) == query.count(" by ("), f"{panel['title']}: grouped in a way that nobody checks"
            left: set[str] = set()
            for labels, name in groups:
                has = {*KNOWN[name].labels, *(["le"] if name.endswith("_bucket") else [])}
                assert set(labels.split(", ")) <= has, f"{panel['title']}: {name} has no {labels}"
                left |= set(labels.split(", "))
            left -= {"le"} if query.startswith("histogram_quantile") else set()
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) == left, panel["title"]


def test_counters_are_shown_as_rates_and_gauges_are_not():
    for query in QUERIES:
        rated = set(re.findall(r"rate\((dflash_\w+)\[\$__rate_interval\]\)", query))
        assert {name for name in asked_for(query) if KNOWN[name].kind != "gauge"} == rated
        assert query.count("(") == query.count(")")


def test_its_panels_have_ids_of_their_own_and_do_not_cover_each_other():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
