"""What clients have seen, and what must therefore never happen. Every rule here is checked after every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from deployment.ownership.messages import (
    Append,
    Ends,
    FromStore,
    Install,
    Kept,
    NameSet,
    Put,
    Receipt,
    Seal,
    ToStore,
    Trim,
)
from deployment.ownership.words import NEVER, Epoch, Member, SessionKey


class Broken(AssertionError):
    """The protocol broke its promise."""


class Truth:
    """Tokens are never drawn twice, so that a published one tells which owner drew it."""

    def __init__(self) -> None:
        self.published: dict[SessionKey, list[int]] = defaultdict(list)
        self.dead_tokens: dict[SessionKey, set[int]] = defaultdict(set)
        self.deleting: set[SessionKey] = set()
        self.begun_sets: dict[SessionKey, tuple[Epoch, tuple[Member, ...]]] = {}
        self.open_sets: dict[SessionKey, tuple[Epoch, tuple[Member, ...]]] = {}
        self.tokens = 0
        self.takeovers = 0
        self._opened: dict[SessionKey, Epoch] = {}
        self._seals: dict[tuple[Member, SessionKey], Epoch] = {}

    def publish(self, key: SessionKey, start: int, tokens: Sequence[int]) -> None:
        """A client reads these tokens at these positions."""
        if self.dead_tokens[key].issuperset(tokens):
            return  # an owner that slept says what was true of the session that is gone
        seen = self.published[key]
        if start > len(seen):
            raise Broken(f"{key}: published at {start}, but clients have only {len(seen)} tokens: some were skipped")
        for position, token in enumerate(tokens, start):
            if position < len(seen):
                if seen[position] != token:
                    raise Broken(f"{key}: token {seen[position]} at {position} is contradicted by {token}")
            else:
                seen.append(token)
                self.tokens += 1

    def opened(self, key: SessionKey, epoch: Epoch, ledger: Sequence[int]) -> None:
        """An owner may write, and believes the session to be `ledger`."""
        self.takeovers += 1
        if epoch < self.opened_under(key):
            return  # it has only now heard what came true long ago; nothing that it appends is taken
        self._opened[key] = epoch
        if not self.dead_tokens[key].isdisjoint(ledger):
            raise Broken(f"{key}: tokens of a deleted session came back under {epoch}")
        seen = self.published[key]
        if list(ledger[: len(seen)]) != seen:
            if key in self.deleting and not ledger:
                self.ended(key, epoch)
            else:
                raise Broken(f"{key}: {seen} was published, but {epoch} goes on from {list(ledger)}")

    def opened_under(self, key: SessionKey) -> Epoch:
        return self._opened.get(key, NEVER)

    def has_set(self, key: SessionKey, epoch: Epoch, members: tuple[Member, ...]) -> None:
        """All stores, old and new, know the name of the set."""
        _raise(self.open_sets, key, epoch, members)

    def copies_left(self, key: SessionKey, void: frozenset[Member]) -> tuple[Member, ...]:
        """What makes it a breach of promise to give a session up. While a set is being named, the loss of all stores of
        either one may end the session: of the old one, since nobody is left to say that the new ones are finished."""
        left = [
            tuple(member for member in sets.get(key, (NEVER, ()))[1] if member not in void)
            for sets in (self.begun_sets, self.open_sets)
        ]
        return min(left, key=len)

    def ended(self, key: SessionKey, epoch: Epoch) -> None:
        """The session was deleted, or begins anew after its last copy was lost: what was, must not come back."""
        if epoch < self.opened_under(key):
            return  # said by an owner that slept while others read its tombstone and began anew
        self.deleting.discard(key)
        self.dead_tokens[key].update(self.published.pop(key, ()))

    def answered(self, message: ToStore, answer: FromStore) -> None:
        """A store did what it was asked: then nobody with a higher epoch had sealed it."""
        place = (answer.member, message.key)
        sealed = self._seals.get(place, NEVER)
        changes = isinstance(message, Append | NameSet | Put | Trim | Install) and isinstance(answer, Receipt | Kept)
        if changes and message.epoch < sealed:
            raise Broken(f"{message.key}: {answer.member} took {type(message).__name__} of {message.epoch}"
                         f" after the seal of {sealed}")  # fmt: skip
        if isinstance(message, NameSet) and isinstance(answer, Receipt):
            # From the first store on that has read the name, those that are left out may forget.
            _raise(self.begun_sets, message.key, message.epoch, message.members)
        if isinstance(message, Seal | Install) and isinstance(answer, Ends | Receipt):
            self._seals[place] = max(sealed, answer.epoch)


def _raise(
    sets: dict[SessionKey, tuple[Epoch, tuple[Member, ...]]], key: SessionKey, epoch: Epoch, members: tuple[Member, ...]
) -> None:
    if epoch > sets.get(key, (NEVER, ()))[0]:
        sets[key] = (epoch, members)
