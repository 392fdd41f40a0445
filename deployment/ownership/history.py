"""How far does a copy of a log go, and up to where do two copies say the same?

Of one epoch and sequence there is only one record, and who wrote it had all the records before it. So two copies that
both hold an order are equal up to it, and a log is told by its runs of epochs alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deployment.ownership.words import NOTHING
from state.names import Epoch, Order


@dataclass(frozen=True)
class Run:
    """Consecutive records of one epoch: sequences `first` to `last`."""

    epoch: Epoch
    first: int
    last: int


@dataclass(frozen=True)
class History:
    """The numbered records that a copy holds. Its first is 1 unless older ones were trimmed away."""

    runs: tuple[Run, ...] = ()

    @property
    def first(self) -> int:
        return self.runs[0].first if self.runs else 1

    @property
    def end(self) -> Order:
        return Order(self.runs[-1].epoch, self.runs[-1].last) if self.runs else NOTHING

    def __contains__(self, order: Order) -> bool:
        if order == NOTHING:
            return self.first == 1
        return any(run.epoch == order.epoch and run.first <= order.sequence <= run.last for run in self.runs)

    def at(self, sequence: int) -> Order | None:
        """The order of the record with that number, if it is held."""
        for run in self.runs:
            if run.first <= sequence <= run.last:
                return Order(run.epoch, sequence)
        return NOTHING if sequence == 0 and self.first == 1 else None

    def followed_by(self, order: Order) -> History:
        """With one more record."""
        if self.runs and self.runs[-1].epoch == order.epoch:
            return History((*self.runs[:-1], Run(order.epoch, self.runs[-1].first, order.sequence)))
        return History((*self.runs, Run(order.epoch, order.sequence, order.sequence)))

    def common(self, other: History) -> Order | None:
        """The last order that both hold. None: there is none, so that one cannot be made from the other's end."""
        for run in reversed(self.runs):
            for theirs in other.runs:
                last = min(run.last, theirs.last)
                if run.epoch == theirs.epoch and last >= max(run.first, theirs.first):
                    return Order(run.epoch, last)
        return NOTHING if NOTHING in self and NOTHING in other else None


def history_of(orders: Iterable[Order]) -> History:
    """Of orders whose sequences go up by one."""
    runs: list[Run] = []
    for order in orders:
        if runs and runs[-1].epoch == order.epoch:
            runs[-1] = Run(order.epoch, runs[-1].first, order.sequence)
        else:
            runs.append(Run(order.epoch, order.sequence, order.sequence))
    return History(tuple(runs))
