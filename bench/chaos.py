"""What do clients lose when the parts of a cluster are killed? Nothing: this counts it, on real Ray clusters.

    python -m bench.chaos [--kills 30] [--seed 1] [--output DIRECTORY]

A head and two nodes on loopback with a replica of the demo model each; conversations with forks, streamed by clients
that resume; every part killed with SIGKILL in turn, sessions moved in between. Half of the conversations have owners
that draw alike and are compared with an undisturbed run; in the others (`salted`) no two owners draw alike. Both go on
at the same time, so that the same kills and moves meet both. Writes chaos.json and, of the seconds that streams stood
still, migration.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e.chaos.comparison import Tally
from tests.e2e.chaos.experiment import Experiment, Outcome, single_faults
from tests.e2e.chaos.faults import KINDS, Kind
from tests.e2e.chaos.nodes import cluster_of

PLAIN, SALTED, LONGEST = 8, 8, 96
MOVES_BETWEEN = 2


def order_of(kills: int, seed: int) -> list[Kind]:
    """Every kind as often as the others, in a random order."""
    kinds: list[Kind] = [KINDS[number % len(KINDS)] for number in range(kills)]
    random.Random(seed).shuffle(kinds)
    return kinds


def chaos(outcome: Outcome, command: str, commit: str) -> dict[str, Any]:
    def row(tally: Tally, conversations: int) -> dict[str, Any]:
        done = {"kills": outcome.kills, "migrations": outcome.moves}
        return {"seconds": round(outcome.seconds), "conversations": conversations, **done, **tally.counts()}

    named = {"command": command, "commit": commit, "load": load()}
    return {**named, **row(outcome.plain, PLAIN), "salted": row(outcome.salted, SALTED)}


def migration(outcome: Outcome, command: str, commit: str) -> dict[str, Any]:
    return {
        "command": command,
        "commit": commit,
        "load": load(),
        "document_bytes": outcome.document_bytes,
        "pause_of_a_move": percentiles(outcome.pauses),
        "kill_to_next_token": {kind: percentiles(seconds) for kind, seconds in outcome.after_kill.items()},
        "kill_to_full_sets": percentiles(outcome.whole_again),
    }


def percentiles(seconds: list[float]) -> dict[str, Any]:
    if not seconds:
        return {"count": 0}
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"count": len(seconds), "p50_s": round(float(p50), 3), "p99_s": round(float(p99), 3)}


def load() -> str:
    return f"{os.getloadavg()[1]:.1f} of {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    command = f"python -m bench.chaos --kills {args.kills} --seed {args.seed}"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    with cluster_of(2) as nodes:
        experiment = Experiment(nodes, args.seed, PLAIN, SALTED, LONGEST)
        outcome = single_faults(experiment, order_of(args.kills, args.seed), MOVES_BETWEEN)
    results = {"chaos": chaos(outcome, command, commit), "migration": migration(outcome, command, commit)}
    for name, result in results.items():
        text = json.dumps(result, indent=2)
        print(text, flush=True)
        if args.output:
            (args.output / f"{name}.json").write_text(text + "\n")
    for tally in (outcome.plain, outcome.salted):
        print("\n".join((*tally.why_given_up, *tally.what)))
    sys.exit(0 if outcome.plain.clean and outcome.salted.clean else 1)


if __name__ == "__main__":
    main()
