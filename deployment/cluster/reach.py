"""How does a replica reach directory, stores and other replicas?"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from deployment.ownership.messages import (
    Claim,
    CopiesLost,
    Drain,
    FromDirectory,
    FromOwner,
    FromStore,
    Grant,
    Held,
    Join,
    Known,
    Moved,
    Offer,
    ToStore,
)
from deployment.ownership.words import Member

FromOthers = Grant | Join | CopiesLost | Offer | Moved | Known | Drain
"""What comes with the answer to a renewal."""


class Transport(Protocol):
    """How a replica reaches the others. An answer that does not come is None: what was asked is asked again."""

    async def renew(self, reports: Sequence[Held | Grant]) -> Sequence[FromOthers] | None: ...

    async def claim(self, claim: Claim) -> FromDirectory | None: ...

    async def tell(self, messages: Sequence[FromOwner]) -> Sequence[Known | Moved] | None:
        """Whether the directory has heard it."""
        ...

    async def ask_store(self, member: Member, messages: Sequence[ToStore]) -> Sequence[FromStore] | None: ...

    def tell_peer(self, replica: str, message: Offer | Moved) -> Coroutine[Any, Any, None]: ...

    async def stores(self) -> Sequence[Member] | None:
        """All that count, as the cluster's key-value store says, whether there is a directory or not."""
        ...
