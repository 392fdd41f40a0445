"""Documents that lie: another value at a place of their manifest, or of anything that is maps and lists."""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Iterator
from random import Random
from typing import Any

VALUES: list[Any] = [
    None, True, 0, -1, 2**32, 2**53 - 1, 2**53, 2**64 - 1, -(2**63), 0.5, 1e308, math.nan, math.inf,
    "", "decode", "\x1b[2J", "y" * 5000, b"", b"\xff" * 8,
    [], [0], [0, 0], [1, 2, 3], {}, {"a": 1}, ["F32", [1]], ["F32", [2**52] * 6], [{}], [None],
]  # fmt: skip
"""What a field of a manifest that lies may hold."""


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield from [at] if at else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*at, key))


def altered(manifest: dict[str, Any], random: Random) -> dict[str, Any]:
    """Another value at one place, a place left out, or a field more."""
    changed = copy.deepcopy(manifest)
    *way, last = random.choice(list(places(changed)))
    parent = functools.reduce(operator.getitem, way, changed)
    kind = random.randrange(10)
    if kind == 0:
        del parent[last]
    elif kind == 1 and isinstance(parent, dict):
        parent[random.choice(["more", "\x1b[2J", "y" * 5000, "id", "segments"])] = copy.deepcopy(random.choice(VALUES))
    elif kind == 2 and isinstance(parent[last], int):
        parent[last] += random.choice([-64, -1, 1, 64])
    else:
        parent[last] = copy.deepcopy(random.choice(VALUES))
    return changed
