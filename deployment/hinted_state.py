"""Where the engine keeps the state of turns that name no session, but say what they belong to (decision 19).

To the engine a hint is a session: its checkpoints stay, and every turn of the tenant finds them by their tokens. To
everybody else there is none: nothing is owned, copied or listed, and any number of turns may run under one hint.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict

from deployment.engine.commands import Drop
from deployment.engine.service import EngineService
from state.fair_share import first_to_go

KEPT_HINTS = 256
"""Beyond it the longest unused one of a tenant goes that has more than a share of them."""


class HintedState:
    def __init__(self, service: EngineService, kept: int = KEPT_HINTS) -> None:
        self._service = service
        self._kept = kept
        self._used: OrderedDict[tuple[str, str], None] = OrderedDict()

    async def engine_id(self, tenant: str, hint: str) -> str:
        """The engine's name for it. No session has it, since a tenant is 64 hex digits or nothing."""
        self._used[tenant, hint] = None
        self._used.move_to_end((tenant, hint))
        while len(self._used) > self._kept:
            above = first_to_go(Counter(tenant for tenant, _ in self._used))
            oldest = next(used for used in self._used if used[0] in above)
            del self._used[oldest]
            await self._service.call(Drop(secrets.token_hex(8), _engine_id(*oldest)))
        return _engine_id(tenant, hint)


def _engine_id(tenant: str, hint: str) -> str:
    return f"hint/{tenant}/{hint}"
