"""What each part of `bench/target_kernels.py` hands over: one operator at one size, right first, then timed.

A part is a module with `works() -> Iterator[Work]`. It makes a work's tensors when that work is asked for, so that only
one work's lie on the card at a time; `measure` turns a work into a row of the results file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.gpu import median_ms

DEVICE = "cuda"
Call = Callable[[], Any]


@dataclass(frozen=True)
class Peer:
    """Other code that does the same work on the same inputs. Without `calls`, `name` says why it could not run."""

    name: str
    calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """`op` of the results file for `model`'s geometry: `batch` rows of `width` live columns after `context` tokens.

    calls: the same work on different inputs, `bench.gpu.sets(bytes)` of them, so that no cache serves it
    size: bytes that must move once in one call: the floor
    error: |ours - FP64 oracle| / |oracle|, the largest of the work's results; infinite where a NaN or a byte that must
        not be touched shows. Runs before the clock does.
    """

    op: str
    model: str
    batch: int
    width: int
    context: int
    calls: list[Call]
    size: int
    error: Callable[[], float]
    peer: Peer | None = None


def measure(work: Work, tbps: float) -> dict[str, Any]:
    """The row of a work, with times in milliseconds, where the card reads `tbps` TB/s."""
    error = work.error()
    peer = work.peer
    row = {
        "op": work.op,
        "model": work.model,
        "B": work.batch,
        "Q": work.width,
        "context": work.context,
        "ms": round(median_ms(work.calls), 5),
        "floor_ms": round(work.size / tbps / 1e9, 5),
        "peer": peer.name if peer else None,
        "peer_ms": round(median_ms(peer.calls), 5) if peer and peer.calls else None,
        "max_error": error,
    }
    beside = f"{row['peer_ms'] * 1e3:9.1f}" if row["peer_ms"] else "        -"
    print(
        f"{work.model:8s} {work.op:17s} B{work.batch:<3d} Q{work.width:<5d} F{work.context:<7d}"
        f"{row['ms'] * 1e3:9.1f} us {row['floor_ms'] * 1e3:9.1f} {beside}   x{row['ms'] / row['floor_ms']:5.2f} "
        f"+{(row['ms'] - row['floor_ms']) * 1e3:7.1f}  error {error:.1e}  {row['peer']}",
        flush=True,
    )
    return row
