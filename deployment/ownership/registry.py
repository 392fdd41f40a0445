"""What must outlive the directory: its incarnations, the stores there are, and those whose content counts for nothing.

It lies in the cluster's key-value store (Ray's GCS), which lives as long as the cluster. A cluster in which nothing is
registered is new, so that whatever store brings an arena from an older one is void.
"""

from __future__ import annotations

from typing import Protocol

from deployment.ownership.words import NEVER, Epoch, Member


class KeyValues(Protocol):
    """Ray's GCS KV, as far as it is used."""

    def add(self, name: str, value: bytes) -> bool:
        """Writes without overwriting. False: the name was there already."""
        ...

    def names(self, prefix: str) -> list[str]: ...

    def value(self, name: str) -> bytes | None:
        """None: there is no such name."""
        ...

    def remove(self, name: str) -> None:
        """Of a name that is not there: does nothing."""
        ...


_KINDS = ("incarnation", "store", "void", "restored")
"""What says that the cluster is not new."""


class Registry:
    """The entries of one application."""

    def __init__(self, values: KeyValues, app: str) -> None:
        self._values = values
        self._prefix = f"dflash-serve/{app}/"

    def next_incarnation(self, now: float) -> int:
        """max(unix seconds, highest seen + 1), written before the directory's first grant."""
        incarnation = max(int(now), self._highest() + 1)
        # Another directory may just have taken this number.
        while not self._values.add(f"{self._prefix}incarnation/{incarnation}", b""):
            incarnation += 1
        return incarnation

    def first_incarnation(self) -> int:
        """That of the cluster's first directory: every epoch below it is of an older cluster. 0 if there was none."""
        return min(self._numbers("incarnation"), default=0)

    def incarnation_before(self, incarnation: int) -> int:
        """That of the directory before; 0 if there was none."""
        return max((number for number in self._numbers("incarnation") if number < incarnation), default=0)

    def note_restored(self, session: str, epoch: Epoch) -> None:
        """A session (its key's digest) is brought back from the durable tier, under this epoch. Before any copy has it:
        who finds one must not believe that it is the first to bring it back."""
        self._values.add(f"{self._prefix}restored/{session}", str(epoch).encode())

    def restored_under(self, session: str) -> Epoch | None:
        """The epoch under which it was brought back first; None: it never was."""
        value = self._values.value(f"{self._prefix}restored/{session}")
        if value is None:
            return None
        if not value:
            return NEVER  # versions before this one wrote no epoch
        incarnation, counter = value.decode().split(".")
        return Epoch(int(incarnation), int(counter))

    def register(self, member: Member) -> None:
        """A store with a fresh arena, before it keeps anything."""
        self._values.add(self._name("store", member), b"")

    def may_count(self, member: Member) -> bool:
        """Whether what this store holds counts. A store for which it does not begins again with a fresh arena."""
        return member in self._listed("store") and member not in self.void()

    def make_void(self, member: Member, now: float) -> None:
        """From now on, and for ever, what this incarnation holds counts for nothing. Before any grant that relies on
        it. `now`: of the head's monotonic clock."""
        self._values.add(self._name("void", member), repr(now).encode())

    def void(self) -> frozenset[Member]:
        return frozenset(self._listed("void"))

    def voided(self) -> dict[Member, float]:
        """When each of the void stores was made so."""
        values = {member: self._values.value(self._name("void", member)) for member in self._listed("void")}
        return {member: float(value) for member, value in values.items() if value is not None}

    def stores(self) -> tuple[Member, ...]:
        """All that were ever registered and are not void."""
        void = self.void()
        return tuple(member for member in self._listed("store") if member not in void)

    def forget(self) -> None:
        """All actors of the application have ended, and their arenas went with them: to the next ones the cluster is
        new. They would wait for the stores of nodes that serve it no more, and take nothing from the durable tier. What
        stays is how high incarnations were: the durable tier may hold what was written under the highest one, whatever
        the clock says by now."""
        if highest := self._highest():
            lower = [number for number in self._numbers("floor") if number < highest]
            self._values.add(f"{self._prefix}floor/{highest}", b"")
            for number in lower:
                self._values.remove(f"{self._prefix}floor/{number}")
        for kind in _KINDS:
            for name in self._values.names(f"{self._prefix}{kind}/"):
                self._values.remove(name)

    def _highest(self) -> int:
        """Of all incarnations, those of what was forgotten too."""
        return max((*self._numbers("incarnation"), *self._numbers("floor")), default=0)

    def _numbers(self, kind: str) -> list[int]:
        prefix = f"{self._prefix}{kind}/"
        return [int(name.removeprefix(prefix)) for name in self._values.names(prefix)]

    def _name(self, kind: str, member: Member) -> str:
        return f"{self._prefix}{kind}/{member.node}/{member.incarnation}"

    def _listed(self, kind: str) -> list[Member]:
        prefix = f"{self._prefix}{kind}/"
        pairs = (name.removeprefix(prefix).rsplit("/", 1) for name in self._values.names(prefix))
        return [Member(node, incarnation) for node, incarnation in pairs]
