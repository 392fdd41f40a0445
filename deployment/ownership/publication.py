"""How does an image get into all copies, and when may the log behind it go? Only when all of them hold it."""

from __future__ import annotations

from dataclasses import dataclass, field

from deployment.ownership.messages import Kept, Put, Trim
from deployment.ownership.sending import Send
from deployment.ownership.words import Epoch, Member, Order, SessionKey

PUT_SECONDS = 10.0
"""After so long an image is sent again."""


@dataclass
class Publication:
    """An image as of the record at `order`; `log`: the last record that nobody needs beside it."""

    key: SessionKey
    order: Order
    log: Order
    frontiers: tuple[int, ...]
    document: object
    _epoch: Epoch | None = None
    _members: tuple[Member, ...] = ()
    _kept: set[Member] = field(default_factory=set)
    _sent: float = 0.0

    def under(self, epoch: Epoch, members: tuple[Member, ...], now: float) -> list[Send]:
        """Goes on under a grant: to those of its set that do not hold the image yet."""
        self._epoch, self._members, self._sent = epoch, members, now
        return self._trims() if self.done else self._puts()

    @property
    def done(self) -> bool:
        return self._kept.issuperset(self._members)

    def kept(self, kept: Kept) -> list[Send]:
        if kept.order != self.order or self.done:
            return []
        self._kept.add(kept.member)
        return self._trims() if self.done else []

    def tick(self, now: float) -> list[Send]:
        if self.done or now - self._sent < PUT_SECONDS:
            return []
        self._sent = now
        return self._puts()

    def _puts(self) -> list[Send]:
        assert self._epoch is not None
        put = Put(self.key, self._epoch, self.order, self.frontiers, self.document)
        return [Send(member, put) for member in self._members if member not in self._kept]

    def _trims(self) -> list[Send]:
        assert self._epoch is not None
        trim = Trim(self.key, self._epoch, self.order, self.log)
        return [Send(member, trim) for member in self._members]
