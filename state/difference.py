"""Where do two session documents differ? By field, by token, by plane, layer and page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from state.document import SessionDocument
from state.fields import Tokens
from state.geometry import PAGE_TOKENS
from state.layouts import kind_of
from state.manifest import CheckpointEntry
from state.media_manifest import MediaEntry, bare


@dataclass(frozen=True)
class Difference:
    """`place` names what differs; `left` and `right` say how, in words."""

    place: str
    left: str
    right: str


def differences(left: SessionDocument, right: SessionDocument) -> Iterator[Difference]:
    """All of them, in the order of the manifest. Checkpoints belong together by kind, and by their order among those of
    one kind; payloads must be checked."""
    yield from _facts("fingerprint", left.manifest.fingerprint, right.manifest.fingerprint)
    one, other = left.manifest.session, right.manifest.session
    for name in ("id", "branch", "epoch", "order", "opener", "frontier"):
        if getattr(one, name) != getattr(other, name):
            yield Difference(f"session.{name}", str(getattr(one, name)), str(getattr(other, name)))
    yield from _tokens("ledger", one.ledger, other.ledger)
    yield from _entries("media", *map(_media, (left.manifest.media, right.manifest.media)))
    yield from _entries("transcript", one.transcript, other.transcript)
    yield from _entries("turns", one.turns, other.turns)
    yield from _entries("fork_points", one.fork_points, other.fork_points)
    for number, ledgers in enumerate(zip(one.fork_ledgers, other.fork_ledgers, strict=False)):
        yield from _tokens(f"fork_points[{number}].ledger", *ledgers)
    yield from _facts("layouts", left.manifest.layouts, right.manifest.layouts)
    lefts, rights = _by_kind(left), _by_kind(right)
    for kind, number in [*lefts, *(which for which in rights if which not in lefts)]:
        which = (kind, number)
        place = f"checkpoint {kind}" + (f" {number}" if number > 1 else "")
        if which in lefts and which in rights:
            yield from _checkpoints(place, left, lefts[which], right, rights[which])
        else:
            yield Difference(place, *("there" if which in side else "absent" for side in (lefts, rights)))


def _checkpoints(
    place: str, left: SessionDocument, one: CheckpointEntry, right: SessionDocument, other: CheckpointEntry
) -> Iterator[Difference]:
    for name in ("id", "coverage", "parent", "fork_origin", "created"):
        if getattr(one, name) != getattr(other, name):
            yield Difference(f"{place}.{name}", str(getattr(one, name)), str(getattr(other, name)))
    yield from _tokens(f"{place}.ledger", left.manifest.ledger_of(one), right.manifest.ledger_of(other))
    lefts, rights = left.manifest.media_of(one), right.manifest.media_of(other)
    yield from _entries(f"{place}.media", *map(_media, (lefts, rights)))
    theirs = _digests(right, other)
    differing = {name for name, digest in _digests(left, one).items() if theirs.get(name, digest) != digest}
    if not differing or left.detached or right.detached:
        for name in sorted(differing):
            yield Difference(f"{place} {name}", "content", "other content")
        return
    tensors = dict(right.tensors(other))
    for name, found in left.tensors(one):
        if name in differing:
            planes = list(_planes(f"{place} {name}", name, found, tensors[name]))
            yield from planes or [Difference(f"{place} {name}", "content", "other content of equal tensors")]


def _planes(
    place: str, name: str, left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]
) -> Iterator[Difference]:
    """Shapes, or how many layers differ and where the first of them does."""
    for plane in left:
        one, other = left[plane], right.get(plane)
        if other is None or one.shape != other.shape or one.dtype != other.dtype:
            shown = "absent" if other is None else f"{other.dtype} {list(other.shape)}"
            yield Difference(f"{place} {plane}", f"{one.dtype} {list(one.shape)}", shown)
            continue
        unequal = one.view(torch.uint8) != other.view(torch.uint8)  # bit by bit: NaN equals NaN, 0 is not -0
        if not unequal.any():
            continue
        layers = unequal.flatten(1).any(1) if one.dim() > 1 else unequal
        first = int(layers.nonzero()[0])
        what = f"{int(layers.sum())} of {len(layers)} layers differ, first layer {first}"
        if one.dim() == 1:
            what = "differs"
        elif kind_of(name) != "image":
            column = int(unequal[first].flatten(1).any(1).nonzero()[0])
            what += f" from position {int(name.partition('/')[2]) * PAGE_TOKENS + column}"
        gap = float((one.double() - other.double()).abs().max())
        yield Difference(f"{place} {plane}", what, f"by at most {gap:.3g}")


def _by_kind(document: SessionDocument) -> dict[tuple[str, int], CheckpointEntry]:
    """The checkpoints of each kind, numbered from 1 in their order."""
    numbered: dict[tuple[str, int], CheckpointEntry] = {}
    seen: Counter[str] = Counter()
    for entry in document.manifest.checkpoints:
        seen[entry.kind] += 1
        numbered[entry.kind, seen[entry.kind]] = entry
    return numbered


def _digests(document: SessionDocument, entry: CheckpointEntry) -> dict[str, bytes]:
    table = document.manifest.segments
    names = document.manifest.names_of(entry)
    return {name: table[int(index)].sha256 for name, index in zip(names, entry.segments, strict=True)}


def _media(entries: Sequence[MediaEntry]) -> tuple[object, ...]:
    return tuple(f"{one.media.kind} {one.media.digest} at {list(one.starts)}" for one in bare(entries))


def _facts(place: str, left: Mapping[str, object], right: Mapping[str, object]) -> Iterator[Difference]:
    for name in [*left, *(name for name in right if name not in left)]:
        if left.get(name) != right.get(name):
            yield Difference(f"{place}.{name}", str(left.get(name, "absent")), str(right.get(name, "absent")))


def _tokens(place: str, left: Tokens, right: Tokens) -> Iterator[Difference]:
    if np.array_equal(left, right):
        return
    length = min(len(left), len(right))
    unequal = np.flatnonzero(left[:length] != right[:length])
    if len(unequal):
        at = int(unequal[0])
        yield Difference(f"{place}[{at}]", f"token {left[at]}", f"token {right[at]}")
    if len(left) != len(right):
        yield Difference(place, f"{len(left)} tokens", f"{len(right)} tokens")


def _entries(place: str, left: tuple[object, ...], right: tuple[object, ...]) -> Iterator[Difference]:
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            yield Difference(f"{place}[{index}]", str(one), str(other))
    if len(left) != len(right):
        yield Difference(place, f"{len(left)} entries", f"{len(right)} entries")
