"""Why may a replica not commit to a session?"""

from __future__ import annotations

from deployment.ownership.words import SessionKey


class NotOwned(Exception):
    """This replica may not commit to the session (any more)."""


class OwnedElsewhere(NotOwned):
    """Another replica is the owner."""

    def __init__(self, key: SessionKey, owner: str) -> None:
        super().__init__(f"session {key} is owned by replica {owner}")
        self.owner = owner


class NoCopyLeft(NotOwned):
    """Nothing that counts is left of the session; a full history may begin it anew."""


class NotNow(NotOwned):
    """Whoever must answer has not yet; ask again."""
