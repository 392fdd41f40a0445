"""What the directory knows of one session, and what follows from that: who has it, and where it may lie."""

from __future__ import annotations

from dataclasses import dataclass, field

from deployment.ownership.messages import Grant
from deployment.ownership.words import NEVER, NOTHING, Epoch, Member, Named, Order

COPIES = 2


@dataclass
class KnownSession:
    """`named`: the last set that is known; `tenure`: the machine that writes it, once it has said so.

    `pending`: a grant that nobody has acted upon yet, as far as is known; `given`: its owner offered the session, and
    remains it until then. `end`: the furthest that a log is known to go; `deleted`: the epoch of the tombstone that is
    there. `barren`: no copy that counts is left. `founding`: only the owner that still has it may go on. `begins`: it
    began anew under that epoch, and what is older is another session's. `granted`: what was granted to each machine
    since the last set was named. `sent`: when it was last looked after. `alone`: its client wants it in one store, and
    nowhere else.
    """

    named: Named | None = None
    tenure: str | None = None
    pending: Grant | None = None
    given: bool = False
    end: Order = NOTHING
    deleted: Epoch | None = None
    barren: bool = False
    founding: bool = False
    begins: Epoch = NEVER
    granted: dict[str, Epoch] = field(default_factory=dict)
    sent: float = float("-inf")
    alone: bool = False

    @property
    def epoch(self) -> Epoch:
        return max(self.named.epoch if self.named else NEVER, self.pending.epoch if self.pending else NEVER)

    @property
    def copies(self) -> int:
        return 1 if self.alone else COPIES

    @property
    def fence(self) -> Epoch:
        """What an owner below this writes counts for nothing."""
        return max(self.named.epoch if self.named else NEVER, self.begins)

    @property
    def gone(self) -> bool:
        """Deleted, and nobody was granted it since who may have made it anew."""
        return self.deleted is not None and self.epoch <= self.deleted

    @property
    def begins_anew(self) -> bool:
        """Whether somebody may begin it anew who has not done so yet, as far as is known: nothing of it is left until
        then, and nobody else may take it for another one without a word of his own."""
        return self.named is None and self.pending is not None and self.pending.anew

    @property
    def owner(self) -> str | None:
        if self.pending is not None and not self.given:
            return self.pending.replica
        return self.named.owner if self.named else None

    def ends_at(self, end: Order, deleted: Epoch | None) -> None:
        """Somebody's log goes as far as that. Late news of a shorter one says nothing."""
        if end >= self.end:
            self.end, self.deleted = end, deleted

    def named_is(self, named: Named, tenure: str | None) -> None:
        """What a grant says that is not acted upon yet is newer."""
        self.named, self.tenure = named, tenure
        if self.pending is None or self.pending.epoch <= named.epoch:
            self.alone = named.alone

    @property
    def suspects(self) -> tuple[Member, ...]:
        """All stores that may hold what was published."""
        named = self.named.members if self.named else ()
        pending = (*self.pending.previous, *self.pending.members) if self.pending else ()
        return tuple(dict.fromkeys((*named, *pending)))
