"""How much may a tenant's sessions keep in a node's host store? Asked before anything of a session grows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from deployment.engine import errors
from deployment.errors import RequestError


class StateLimit:
    """`limit`: bytes of logs and images on a node; None: there is none, and nobody is asked."""

    def __init__(
        self, limit: int | None, used: Callable[[str], Awaitable[int | None]], make_room: Callable[[str], None]
    ) -> None:
        """`used`: what a tenant keeps on this node; None while nobody can say. `make_room`: begins to let go of images
        of the tenant's own that rest here."""
        self._limit = limit
        self._used = used
        self._make_room = make_room

    async def check(self, tenant: str) -> None:
        """RequestError (429) where it is reached. A turn does not wait for a store that does not answer."""
        if self._limit is None:
            return
        used = await self._used(tenant)
        if used is None or used < self._limit:
            return
        self._make_room(tenant)
        raise RequestError(
            429,
            errors.OVERLOADED,
            f"the sessions of this tenant keep {used} bytes here, which is its limit of {self._limit} "
            "(tenant_state_bytes); delete some, or ask again when those that rest have been made smaller",
            "session",
        )
