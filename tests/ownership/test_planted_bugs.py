"""The simulator finds what it is there for: each test plants one bug in a machine and waits for a broken promise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from deployment.ownership import joining, takeover
from deployment.ownership.directory import Directory
from deployment.ownership.known_stores import KnownStores
from deployment.ownership.messages import (
    CopiesLost,
    Ends,
    FromStore,
    Gap,
    Grant,
    Kept,
    NameSet,
    Part,
    Put,
    Receipt,
    ToStore,
    Trim,
)
from deployment.ownership.owner import Owner, State
from deployment.ownership.publication import Publication
from deployment.ownership.recovery import Repair, installation, repair_of
from deployment.ownership.sending import Send
from deployment.ownership.standing import Standing
from deployment.ownership.store import Store
from deployment.ownership.words import Epoch, Member, Order, SessionKey
from state.stored import StoredDocument
from tests.ownership.cluster import Bugs, run
from tests.ownership.faults import FIRST_FAULTS
from tests.ownership.truth import Broken

MOST_SCHEDULES = 400


def first_broken(bugs: Bugs, begin: int = 0) -> str:
    for seed in range(begin, begin + MOST_SCHEDULES):
        try:
            run(seed, bugs)
        except Broken as broken:
            return str(broken)
    pytest.fail(f"none of {MOST_SCHEDULES} schedules found the planted bug")


class UnsealedStore(Store):
    """Lets everybody write."""

    def answer(self, message: ToStore) -> FromStore:
        if message.key in self._copies:
            self._copies[message.key].seal = message.epoch
        return super().answer(message)


def test_a_store_that_does_not_seal_is_found():
    assert "after the seal of" in first_broken(Bugs(store=UnsealedStore))


def test_a_stale_copy_that_is_believed_is_found(monkeypatch: pytest.MonkeyPatch):
    def first_answer(grant: Grant, answers: dict[Member, Ends]) -> Ends:
        return next(iter(answers.values()))

    monkeypatch.setattr(takeover, "judge", first_answer)
    first_broken(Bugs())


class TrustingStore(Store):
    """Takes images of what its log does not say."""

    def _put(self, message: Put) -> Kept | Gap:
        self._storage.put(message.key, message.order, message.frontiers, message.document)
        return Kept(self.member, message.key, message.epoch, message.order)

    def _usable(self, key: SessionKey) -> list[StoredDocument]:
        return list(self._storage.documents(key))


class HastyOwner(Owner):
    """Gives images away before the receipts of their last round."""

    def publish(self, sequence: int, frontiers: tuple[int, ...], document: object, keep: int, now: float) -> list[Send]:
        if self.state is not State.OPEN:
            return []
        order = Order(self.epoch, sequence)
        log = self.history.at(max(self.history.first, min(self.committed.sequence, keep - 1))) or order
        self._publication = Publication(self.key, order, log, frontiers, document)
        return self._publication.under(self.epoch, tuple(self._acked), now)


def test_an_image_ahead_of_the_log_is_found():
    first_broken(Bugs(store=TrustingStore, owner=HastyOwner, hasty_images=True))


class CarelessStore(Store):
    """Lets itself be named without having what the others have."""

    def _name(self, message: NameSet) -> Receipt | Gap:
        copy = self._copy(message.key)
        named = NameSet(message.key, message.epoch, copy.end, message.members, message.owner)
        return super()._name(named)


def test_a_joiner_that_is_named_too_early_is_found(monkeypatch: pytest.MonkeyPatch):
    def nothing_lacks(grant: Grant, source: Ends, target: Ends) -> Repair:
        repair = repair_of(grant, source, target)
        repair.records_done = repair.image_done = True
        return repair

    def nothing_to_bring(target: Member, epoch: Epoch, part: Part) -> Repair:
        repair = installation(target, epoch, part)
        repair.image_done = True
        return repair

    monkeypatch.setattr(takeover, "repair_of", nothing_lacks)
    monkeypatch.setattr(joining, "installation", nothing_to_bring)
    first_broken(Bugs(store=CarelessStore))


class ForgetfulStore(Store):
    """Trims its log whether it has the image or not."""

    def _trim(self, message: Trim) -> Receipt | Gap:
        copy = self._copy(message.key)
        if message.log in copy.history and message.log.sequence > copy.history.first:
            self._write(message.key, *copy.notes())
            self._cut_front(message.key, message.log)
        return self._receipt(message.key, message.epoch)


class Credulous(Standing):
    """Publishes whatever any store acknowledges."""

    def holds(self, members: Iterable[Member], now: float) -> bool:
        return True


def test_an_owner_that_goes_on_beside_who_began_its_session_anew_is_found(monkeypatch: pytest.MonkeyPatch):
    def never(stores: KnownStores, members: Iterable[Member], all_known: bool) -> float:
        return float("-inf")

    monkeypatch.setattr(KnownStores, "believed_until", never)
    with pytest.raises(Broken, match="some were skipped"):
        run(706_717, Bugs(standing=Credulous), FIRST_FAULTS)


class SilentDirectory(Directory):
    """Tells no owner that all of its copies are lost."""

    def _copies_lost(self, key: SessionKey, session: Any, now: float) -> list[tuple[str, CopiesLost]]:
        return []


def test_an_owner_that_waits_for_stores_that_are_void_is_found():
    assert "its client was never told so" in first_broken(Bugs(directory=SilentDirectory), begin=20)


def test_a_log_that_is_trimmed_before_all_copies_hold_the_image_is_found(monkeypatch: pytest.MonkeyPatch):
    def first_is_enough(publication: Publication, kept: Kept) -> list[Send]:
        publication._kept.update(publication._members)
        return publication._trims()

    monkeypatch.setattr(Publication, "kept", first_is_enough)
    assert "still holds a copy" in first_broken(Bugs(store=ForgetfulStore), begin=13)
