"""Do the copies of a log agree, while owners come and go? Read from the host stores themselves, again and again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayError

from deployment.ownership.log_format import read_head
from deployment.ownership.messages import Part, Read
from deployment.ownership.words import NEVER, Order, SessionKey
from tests.e2e.chaos.nodes import Nodes

ASK_SECONDS = 10.0
EVERY_SECONDS = 1.0


class Copies:
    """Every record that any store was seen to hold, by its order: no two may differ, ever."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._seen: dict[tuple[SessionKey, Order], bytes] = {}
        self._over = threading.Event()
        self.contradictions: list[str] = []

    @property
    def records(self) -> int:
        return len(self._seen)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Copies]:
        watching = threading.Thread(target=self._watch, daemon=True)
        watching.start()
        try:
            yield self
        finally:
            self._over.set()
            watching.join()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            for node in list(self._nodes.ids):
                with contextlib.suppress(RayError, TimeoutError, ValueError):  # it is being replaced
                    self._look(node)

    def _look(self, node: str) -> None:
        store = self._nodes.host_store(node)
        member, index = ray.get([store.member.remote(), store.index.remote()], timeout=ASK_SECONDS)
        questions = [Read(ends.key, NEVER, None) for ends in index]
        parts: list[Any] = ray.get(store.answer.remote(member, questions), timeout=ASK_SECONDS)
        for part in parts:
            if isinstance(part, Part):
                self._take(part)

    def _take(self, part: Part) -> None:
        for data in part.records:
            order = read_head(data).order
            before = self._seen.setdefault((part.key, order), data)
            if before != data:
                self.contradictions.append(f"{part.key}: two copies hold different records at {order}")
