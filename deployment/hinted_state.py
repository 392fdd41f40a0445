"""Where the engine keeps the state of turns that name no session, but say what they belong to (decision 19).

To the engine a hint is a session: its checkpoints stay, and every turn of the tenant finds them by their tokens. To
everybody else there is none: nothing is owned, copied or listed, and any number of turns may run under one hint.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict

from deployment.engine.commands import Drop
from deployment.engine.service import EngineService

KEPT_HINTS = 256
"""Beyond it the longest unused one goes."""


class HintedState:
    def __init__(self, service: EngineService, kept: int = KEPT_HINTS) -> None:
        self._service = service
        self._kept = kept
        self._used: OrderedDict[str, None] = OrderedDict()

    async def engine_id(self, tenant: str, hint: str) -> str:
        """The engine's name for it. No session has it, since a tenant is 64 hex digits or nothing."""
        name = f"hint/{tenant}/{hint}"
        self._used[name] = None
        self._used.move_to_end(name)
        while len(self._used) > self._kept:
            oldest, _ = self._used.popitem(last=False)
            await self._service.call(Drop(secrets.token_hex(8), oldest))
        return name
