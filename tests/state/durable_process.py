"""Publishes one session again and again, and says so: its arguments: DIRECTORY EPOCH COUNT SWEEP_EVERY."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from state.byte_store import DirectoryStore
from state.durable import DurableTier
from state.errors import StaleError
from state.names import Epoch
from tests.state.stores import KEY, checkpoint, data_of, document, reader, verify

PAGES = 4
PAGE_BYTES = 20_000
BUDGET = 20_000_000
"""Room for what leases of killed processes hold on to for some seconds, some hundred kilobytes each."""


def pages(epoch: int, sequence: int) -> list[bytes]:
    """The pages of a publication: all but one are those of the one before."""
    return [data_of(f"{epoch}.{number} ", PAGE_BYTES) for number in range(sequence, sequence + PAGES)]


def text(epoch: int, sequence: int) -> str:
    return f"{epoch} {sequence}"


def open_directory(path: str, ahead: float = 0.0) -> DurableTier:
    """The tier, with a clock that is `ahead` seconds ahead."""
    return DurableTier(DirectoryStore(Path(path)), BUDGET, verify, lease_seconds=5.0, clock=lambda: time.time() + ahead)


def main(path: str, epoch: int, count: int, sweep_every: int) -> None:
    tier = open_directory(path)
    latest = tier.latest(KEY)
    first = latest[0].sequence + 1 if latest and latest[0].epoch == Epoch(epoch, 0) else 0
    for sequence in range(first, first + count):
        contents = pages(epoch, sequence)
        made = [checkpoint(text(epoch, sequence), contents)]
        try:
            done = tier.publish(
                KEY, Epoch(epoch, 0), sequence, document(text(epoch, sequence)), made, reader(*contents)
            )
        except StaleError:
            print("stale", flush=True)
            return
        print(sequence if done.payload else "no room", flush=True)
        if sweep_every and sequence % sweep_every == 0:
            tier.sweep()


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:]))
