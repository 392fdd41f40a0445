"""docs/operations.md says what settings, results and tests say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeApplicationSchema

from deployment.app import MOVE_BYTES_PER_SECOND, leaving_seconds
from deployment.replica import STUCK_END_SECONDS
from deployment.scaling import replicas_wanted
from deployment.settings import AppArgs

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/operations.md").read_text()


def test_every_file_that_it_names_is_there():
    named = set(re.findall(r"`((?:tests|bench|deployment)/[\w./]+\.\w+|cluster\.yaml)`", PAGE))
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_setting_that_it_names_is_one():
    names = set(re.findall(r"`([a-z]+(?:_[a-z]+)+|lanes|images|pages|durable)`", PAGE))
    of_serve = {"route_prefix", "runtime_env", "autoscaling_config"}
    assert names > of_serve and names - of_serve <= set(AppArgs.model_fields)
    assert f"ends itself {STUCK_END_SECONDS:g} s later" in PAGE
    assert f"`stuck_seconds` ({AppArgs(device='cuda').patience:g}, on a CPU {AppArgs().patience:g})" in PAGE


def test_who_says_how_soon_replicas_come_names_our_policy_again():
    (shown,) = [text for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "autoscaling_config" in text]
    (engines,) = ServeApplicationSchema.model_validate({"import_path": "a.b", **yaml.safe_load(shown)}).deployments
    policy = AutoscalingConfig.model_validate(engines.autoscaling_config).policy
    assert policy.get_policy().__code__ == replicas_wanted.__code__


@pytest.mark.parametrize("gib", [1, 64, 256])
def test_a_replica_has_as_long_to_leave_as_it_says(gib: int):
    assert re.search(rf"\b{leaving_seconds(gib << 30):.0f} s\s+of\s+{gib} GiB", PAGE)
    assert f"at {MOVE_BYTES_PER_SECOND / 1e9:g} GB/s" in PAGE


def test_moves_with_hashed_state_were_measured_at_what_it_says():
    rows = json.loads((ROOT / "bench/results/moves.cpu.json").read_text())["rows"]
    (hashed,) = [row for row in rows if row["what"].endswith(", hashed")]
    worst, usual = (hashed["bytes_in_pause"] / hashed["seconds"][name] / 1e9 for name in ("stands_p99", "stands_p50"))
    assert f"({worst:.2f} to {usual:.2f} GB/s on one CPU core" in PAGE


def test_sizes_and_times_of_a_session_are_measured_ones():
    rows = json.loads((ROOT / "bench/results/state.h200.json").read_text())["rows"]
    sizes = {int(found[1]): row for row in rows if (found := re.search(r"host, (\d+) tokens", row["what"]))}
    a_token = (sizes[32768]["bytes"] - sizes[8192]["bytes"]) // (32768 - 8192)
    for number in (sizes[32768]["bytes"], a_token, sizes[32768]["bytes"] - 32768 * a_token):
        assert f"{number:,}" in PAGE
    seconds = {row["what"].split()[0]: row["seconds"] for row in rows if "32768 tokens" in row["what"]}
    assert f"take {seconds['restore'] * 1e3:.0f} ms" in PAGE and f"{seconds['capture'] * 1e3:.0f} ms" in PAGE
    rows = json.loads((ROOT / "bench/results/throughput.cpu.json").read_text())["rows"]
    speeds = {row["lanes"]: row["tokens_per_second"] for row in rows if row["backend"] == "dflash2"}
    told = rf"1 lane\s+gave {speeds[1]:.0f} tokens/s, 4 gave {speeds[4]:.0f} and 8 gave {speeds[8]:.0f}"
    assert re.search(told, PAGE)
