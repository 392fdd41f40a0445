"""Real processes on a real directory: killed without warning, or two of them at once."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from state.durable import DurableTier
from state.names import Epoch
from tests.state.durable_process import BUDGET, open_directory, pages, text
from tests.state.stores import KEY, document, segment

ROOT = Path(__file__).parents[2]
ENDLESS = 1_000_000


def start(directory: Path, *numbers: int) -> subprocess.Popen[str]:
    """`numbers`: epoch, how many publications, and after how many to sweep (0: never)."""
    command = [sys.executable, "-m", "tests.state.durable_process", str(directory), *map(str, numbers)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def check_whole(tier: DurableTier, epoch: int) -> int:
    """The sequence that is read, all of whose segments are there."""
    with tier.reading(KEY) as reading:
        assert reading is not None
        order = reading.publication.order
        assert order.epoch == Epoch(epoch, 0)
        assert reading.document == document(text(epoch, order.sequence))
        for data in pages(epoch, order.sequence):
            assert reading.segment(segment(data).sha256) == data
    assert tier.size() <= BUDGET
    return order.sequence


def kill_again_and_again(directory: Path, kills: int, sweep_every: int) -> None:
    chance = random.Random(kills)
    for _ in range(kills):
        process = start(directory, 1, ENDLESS, sweep_every)
        assert process.stdout is not None
        said = [process.stdout.readline()]
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
        said += process.stdout.read().split("\n")
        process.wait()
        published = [int(line) for line in said if line.strip()]
        # What was said to be published is; the one after that may be, and was not said.
        assert check_whole(open_directory(str(directory)), 1) in (published[-1], published[-1] + 1)
    later = open_directory(str(directory), ahead=7200.0)
    later.sweep()
    last = check_whole(later, 1)
    assert len([path for path in directory.rglob("*") if path.is_file()]) == len(pages(1, last)) + 1


def test_a_writer_that_is_killed_leaves_what_it_had_published(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path / "durable", 3, 0)  # who dies in a sweep keeps others waiting for seconds


@pytest.mark.soak
def test_a_writer_that_is_killed_two_hundred_times_leaves_what_it_had_published(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path / "durable", 200, 5)


def test_of_two_owners_at_once_the_stale_one_loses(tmp_path: Path) -> None:
    directory = tmp_path / "durable"
    stale = start(directory, 1, ENDLESS, 5)
    assert stale.stdout is not None
    assert stale.stdout.readline() == "0\n"
    successor = start(directory, 2, 20, 5)
    output, _ = successor.communicate(timeout=60)
    assert output.split() == [str(number) for number in range(20)]
    last = stale.communicate(timeout=60)[0].split()[-1]
    assert last == "stale"
    tier = open_directory(str(directory))
    assert check_whole(tier, 2) == 19
    tier.sweep()
    assert check_whole(tier, 2) == 19
    assert len([path for path in directory.rglob("*") if path.is_file()]) == len(pages(2, 19)) + 1
