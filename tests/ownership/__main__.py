"""`python -m tests.ownership --first 100000 --seconds 900`: plays schedules for so long, and names every seed that
breaks a promise."""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter

from tests.ownership.cluster import run
from tests.ownership.truth import Broken

REPORT_SECONDS = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ownership", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, help="at most so many schedules")
    parser.add_argument("--seconds", type=float, default=60.0, help="for so long")
    asked = parser.parse_args()
    began = reported = time.monotonic()
    seen: Counter[str] = Counter()
    broken: list[int] = []
    for seed in itertools.islice(itertools.count(asked.first), asked.count):
        now = time.monotonic()
        if now - began > asked.seconds:
            break
        if now - reported > REPORT_SECONDS:
            reported = now
            print(f"{now - began:.0f} s: seed {seed}, {len(broken)} broken", flush=True)
        seen["schedules"] += 1
        try:
            counts = run(seed)
        except Broken as error:
            broken.append(seed)
            print(error, flush=True)
            continue
        seen.update(counts.faults)
        numbers = ("steps", "tokens", "takeovers", "forks", "lost", "found_again")
        seen.update({name: getattr(counts, name) for name in numbers})
    print(f"seeds from {asked.first}: {dict(seen)}; broken: {broken or 'none'}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
