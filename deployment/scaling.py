"""How many engine replicas should there be? Serve's autoscaler asks `replicas_wanted` what the replicas' words say.

Serve's own policy counts calls, and calls are not what fills a replica: a response in the background is none, whoever
follows a turn is one and takes no lane, and a session at rest takes memory. So replicas tell of their lanes, and of
what their sessions keep in the host stores of their nodes. Serve brings that along as means of some seconds, and its
delays say how long an answer must stand before anything is done about it (`app.scaling`).
The function is pickled by value, with its module, into Serve's controller.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

BUSY = 0.8
"""Of all lanes, how many may be taken, or waited for, before another replica is started."""

FULL = 0.8
"""How much of the host stores of nodes that keep a replica recent sessions may take: the rest is for what comes."""

RECENT_SECONDS = 3600.0
"""How long after its last turn a session's state counts. Stores fill with what has rested longer, and drop that first:
it would hold every replica back for good."""

_LANES, _WANTED, _BYTES, _STORE = "lanes", "lanes_wanted", "session_bytes", "host_store_bytes/"


@dataclass(frozen=True)
class Demand:
    """Of one replica. `lanes_wanted`: by all turns that run or wait. `session_bytes`: what a copy takes of each of its
    sessions that had a turn in the last `RECENT_SECONDS`. `store_bytes`: of its node's host store, in all."""

    lanes: float
    lanes_wanted: float
    session_bytes: float
    node: str
    store_bytes: float

    def told(self) -> dict[str, float]:
        """Serve brings numbers along, and nothing else: the node is in a name."""
        words = {_LANES: self.lanes, _WANTED: self.lanes_wanted, _BYTES: self.session_bytes}
        return words | {f"{_STORE}{self.node}": self.store_bytes}


def heard(means: Mapping[str, Mapping[Any, float]]) -> list[Demand]:
    """What each replica told, of Serve's means by name and replica. One that has told nothing yet is left out."""
    stores = {
        replica: (name.removeprefix(_STORE), size)
        for name, told in means.items()
        if name.startswith(_STORE)
        for replica, size in told.items()
    }
    lanes, wanted, kept = (means.get(name, {}) for name in (_LANES, _WANTED, _BYTES))
    return [
        Demand(lanes[replica], wanted[replica], kept[replica], node, size)
        for replica, (node, size) in stores.items()
        if replica in lanes and replica in wanted and replica in kept
    ]


def replicas_wanted(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """A policy of Serve's autoscaler, which keeps to `replicas` and `most_replicas` itself."""
    demands = heard(context.aggregated_metrics or {})
    if not demands:
        return context.target_num_replicas, {}
    wanted = max(for_turns(demands), for_sessions(demands))
    if len(demands) < context.current_num_replicas:
        # Nobody knows what the others hold.
        wanted = max(wanted, context.target_num_replicas)
    return wanted, {}


def for_turns(demands: Sequence[Demand]) -> int:
    """So many that `BUSY` of their lanes are enough for what runs and waits."""
    lanes = sum(one.lanes for one in demands) / len(demands)
    return math.ceil(sum(one.lanes_wanted for one in demands) / (BUSY * lanes))


def for_sessions(demands: Sequence[Demand]) -> int:
    """The fewest that surely leave replicas on as many nodes as the sessions' memory needs, whichever of them go. A
    session's owner has its first copy on its own node, so fewer nodes would mean less room; more of them would not make
    more for what is there, so that this is never more than there are."""
    by_node = Counter(one.node for one in demands)
    store = max(one.store_bytes for one in demands)
    nodes = math.ceil(sum(one.session_bytes for one in demands) / (FULL * store))
    return 1 + sum(count for _, count in by_node.most_common(min(nodes, len(by_node)) - 1)) if nodes else 0
