"""What befalls a cluster. Every fault ends by itself, so that a schedule ends in calm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deployment.ownership.messages import (
    Append,
    Bring,
    Claim,
    Ends,
    Found,
    Grant,
    Held,
    Install,
    Join,
    Joined,
    Known,
    Moved,
    NameSet,
    Offer,
    Part,
    Put,
    Receipt,
    Seal,
    Silent,
    Trim,
)
from tests.ownership.actors import Moment, Process
from tests.ownership.cluster import VERDICT_SECONDS, Cluster, Fault
from tests.ownership.network import HEAD


def kill_replica(cluster: Cluster) -> None:
    """Its raylet reports the exit, if the head can be reached; another replica starts."""
    name = _any(cluster, sorted(cluster.replicas))
    if name is not None:
        node = cluster.replicas[name].node
        _end_replica(cluster, name)
        cluster.net.after(2.0, cluster.add_replica, node)


def stall_replica(cluster: Cluster) -> None:
    """Often past its lease."""
    name = _any(cluster, sorted(cluster.replicas))
    if name is not None:
        cluster.replicas[name].stall(_seconds(cluster, 20.0))


def kill_store(cluster: Cluster) -> None:
    """The process alone: its arena is found again."""
    node = _any(cluster, cluster.nodes())
    if node is not None and cluster.stores[node].up:
        store = cluster.stores[node]
        store.kill()
        cluster.net.after(cluster.net.random.uniform(0.5, 8.0), store.start)


def lose_arena(cluster: Cluster) -> None:
    node = _any(cluster, cluster.nodes())
    if node is not None and cluster.stores[node].up:
        store = cluster.stores[node]
        store.kill()
        store.format()
        cluster.net.after(1.0, store.start)


def stall_store(cluster: Cluster) -> None:
    node = _any(cluster, cluster.nodes())
    if node is not None:
        cluster.stores[node].stall(_seconds(cluster, 12.0))


def kill_node(cluster: Cluster) -> None:
    """With all that is on it; another node comes."""
    node = _any(cluster, cluster.nodes())
    if node is not None:
        _end_node(cluster, node)
        cluster.net.after(VERDICT_SECONDS, _declare_dead, cluster, node)
        cluster.net.after(5.0, cluster.add_node)


def cut_off_from_head(cluster: Cluster) -> None:
    node = _any(cluster, cluster.nodes())
    if node is not None:
        _cut(cluster, node, [HEAD])


def cut_off_from_all(cluster: Cluster) -> None:
    node = _any(cluster, cluster.nodes())
    if node is not None:
        _cut(cluster, node, [HEAD, *(other for other in cluster.nodes() if other != node)])


def cut_between_nodes(cluster: Cluster) -> None:
    nodes = cluster.nodes()
    if len(nodes) >= 2:
        here, there = cluster.net.random.sample(nodes, 2)
        _cut(cluster, here, [there])


def restart_directory(cluster: Cluster) -> None:
    if cluster.directory.up:
        cluster.directory.kill()
        cluster.net.after(cluster.net.random.uniform(0.5, 3.0), cluster.directory.start)


def stall_directory(cluster: Cluster) -> None:
    """Often for longer than leases last."""
    cluster.directory.stall(_seconds(cluster, 15.0))


def stall_directory_over_a_word(cluster: Cluster) -> None:
    """It has decided who gets a session, or which store counts no more, and nobody hears of it; or it is just about
    to."""
    _stall_over(cluster, [cluster.directory], [Claim, Held, Joined, Silent, Found])


def stall_store_over_a_word(cluster: Cluster) -> None:
    """It has written what it was asked, and nobody hears of it; or it has not yet."""
    _stall_over(cluster, cluster.stores.values(), [Seal, NameSet, Append, Install, Put, Bring, Trim])


def stall_replica_over_a_word(cluster: Cluster) -> None:
    """In the midst of a takeover, of a move, or of new copies."""
    words = [Grant, Known, Ends, Part, Receipt, Join, Offer, Moved]
    _stall_over(cluster, cluster.replicas.values(), words)


FIRST_FAULTS: list[Fault] = [
    kill_replica,
    stall_replica,
    kill_store,
    lose_arena,
    stall_store,
    kill_node,
    cut_off_from_head,
    cut_off_from_all,
    cut_between_nodes,
    restart_directory,
]
"""Seeds that are known by their numbers were found with these."""

FAULTS: list[Fault] = [
    *FIRST_FAULTS,
    stall_directory,
    stall_directory_over_a_word,
    stall_store_over_a_word,
    stall_replica_over_a_word,
]


def _any(cluster: Cluster, names: list[str]) -> str | None:
    return cluster.net.random.choice(names) if names else None


def _seconds(cluster: Cluster, longest: float) -> float:
    return cluster.net.random.uniform(1.0, longest)


def _stall_over(cluster: Cluster, processes: Iterable[Process], words: Sequence[type]) -> None:
    """One of them, whichever comes to such a word first, if that is soon."""
    random = cluster.net.random
    moment = Moment(random.choice(words), random.random() < 0.5, _seconds(cluster, 15.0), cluster.net.now + 5.0)
    for process in processes:
        process.moment = moment


def _end_replica(cluster: Cluster, name: str) -> None:
    replica = cluster.replicas.pop(name)
    replica.kill()
    if cluster.net.reachable(replica.node, HEAD):
        cluster.net.after(0.3, _report_exit, cluster, name)


def _report_exit(cluster: Cluster, name: str) -> None:
    cluster.exited.append(name)
    cluster.directory.hear(cluster.directory.replica_exited, name)


def _end_node(cluster: Cluster, node: str) -> None:
    store = cluster.stores.pop(node, None)
    if store is not None:
        store.kill()
    for name, replica in list(cluster.replicas.items()):
        if replica.node == node:
            cluster.replicas.pop(name).kill()


def _declare_dead(cluster: Cluster, node: str) -> None:
    cluster.dead_nodes.append(node)
    cluster.directory.hear(cluster.directory.node_died, node)


def _cut(cluster: Cluster, node: str, others: list[str]) -> None:
    links = {frozenset((node, other)) for other in others}
    cluster.net.cut |= links
    seconds = cluster.net.random.uniform(1.0, 15.0)
    dead = HEAD in others and seconds > VERDICT_SECONDS
    if dead:
        cluster.net.after(VERDICT_SECONDS, _declare_dead, cluster, node)
    cluster.net.after(seconds, _heal, cluster, node, links, dead)


def _heal(cluster: Cluster, node: str, links: set[frozenset[str]], dead: bool) -> None:
    cluster.net.cut -= links
    if dead and node in cluster.stores:  # its raylet learns that it was declared dead, and ends all that it started
        _end_node(cluster, node)
        cluster.add_node()
