"""Names, types, units and texts of all metrics, as `promtool check metrics` would look at them, and labels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployment.engine.counts import Distribution
from deployment.metrics import catalog
from deployment.metrics.page import Page

UNITS = ("seconds", "bytes", "tokens", "info", "total")
OTHER_UNITS = re.compile(
    r"_(ms|millis\w*|micros\w*|minutes|hours|kb|kib|mb|mib|gb|gib|kilobytes|megabytes|percent)(_|$)"
)
NO_UNIT = {
    "dflash_turns_open", "dflash_replicas", "dflash_lanes", "dflash_lanes_running", "dflash_turns_queued",
    "dflash_turns_preempted", "dflash_sessions", "dflash_device_pages", "dflash_device_pages_free",
    "dflash_device_images", "dflash_device_images_free",
}  # fmt: skip
"""Gauges of things that are counted."""

LABELS = {"replica", "node", "model", "backend", "hit", "reason", "when", "code", "part", "position", "kind", "tier",
          "direction", "outcome", "phase"}  # fmt: skip
"""Of each it is known how many values it can have. A session, a turn, a tenant or a key is not among them."""


@pytest.mark.parametrize("family", catalog.ALL, ids=lambda family: family.name)
def test_a_name_says_its_type_and_its_unit(family: catalog.Family):
    assert re.fullmatch(r"dflash(_[a-z0-9]+)+", family.name)
    assert family.name.endswith("_total") == (family.kind == "counter")
    assert not re.search(r"_(counter|gauge|histogram|summary|count|sum|bucket)(_|$)", family.name)
    assert not OTHER_UNITS.search(family.name)
    assert family.name.rpartition("_")[2] in UNITS or family.name in NO_UNIT
    assert family.about.endswith(".") and family.about[0].isalnum() and "\n" not in family.about
    assert set(family.labels) <= LABELS and not {"le", "quantile", "job", "instance"} & set(family.labels)


def test_the_documentation_lists_all_of_them_as_they_are():
    page = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert table == [
        [f"`{family.name}`", family.kind, ", ".join(f"`{label}`" for label in family.labels) or "-", family.about]
        for family in catalog.ALL
    ]


def test_names_are_of_one_metric_each():
    names = [family.name for family in catalog.ALL]
    assert len(names) == len(set(names)) > 30


def test_a_page_names_every_family_before_anything_has_happened():
    text = Page().text.decode()
    for family in catalog.ALL:
        assert text.count(f"# HELP {family.name} ") == text.count(f"# TYPE {family.name} {family.kind}\n") == 1
    assert "_created" not in text


def test_another_parser_reads_what_was_written():
    page = Page()
    page.add(catalog.ROUNDS, 7, replica='a "b"\\c\nd')
    page.each(catalog.VERIFIED, {"2": 5, "1": 6}, "position", replica="a")
    page.distribution(catalog.CHUNK_GAP, Distribution((0.5, 1.0), (2, 1, 1), 3.25))
    read = {family.name: family for family in text_string_to_metric_families(page.text.decode())}
    (sample,) = read["dflash_rounds"].samples
    assert sample.name == "dflash_rounds_total" and sample.value == 7 and sample.labels["replica"] == 'a "b"\\c\nd'
    values = {sample.labels["position"]: sample.value for sample in read["dflash_drafts_verified"].samples}
    assert values == {"1": 6, "2": 5}
    gaps = {
        (sample.name, sample.labels.get("le")): sample.value for sample in read["dflash_inter_chunk_seconds"].samples
    }
    assert gaps == {
        ("dflash_inter_chunk_seconds_bucket", "0.5"): 2,
        ("dflash_inter_chunk_seconds_bucket", "1.0"): 3,
        ("dflash_inter_chunk_seconds_bucket", "+Inf"): 4,
        ("dflash_inter_chunk_seconds_sum", None): 3.25,
        ("dflash_inter_chunk_seconds_count", None): 4,
    }


@pytest.mark.parametrize("labels", [{}, {"replica": "a", "session": "s"}, {"session": "s"}])
def test_labels_that_are_not_a_familys_own_are_an_error(labels: dict[str, str]):
    with pytest.raises(ValueError, match="dflash_rounds_total: labels are"):
        Page().add(catalog.ROUNDS, 1, **labels)
