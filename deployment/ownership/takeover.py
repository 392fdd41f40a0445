"""The way from a grant to the right to write: seal, make equal, name.

    SEALING      every store that may hold what was published, and every one that is to, shuts out lower epochs
    EQUALISING   the copies of the new set become equal to the one that counts
    NAMING       the new set is written to all of them, old and new; nothing is appended before all have it
    BEGINNING    of a session that had no set, or was deleted: the directory has taken in that it has one

A session that begins anew, but is to get what it was before, begins with a record that says so, before it has a set.
The set is named only now, so that nobody who reads a name ever finds an unfinished copy behind it. Whoever takes over
next, wherever this stops, seals one of these stores and so learns of it: but for a session that had no set, which a
directory that was started meanwhile may begin elsewhere, and for one that such a directory believes to be deleted,
which nobody takes over. Hence the last step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from deployment.ownership.log import Numbered
from deployment.ownership.log_format import encode
from deployment.ownership.messages import (
    Ends,
    Found,
    Full,
    Gap,
    Grant,
    Held,
    Kept,
    NameSet,
    Part,
    Read,
    Receipt,
    Seal,
    Silent,
    Unavailable,
)
from deployment.ownership.recovery import Barren, Later, Repair, installation, judge, repair_of
from deployment.ownership.sending import DIRECTORY, HERE, Links, Send
from deployment.ownership.words import NOTHING, Member, Order


class Phase(Enum):
    SEALING = "sealing"
    EQUALISING = "equalising"
    NAMING = "naming"
    BEGINNING = "beginning"
    DONE = "done"
    BARREN = "barren"


class Takeover:
    """One grant, acted upon. `is_mine`: whether the replica itself wrote what a log ends with, so that it needs not be
    read. `first`: what a session begins with that begins anew."""

    def __init__(
        self, grant: Grant, replica: str, is_mine: Callable[[Order], bool], first: Numbered | None = None
    ) -> None:
        self.grant = grant
        self.phase = Phase.SEALING
        self.records: tuple[bytes, ...] = ()
        self._replica = replica
        self._is_mine = is_mine
        self._first = first
        self._links = Links()
        self._stores = tuple(dict.fromkeys((*grant.previous, *grant.members)))
        self._answers: dict[Member, Ends] = {}
        self._found: Found | None = None
        self._source: Ends | None = None
        self._repairs: dict[Member, Repair] = {}
        self._read: Read | None = None
        self._part: Part | None = None
        self._named: set[Member] = set()

    @property
    def source(self) -> Ends:
        """The copy that said what the session is."""
        assert self._source is not None
        return self._source

    @property
    def continues(self) -> bool:
        return self._is_mine(self.source.history.end)

    def begin(self, now: float) -> list[Send]:
        seal = Seal(self.grant.key, self.grant.epoch, self.grant.anew)
        return [self._links.ask(member, seal, now) for member in self._stores]

    def received(self, answer: Ends | Part | Receipt | Kept | Gap | Full, now: float) -> list[Send]:
        """A store's answer to what was asked under this grant's epoch."""
        match self.phase, answer:
            case Phase.SEALING, Ends():
                return self._sealed(answer, now)
            case Phase.EQUALISING, Part():
                return self._read_part(answer, now)
            case Phase.EQUALISING, Receipt() | Kept():
                return self._repaired(answer, now)
            case Phase.NAMING, Receipt():
                return self._was_named(answer)
            case _, Full():
                self._links.heard(answer.member, now)
                return []
            case _:
                return []

    def known(self) -> None:
        """The directory has taken in that the set is named."""
        if self.phase is Phase.BEGINNING:
            self.phase = Phase.DONE

    def tick(self, now: float) -> list[Send]:
        if self.phase in (Phase.DONE, Phase.BARREN):
            return []
        if self.phase is Phase.BEGINNING:
            return [Send(DIRECTORY, self._held)]
        silent = [Silent(self.grant.key, self.grant.epoch, member) for member in self._links.silent(now)]
        found = [self._found] if self._found is not None else []
        return self._links.repeat(now) + [Send(DIRECTORY, message) for message in (*silent, *found)]

    def _sealed(self, ends: Ends, now: float) -> list[Send]:
        if ends.seal != self.grant.epoch:
            return []
        self._answers[ends.member] = ends
        self._links.answered(ends.member)
        if len(self._answers) < len(self._stores) or self._found is not None:
            return []
        match judge(self.grant, self._answers):
            case Later(named):
                self._found = Found(self.grant.key, self.grant.epoch, named)
                return [Send(DIRECTORY, self._found)]
            case Barren(named):
                self.phase = Phase.BARREN
                held = f" of epoch {named.epoch}, which {', '.join(map(str, named.members))} held" if named else ""
                reason = f"no whole copy is left{held}"
                return [
                    Send(DIRECTORY, Found(self.grant.key, self.grant.epoch, named, barren=True)),
                    Send(HERE, Unavailable(self.grant.key, reason)),
                ]
            case source:
                self._source = source
                return self._equalise(source, now)

    def _equalise(self, source: Ends, now: float) -> list[Send]:
        self.phase = Phase.EQUALISING
        if self._first is not None and self.grant.anew and source.history.end == NOTHING:
            return self._begin_with(self._first, source, now)
        repairs = [repair_of(self.grant, source, self._answers[member]) for member in self.grant.members]
        self._repairs = {repair.target: repair for repair in repairs if not repair.done}
        if self.continues and not self._repairs:
            return self._name(now)
        commons = [repair.common for repair in self._repairs.values()]
        after = None
        if self.continues and None not in commons:
            after = min((common for common in commons if common is not None), key=lambda order: order.sequence)
        self._read = Read(self.grant.key, self.grant.epoch, after)
        return [self._links.ask(source.member, self._read, now)]

    def _begin_with(self, first: Numbered, source: Ends, now: float) -> list[Send]:
        """As if another copy had it already, which all are made equal to."""
        grant, order = self.grant, Order(self.grant.epoch, 1)
        part = Part(source.member, grant.key, grant.epoch, None, (encode(replace(first, order=order)),), ())
        self._source, self._part = replace(source, history=source.history.followed_by(order)), part
        self._repairs = {member: installation(member, grant.epoch, part) for member in grant.members}
        return [self._links.ask(target, repair.message(part), now) for target, repair in self._repairs.items()]

    def _read_part(self, part: Part, now: float) -> list[Send]:
        if self._read is None or self._part is not None or part.after != self._read.after:
            return []
        self._part = part
        self._links.answered(part.member)
        self.records = () if self.continues else part.records
        if not self._repairs:
            return self._name(now)
        return [self._links.ask(target, repair.message(part), now) for target, repair in self._repairs.items()]

    def _repaired(self, answer: Receipt | Kept, now: float) -> list[Send]:
        repair = self._repairs.get(answer.member)
        if repair is None or self._part is None or not repair.accept(answer):
            return []
        self._links.answered(answer.member)
        if not repair.done:
            return [self._links.ask(answer.member, repair.message(self._part), now)]
        return self._name(now) if all(repair.done for repair in self._repairs.values()) else []

    def _name(self, now: float) -> list[Send]:
        self.phase = Phase.NAMING
        grant = self.grant
        name = NameSet(grant.key, grant.epoch, self.source.history.end, grant.members, self._replica, grant.alone)
        return [self._links.ask(member, name, now) for member in self._stores]

    def _was_named(self, receipt: Receipt) -> list[Send]:
        if receipt.named == self.grant.epoch:
            self._links.answered(receipt.member)
            self._named.add(receipt.member)
            if self._named.issuperset(self._stores):
                if self.grant.named is None or self.source.deleted:
                    self.phase = Phase.BEGINNING
                    return [Send(DIRECTORY, self._held)]
                self.phase = Phase.DONE
        return []

    @property
    def _held(self) -> Held:
        grant, end = self.grant, self.source.history.end
        deleted = end.epoch if self.source.deleted else None
        held = Held(grant.key, grant.epoch, self._replica, grant.tenure, grant.members, end, deleted, grant.alone)
        return replace(held, begins=grant.named is None)
