"""Sealed copies lie before an owner: which of them says what the session is, and what do the others lack?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deployment.ownership.log_format import read_head
from deployment.ownership.messages import Append, Bring, Ends, Grant, Install, Kept, Part, Receipt
from deployment.ownership.words import NOTHING, Epoch, Member, Named, Order, SessionKey


@dataclass(frozen=True)
class Later:
    """A set was named that the directory did not know of, and not all of its stores are sealed."""

    named: Named


@dataclass(frozen=True)
class Barren:
    """No copy that counts is whole: nothing older will do. `named` None: only copies of stores that were to join."""

    named: Named | None


def judge(grant: Grant, answers: Mapping[Member, Ends]) -> Ends | Later | Barren:
    """The copy that says what the session is, out of the answers of all stores that the grant names.

    Only members of the last set count: whoever was left out of it may lack what was published since. Of those, the one
    whose last record has the highest order: what only it holds was never published, and does no harm. Of equal ones it
    is one that stays: who is left out of the new set forgets its images, which the owner still has to read.
    """
    named = max(
        (ends.named for ends in answers.values() if ends.named is not None),
        key=lambda named: named.epoch,
        default=None,
    )
    if named is None or (grant.named is not None and grant.named.epoch > named.epoch):
        named = grant.named
    elif grant.named is None or named.epoch > grant.named.epoch:
        all_sealed = set(named.members) <= set(answers) and set(grant.members) <= set(named.members)
        if not all_sealed:
            return Later(named)
    if named is None:
        # Nothing is appended before the first set is named: who has records without one was to join a set.
        candidates = [] if any(ends.history.runs for ends in answers.values()) else list(answers.values())
    else:
        candidates = [ends for ends in answers.values() if ends.whole and ends.member in named.members]
    if not candidates:
        return Barren(named)
    return max(candidates, key=lambda ends: (ends.history.end, ends.member in grant.members))


@dataclass
class Repair:
    """How one copy is made equal to that of the store `source`: records first, then an image, if they need one.

    `goal`: where the copy must end. `common`: up to where it is right already; None: it must be installed as a whole.
    """

    target: Member
    key: SessionKey
    epoch: Epoch
    source: Member
    goal: Order
    common: Order | None
    records_done: bool
    image_done: bool

    @property
    def done(self) -> bool:
        return self.records_done and self.image_done

    def accept(self, answer: Receipt | Kept) -> bool:
        """Whether the store's answer is one step more."""
        if isinstance(answer, Kept) and self.records_done and not self.image_done:
            self.image_done = True
            return True
        if isinstance(answer, Receipt) and answer.end == self.goal and not self.records_done:
            self.records_done = True
            return True
        return False

    def message(self, part: Part) -> Append | Install | Bring:
        """The next step, from a part of the source's log that begins at `common` or before."""
        if self.records_done:
            return Bring(self.key, self.epoch, part.images[-1].order, self.source)
        if self.common is None:
            return Install(self.key, self.epoch, part.records)
        after = self.common
        records = tuple(data for data in part.records if read_head(data).order.sequence > after.sequence)
        return Append(self.key, self.epoch, after, records)


def repair_of(grant: Grant, source: Ends, target: Ends) -> Repair:
    """What a sealed copy lacks of another one."""
    common = target.history.common(source.history) if target.whole else None
    equal = target.history.end == source.history.end
    # A log that goes back to the session's beginning may begin with what only an image says, as a fork's does.
    image_done = not source.images or (common is not None and bool(target.images))
    return Repair(
        target=target.member,
        key=grant.key,
        epoch=grant.epoch,
        source=source.member,
        goal=source.history.end,
        common=common,
        records_done=equal and target.whole,
        image_done=image_done,
    )


def installation(target: Member, epoch: Epoch, part: Part) -> Repair:
    """All that a store lacks that is to join, while the owner goes on."""
    orders = [read_head(data).order for data in part.records]
    goal = orders[-1] if orders else NOTHING
    return Repair(target, part.key, epoch, part.member, goal, None, False, image_done=not part.images)
