"""What do clients lose when the parts of a cluster are killed? Nothing: this counts it, on real Ray clusters.

    python -m bench.chaos [--kills 30] [--seed 1] [--overlapping 0] [--output DIRECTORY]

A head and two nodes on loopback with a replica of the demo model each; conversations with forks, streamed by clients
that resume; every part killed with SIGKILL in turn, sessions moved in between. Half of the conversations have owners
that draw alike and are compared with an undisturbed run; in the others (`salted`) no two owners draw alike. Both go on
at the same time, so that the same kills and moves meet both. The next kill waits until every log has its full set.

With `--overlapping` as many kills follow that do not wait for each other, but for a node's, or both copies of all
sessions would go at once. There a session may be refused for good, which is counted; before, none may. Writes
chaos.json and, of the seconds that streams stood still, migration.json. Exits with 1 after a token that was lost,
repeated or contradicted, a fault of the server, or a refusal that may not be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.facts import commit
from tests.e2e.chaos.comparison import Tally
from tests.e2e.chaos.experiment import Experiment, Outcome, overlapping_faults, single_faults
from tests.e2e.chaos.faults import KINDS, Kind
from tests.e2e.chaos.nodes import cluster_of

PLAIN, SALTED, LONGEST = 8, 8, 96
MOVES_BETWEEN = 2
APART_SECONDS = 6.0
"""Kills that overlap come up to so long after one another."""


def order_of(kills: int, seed: int) -> list[Kind]:
    """Every kind as often as the others, in a random order."""
    kinds: list[Kind] = [KINDS[number % len(KINDS)] for number in range(kills)]
    random.Random(seed).shuffle(kinds)
    return kinds


def played(outcome: Outcome) -> dict[str, Any]:
    """What was done, and what became of the conversations of each half."""

    def row(tally: Tally, conversations: int) -> dict[str, Any]:
        done = {"kills": outcome.kills, "migrations": outcome.moves}
        return {"seconds": round(outcome.seconds), "conversations": conversations, **done, **tally.counts()}

    return {
        "not_moved": dict(sorted(outcome.not_moved.items())),
        "log_records": outcome.log_records,
        "log_records_compared": outcome.log_records_compared,
        **row(outcome.plain, PLAIN),
        "salted": row(outcome.salted, SALTED),
    }


def halves(found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return found, found["salted"]


def in_both(found: dict[str, Any], name: str) -> int:
    return sum(half[name] for half in halves(found))


def sentence(found: dict[str, Any]) -> str:
    """What docs/sessions.md says of a chaos.json."""
    kills = ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in found["kills"].items())
    told = (
        f"a run of {sum(found['kills'].values())} kills ({kills}) and {found['migrations']} moves, one fault at a time,"
        f" while {in_both(found, 'conversations')} conversations of several turns with forks went on, half of them"
        " with owners that draw alike and half with owners that do not: "
        f"{in_both(found, 'turns')} turns and {in_both(found, 'tokens_published'):,} tokens, {_flaws(found)}, "
        f"{in_both(found, 'streams_resumed')} streams resumed, {found['tokens_recomputed']:,} tokens of the first half "
        f"computed again. {_given_up(found)}"
    )
    if overlapping := found.get("overlapping"):
        told += (
            f" Of {sum(overlapping['kills'].values())} kills that overlapped, with {overlapping['migrations']} moves, "
            f"{in_both(overlapping, 'turns')} turns and {in_both(overlapping, 'tokens_published'):,} tokens: "
            f"{_flaws(overlapping)}. {_given_up(overlapping)}"
        )
    return told


def _flaws(found: dict[str, Any]) -> str:
    counts = {word: in_both(found, f"tokens_{word}") for word in ("lost", "repeated", "contradicted")}
    if not any(counts.values()):
        return "none of them lost, repeated or contradicted"
    return ", ".join(f"{count:,} {word}" for word, count in counts.items())


def _given_up(found: dict[str, Any]) -> str:
    count = in_both(found, "given_up")
    if not count:
        return "No conversation was refused for good."
    return f"{count} of the conversations {'was' if count == 1 else 'were'} refused for good and stopped there."


def migration(outcome: Outcome) -> dict[str, Any]:
    return {
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
    parser.add_argument("--overlapping", type=int, default=0, metavar="KILLS")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    command = f"python -m bench.chaos --kills {args.kills} --seed {args.seed}"
    command += f" --overlapping {args.overlapping}" if args.overlapping else ""
    facts = {"command": command, "commit": commit()}
    outcomes: list[Outcome] = []
    with cluster_of(2) as nodes:
        experiment = Experiment(nodes, args.seed, PLAIN, SALTED, LONGEST)
        outcomes.append(single_faults(experiment, order_of(args.kills, args.seed), MOVES_BETWEEN))
        results = {
            "chaos": {**facts, "load": load(), **played(outcomes[0])},
            "migration": {**facts, "load": load(), **migration(outcomes[0])},
        }
        write(results, args.output)
        if args.overlapping:
            # Another seed: the cluster knows the sessions of this one.
            another = replace(experiment, seed=args.seed + 1)
            outcomes.append(overlapping_faults(another, order_of(args.overlapping, another.seed), APART_SECONDS))
            results["chaos"]["overlapping"] = played(outcomes[1])
            write(results, args.output)
    print(sentence(results["chaos"]))
    sys.exit(1 if wrong(*outcomes) else 0)


def write(results: dict[str, dict[str, Any]], directory: Path | None) -> None:
    for name, result in results.items():
        text = json.dumps(result, indent=2)
        print(text, flush=True)
        if directory:
            (directory / f"{name}.json").write_text(text + "\n")


def wrong(single: Outcome, *overlapping: Outcome) -> bool:
    """Whether something happened that must not, which is told. Where kills overlap, clients may be refused for good."""
    for outcome in (single, *overlapping):
        for tally in (outcome.plain, outcome.salted):
            print("\n".join((*tally.why_given_up, *tally.what)))
    refused = single.plain.why_given_up or single.salted.why_given_up
    return bool(refused) or not all(
        outcome.plain.clean and outcome.salted.clean and outcome.log_records_compared
        for outcome in (single, *overlapping)
    )


if __name__ == "__main__":
    main()
