"""What this package refuses. Every error carries its facts as fields and says them in one sentence."""

from __future__ import annotations

_HEAD, _TAIL = 800, 200
"""Characters of a sentence that are shown from its beginning and its end."""


class StateError(Exception):
    """Base of all errors of this package; by itself: a wrong use of the books, such as releasing a page twice.

    Whatever a document says of itself, the sentence has at most about 1,000 characters, all printable.
    """

    def __init__(self, sentence: str) -> None:
        if len(sentence) > _HEAD + _TAIL:
            sentence = f"{sentence[:_HEAD]} ... {sentence[-_TAIL:]}"
        super().__init__("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in sentence))


class CapacityError(StateError):
    """A pool cannot give what was asked. Nothing was taken from it."""

    def __init__(self, pool: str, wanted: int, free: int) -> None:
        super().__init__(f"{pool}: {wanted} wanted, {free} free")
        self.pool = pool
        self.wanted = wanted
        self.free = free


class CoverageError(StateError):
    """A plane does not cover what the frontier needs, so the state cannot be used."""

    def __init__(self, plane: str, has: object, needs: object) -> None:
        super().__init__(f"coverage of {plane} is {has}, but the frontier needs {needs}")
        self.plane = plane
        self.has = has
        self.needs = needs


class FormatError(StateError):
    """Bytes are no session document, or a damaged one, or not one of this geometry. `place` says where."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place}: {problem}")
        self.place = place
        self.problem = problem


class SignatureError(StateError):
    """A document is not signed, or not with this cluster's key, where only such a one will do."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"signature: {problem}")
        self.problem = problem


class MissingSegment(StateError):
    """A detached document's segment is not in the store: that checkpoint is a miss, the session is whole without."""

    def __init__(self, name: str, sha256: bytes) -> None:
        super().__init__(f"segment {name} with sha256 {sha256.hex()} is not in the store")
        self.name = name
        self.sha256 = sha256


class FingerprintMismatch(StateError):
    """State was made by something else than what would go on from it. `None` stands for an absent field."""

    def __init__(self, field: str, stored: str | int | None, here: str | int | None) -> None:
        super().__init__(f"fingerprint field {field} is {_shown(stored)} in the stored state, but {_shown(here)} here")
        self.field = field
        self.stored = stored
        self.here = here


class StoreError(StateError):
    """A store of bytes could not do what was asked: disk full, input/output error, no permission, no connection.

    What was stored before is as it was. `code` is the system's errno, None where there is none.
    """

    def __init__(self, operation: str, name: str, reason: str, code: int | None = None) -> None:
        super().__init__(f"{operation} {name}: {reason}")
        self.operation = operation
        self.name = name
        self.reason = reason
        self.code = code


class ExistsError(StoreError):
    """The name is taken, and what lies under it is never overwritten."""

    def __init__(self, name: str) -> None:
        super().__init__("create", name, "exists already and is never overwritten")


class ArenaError(StateError):
    """A host store's arena cannot be made, or is not what it must be. It is as it was before."""

    def __init__(self, arena: object, problem: str) -> None:
        super().__init__(f"arena {arena}: {problem}")
        self.arena = str(arena)
        self.problem = problem


class StaleError(StateError):
    """A publication that comes too late: the session was deleted, or published by a newer order. Nothing was stored."""


def _shown(value: str | int | None) -> str:
    return "absent" if value is None else repr(value)
