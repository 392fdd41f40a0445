"""What does a replica say to stores and directory? What goes to one of them at the same time goes in one call, and what
gathers while that is under way in the next one."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from deployment.cluster.reach import Transport
from deployment.ownership.messages import FromOwner, FromStore, Known, Moved, Silent, ToStore
from deployment.ownership.sending import DIRECTORY
from deployment.ownership.words import Member, SessionKey

AGAIN_SECONDS = 0.25


class Outbox:
    """`answered` is given each answer of a store, `directed` what the directory answers; `spawn` runs a call."""

    def __init__(
        self,
        transport: Transport,
        answered: Callable[[FromStore], None],
        directed: Callable[[Known | Moved], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._transport = transport
        self._answered = answered
        self._directed = directed
        self._spawn = spawn
        self._to_stores: dict[Member, list[ToStore]] = defaultdict(list)
        self._to_directory: dict[tuple[type, SessionKey, Member | None], FromOwner] = {}
        self._heard = asyncio.Event()
        self._sending: set[Member | str] = set()

    def ask(self, member: Member, message: ToStore) -> None:
        self._to_stores[member].append(message)
        self._pump(member)

    def tell(self, message: FromOwner) -> None:
        """A later word of the same kind takes the place of one that the directory has not heard yet."""
        about = message.member if isinstance(message, Silent) else None
        self._to_directory[type(message), message.key, about] = message
        self._pump(DIRECTORY)

    async def heard(self, key: SessionKey) -> None:
        """Waits until the directory has heard all that there is to say of a session."""
        while any(about == key for _, about, _ in self._to_directory):
            await self._heard.wait()

    def _pump(self, to: Member | str) -> None:
        if to not in self._sending:
            self._sending.add(to)
            self._spawn(self._send_all(to))

    async def _send_all(self, to: Member | str) -> None:
        try:
            if isinstance(to, Member):
                while messages := self._to_stores.pop(to, None):
                    for answer in await self._transport.ask_store(to, messages) or ():
                        self._answered(answer)
            else:
                await self._tell_all()
        finally:
            self._sending.discard(to)

    async def _tell_all(self) -> None:
        # Until it has heard it: nobody says again that a session was deleted, once this replica has forgotten it.
        while self._to_directory:
            told = dict(self._to_directory)
            answers = await self._transport.tell(list(told.values()))
            if answers is None:
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            for answer in answers:
                self._directed(answer)
            for about, message in told.items():
                if self._to_directory[about] is message:
                    del self._to_directory[about]
            heard, self._heard = self._heard, asyncio.Event()
            heard.set()
