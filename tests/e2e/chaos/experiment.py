"""One experiment: conversations under faults, then the same ones undisturbed, and what the comparison says."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.e2e.chaos.comparison import Tally, tally
from tests.e2e.chaos.conversations import conversation
from tests.e2e.chaos.copies import Copies
from tests.e2e.chaos.faults import Faults, Kind
from tests.e2e.chaos.nodes import Nodes
from tests.e2e.chaos.timing import seconds_after_kills, seconds_of_moves
from tests.e2e.chaos.workload import Workload

STEPS = 200
"""More than any conversation comes to before the faults are over."""

PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class Experiment:
    """`plain` and `salted`: conversations of each kind; `longest`: tokens of the longest answer."""

    nodes: Nodes
    seed: int
    plain: int
    salted: int
    longest: int


@dataclass
class Outcome:
    """`after_kill`: seconds from a kill to the next token of each stream whose owner died, by kind; `pauses`: the
    longest gap of chunks around each move less the stream's median gap, in seconds. `document_bytes`: what a session's
    state came to at a turn's end, in the middle. `log_records`: that were read from stores; `log_records_compared`:
    from those of two nodes. `nothing_to_kill`: attempts at a kill that met nobody."""

    seconds: float
    conversations: int
    kills: dict[str, int]
    moves: int
    not_moved: dict[str, int]
    whole_again: list[float]
    plain: Tally
    salted: Tally
    log_records: int
    log_records_compared: int
    nothing_to_kill: dict[str, int] = field(default_factory=dict)
    after_kill: dict[str, list[float]] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    document_bytes: int = 0


def single_faults(experiment: Experiment, kinds: Sequence[Kind], moves_between: int) -> Outcome:
    """The next kill waits until every log has its full set again."""
    return _run(experiment, lambda faults: faults.one_at_a_time(kinds, moves_between))


def overlapping_faults(experiment: Experiment, kinds: Sequence[Kind], seconds: float) -> Outcome:
    """Kills up to `seconds` apart."""
    return _run(experiment, lambda faults: faults.overlapping(kinds, seconds))


def _run(experiment: Experiment, disturb: Callable[[Faults], None]) -> Outcome:
    began = time.monotonic()
    nodes, seed = experiment.nodes, experiment.seed
    numbers = range(experiment.plain + experiment.salted)
    planned = [
        conversation(seed, number, STEPS, experiment.longest, salted=number >= experiment.plain) for number in numbers
    ]
    workload = Workload(nodes.url, f"disturbed-{seed}", planned, PAUSE_SECONDS)
    faults = Faults(nodes, workload, random.Random(seed))
    with workload.begun(), Copies(nodes).watched() as copies:
        disturb(faults)
        workload.stop()
        talks = workload.finish()
    plain, salted = talks[: experiment.plain], talks[experiment.plain :]
    calm = Workload(nodes.url, f"calm-{seed}", [talk.conversation.first(talk.steps) for talk in plain])
    with calm.begun():
        undisturbed = calm.finish()
    for talk in undisturbed:
        if talk.given_up is not None:
            raise talk.given_up
    died = [kill.at for kill in faults.kills if kill.kind == "ingress"]
    compared = tally(plain, undisturbed, copies, died), tally(salted, None, copies, died)
    compared[1].what.extend(copies.contradictions)
    compared[1].what.extend(f"a move: {refusal}" for refusal in faults.refused_moves if refusal.is_fault(died))
    return Outcome(
        seconds=time.monotonic() - began,
        conversations=len(talks),
        kills=faults.counts,
        moves=len(faults.moves),
        not_moved=Counter(refusal.code for refusal in faults.refused_moves),
        whole_again=[round(seconds, 2) for seconds in faults.waited],
        plain=compared[0],
        salted=compared[1],
        log_records=copies.records,
        log_records_compared=copies.compared,
        nothing_to_kill=dict(faults.nothing_to_kill),
        after_kill=seconds_after_kills(talks, faults.kills),
        pauses=seconds_of_moves(talks, faults.moves),
        document_bytes=int(statistics.median(taken.size for talk in talks for taken in talk.turns)),
    )
