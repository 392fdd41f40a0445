"""Do the copies of a log agree, while owners come and go? Read from the host stores themselves, again and again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, NodeDiedError, ObjectLostError, RayActorError

from deployment.ownership.log import Round
from deployment.ownership.log_format import decode, read_head
from deployment.ownership.messages import Part, Read
from deployment.ownership.words import NEVER, Order, SessionKey

ASK_SECONDS = 10.0
EVERY_SECONDS = 1.0

GONE = (RayActorError, NodeDiedError, ObjectLostError, GetTimeoutError)
"""What a store raises that was killed, or whose node was. What its code raises (`RayTaskError`) is none of these."""


class Stores(Protocol):
    @property
    def ids(self) -> list[str]: ...
    def host_store(self, node: str) -> Any: ...


class Copies:
    """Every record that any store was seen to hold, by its order: no two may differ, ever."""

    def __init__(self, nodes: Stores) -> None:
        self._nodes = nodes
        self._seen: dict[tuple[SessionKey, Order], bytes] = {}
        self._holders: dict[tuple[SessionKey, Order], set[str]] = {}
        self._over = threading.Event()
        self.contradictions: list[str] = []

    @property
    def records(self) -> int:
        return len(self._seen)

    @property
    def compared(self) -> int:
        """Records that were read from the stores of at least two nodes."""
        return sum(len(holders) > 1 for holders in self._holders.values())

    @contextlib.contextmanager
    def watched(self) -> Iterator[Copies]:
        """Raises in the end what looking at the stores raised, unless that is what the dead raise."""
        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(self._watch)
            try:
                yield self
            finally:
                self._over.set()
        watching.result()

    def ids_of(self, turn: str, start: int) -> tuple[int, ...]:
        """What a turn's log says from the ledger position `start` on, as far as it was seen without a hole. What an
        owner wrote last and its successor did not find was never published."""
        rounds = [
            record
            for _, data in sorted(self._seen.items(), key=lambda item: item[0][1])
            if read_head(data).kind is Round and isinstance(record := decode(data), Round) and record.turn == turn
        ]
        ids: list[int] = []
        for each in rounds:
            if not start <= each.start <= start + len(ids):
                break
            ids[each.start - start :] = each.token_ids
        return tuple(ids)

    def _watch(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            self._look_at_all()
        self._look_at_all()

    def _look_at_all(self) -> None:
        for node in list(self._nodes.ids):
            with contextlib.suppress(*GONE):
                self._look(node)

    def _look(self, node: str) -> None:
        try:
            store = self._nodes.host_store(node)
        except ValueError:  # there is none of that name, or not yet
            return
        member, index = ray.get([store.member.remote(), store.index.remote()], timeout=ASK_SECONDS)
        questions = [Read(ends.key, NEVER, None) for ends in index]
        parts: list[Any] = ray.get(store.answer.remote(member, questions), timeout=ASK_SECONDS)
        for part in parts:
            if isinstance(part, Part):
                self.take(node, part)

    def take(self, node: str, part: Part) -> None:
        for data in part.records:
            order = read_head(data).order
            before = self._seen.setdefault((part.key, order), data)
            self._holders.setdefault((part.key, order), set()).add(node)
            if before != data:
                self.contradictions.append(f"{part.key}: two copies hold different records at {order}")
