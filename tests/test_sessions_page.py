"""docs/sessions.md says of kills what the results files say, and those are what was promised."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import chaos
from tests.e2e.chaos.comparison import Tally
from tests.e2e.chaos.experiment import Outcome
from tests.e2e.chaos.faults import KINDS

ROOT = Path(__file__).resolve().parents[1]


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "bench/results" / name).read_text())


def paragraph(title: str) -> str:
    """Up to the next one that has a title."""
    page = (ROOT / "docs/sessions.md").read_text().replace("\n", " ")
    return page.split(f"**{title}**")[1].split(" **")[0]


def test_what_kills_have_shown_is_what_the_results_file_says() -> None:
    assert chaos.sentence(results("chaos.json")) in paragraph("Shown by kills.")


def test_kills_have_shown_that_nothing_is_lost_repeated_or_contradicted() -> None:
    found = results("chaos.json")
    assert sum(found["kills"].values()) >= 30 <= found["migrations"]
    assert all(found["kills"][kind] >= 3 for kind in KINDS)
    for run in filter(None, (found, found.get("overlapping"))):
        assert all(half["tokens_published"] > 0 for half in chaos.halves(run))
        for flaw in ("tokens_lost", "tokens_repeated", "tokens_contradicted"):
            assert chaos.in_both(run, flaw) == 0, flaw


def test_what_a_run_compared_and_who_was_refused_is_in_its_file() -> None:
    found = results("chaos.json")
    for run in filter(None, (found, found.get("overlapping"))):
        assert run["log_records_compared"] > 0
        assert all(isinstance(half["refusals"], dict) for half in chaos.halves(run))


def test_the_command_that_the_page_names_is_that_of_the_run() -> None:
    page = (ROOT / "docs/sessions.md").read_text()
    (told,) = re.findall(r"^(python -m bench\.chaos .*?) --output \S+$", page, re.MULTILINE)
    assert told == results("chaos.json")["command"]


def outcome(plain: Tally, salted: Tally) -> Outcome:
    kills: dict[str, int] = dict.fromkeys(KINDS, 6)
    return Outcome(60.0, 16, kills, 58, {"session_busy": 1}, [], plain, salted, 1000, 900)


def test_what_a_run_was_is_told_with_what_went_wrong() -> None:
    plain = Tally(turns=3, streams_resumed=1, tokens_published=1000, tokens_recomputed=70)
    found = chaos.played(outcome(plain, Tally(turns=2, streams_resumed=1, tokens_published=234)))
    told = chaos.sentence(found)
    assert "30 kills (replica 6, node 6, directory 6, host store 6, ingress 6) and 58 moves" in told
    assert "5 turns and 1,234 tokens, none of them lost, repeated or contradicted, 2 streams resumed, 70 tokens" in told
    assert told.endswith("No conversation was refused for good.")
    lost = chaos.played(outcome(plain, Tally(tokens_lost=2, given_up=1)))
    told = chaos.sentence({**found, "overlapping": lost})
    assert "2 lost, 0 repeated, 0 contradicted. 1 of the conversations was refused for good" in told


@pytest.mark.parametrize(
    ("tally", "single", "overlapping"),
    [
        (Tally(), False, False),
        (Tally(given_up=1, why_given_up=["why"]), True, False),
        (Tally(tokens_lost=1), True, True),
        (Tally(what=["500 internal_error"]), True, True),
    ],
)
def test_a_run_is_wrong_that_lost_a_token_or_refused_a_client_for_good(
    tally: Tally, single: bool, overlapping: bool
) -> None:
    right = outcome(Tally(), Tally())
    assert chaos.wrong(outcome(Tally(), tally)) is single
    assert chaos.wrong(right, outcome(tally, Tally())) is overlapping


def failovers() -> dict[tuple[str, str, str], dict[str, Any]]:
    """Rows by who was killed, from when on seconds are counted, and until what."""
    rows = results("failover.cpu.json")["rows"]
    return {(row["killed"], row["from"], row.get("to", "token")): row for row in rows}


def test_how_long_a_stream_stands_still_is_what_the_results_file_says() -> None:
    section = paragraph("How long a stream stands still.")
    rows = failovers()
    replica, node = rows["replica", "kill", "token"], rows["node", "kill", "token"]
    middle, most = (f"{replica[name]:.2f} s" for name in ("p50_s", "most_s"))
    assert f"{middle} in the middle of {replica['kills']} kills, and after {most} at worst" in section
    assert f"Of {node['kills']} killed nodes it was {node['most_s']:.1f} s at worst" in section
    assert f"from then on, {rows['node', 'verdict', 'token']['most_s']:.2f} s" in section


def test_how_long_the_directory_takes_is_what_the_results_file_says() -> None:
    rows = failovers()
    if ("directory", "kill", "grant") not in rows:
        pytest.skip("the file is of before its kills were measured")
    grant, locate = (rows["directory", "kill", what] for what in ("grant", "locate"))
    assert (
        f"A killed directory said again where a session is after {locate['p50_s']:.1f} s in the middle of "
        f"{locate['kills']} kills, {locate['most_s']:.1f} s at worst, and gave out a new one after "
        f"{grant['p50_s']:.1f} s, {grant['most_s']:.1f} s at worst"
    ) in paragraph("How long a stream stands still.")


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        (("replica", "kill", "token"), 1.0),
        (("node", "verdict", "token"), 2.0),
        (("directory", "kill", "grant"), 5.0),
        (("directory", "kill", "locate"), 5.0),
    ],
)
def test_nobody_waits_for_longer_than_was_promised(row: tuple[str, str, str], seconds: float) -> None:
    """But for one kill in a hundred. Prefill is included."""
    found = failovers().get(row)
    if found is None and row[0] == "directory":
        pytest.skip("the file is of before its kills were measured")
    assert found is not None and 0 < found["p99_s"] <= seconds
