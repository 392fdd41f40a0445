"""Where does each checkpoint of a session lie? In the words that say where a turn's state came from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from deployment.engine.commands import Hit
from deployment.ownership.words import Member
from deployment.wire import PlacedCheckpoint

KindAt = tuple[str, int]
"""A checkpoint's kind and frontier."""


def placed(
    device: Collection[KindAt],
    copied: Collection[KindAt],
    members: Iterable[Member],
    node: str,
    durable: Collection[KindAt],
) -> tuple[PlacedCheckpoint, ...]:
    """By frontier. `device`: those of the owner's engine; `copied`: those in the session's newest copy, which the host
    stores `members` hold, on the owner's `node` and others; `durable`: those that the owner wrote to the durable
    tier."""
    nodes = [member.node for member in members]
    stores: Sequence[Hit] = [*(["host"] if node in nodes else []), *(["peer"] if set(nodes) - {node} else [])]
    everywhere: list[tuple[Collection[KindAt], Sequence[Hit]]] = [
        (device, ["device"]), (copied, stores), (durable, ["disk"]),
    ]  # fmt: skip
    known = {one for held, _ in everywhere for one in held}
    return tuple(
        PlacedCheckpoint(*one, tuple(place for held, places in everywhere if one in held for place in places))
        for one in sorted(known, key=lambda one: (one[1], one[0]))
    )
