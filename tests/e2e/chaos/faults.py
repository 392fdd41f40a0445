"""What is done to the cluster while it works: kills of every part, and moves. One at a time, or overlapping."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import httpx
from ray.exceptions import GetTimeoutError, NodeDiedError, RayActorError, RayError

from tests.e2e.chaos.nodes import Nodes, process_of, replicas, until
from tests.e2e.chaos.reading import Refusal, refusal_of
from tests.e2e.chaos.workload import Talk, Workload

Kind = Literal["replica", "node", "directory", "host_store", "ingress"]
KINDS: tuple[Kind, ...] = get_args(Kind)
COPIES = 2
AGAIN_SECONDS = 0.25
WHOLE_SECONDS = 120.0


@dataclass(frozen=True)
class Kill:
    """`at`: on the monotonic clock. `victims`: sessions whose owner died."""

    kind: Kind
    at: float
    victims: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True)
class Move:
    """A session that was moved while its turn ran, or between turns. Seconds of the monotonic clock."""

    key: str
    session: str
    began: float
    ended: float


class NobodyThere(Exception):
    """What should be killed is not there, or dead already."""


@dataclass
class Faults:
    """`kills`, `moves`: what was done so far, and `refused_moves` what was not. `waited`: seconds until everything was
    whole again, kill by kill; `nothing_to_kill`: attempts that met nobody."""

    nodes: Nodes
    workload: Workload
    draw: random.Random
    kills: list[Kill] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    nothing_to_kill: Counter[str] = field(default_factory=Counter)
    refused_moves: list[Refusal] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        return {kind: sum(kill.kind == kind for kill in self.kills) for kind in KINDS}

    # -------------------------------------------------------------------------------------------- one at a time

    def one_at_a_time(self, kinds: Sequence[Kind], moves_between: int) -> None:
        """Ends early when the conversations are over."""
        for kind in kinds:
            for _ in range(moves_between):
                self.move()
            self._busy()
            if self.workload.over:
                return
            self.kill(kind)
            began = time.monotonic()
            until(self.whole, f"every log has its full set after the kill of a {kind}", WHOLE_SECONDS)
            self.waited.append(time.monotonic() - began)

    def overlapping(self, kinds: Sequence[Kind], seconds: float) -> None:
        """The next one comes after up to `seconds`, whatever has become of the one before, or as soon as there is
        somebody to kill. Only a node waits until every log has its full set: with both copies' nodes at once all would
        be lost, and no client would be left to be told anything."""
        for kind in kinds:
            self.move()
            if self.workload.over:
                return
            if kind == "node":
                until(self.whole, "every log has its full set before a node is killed", WHOLE_SECONDS)
            until(partial(self._killed, kind), f"there is a {kind} to kill", WHOLE_SECONDS)
            time.sleep(self.draw.uniform(0, seconds))
        until(self.whole, "every log has its full set after all kills", WHOLE_SECONDS)

    # -------------------------------------------------------------------------------------------- what is done

    def _killed(self, kind: Kind) -> bool:
        """Whether it could be killed: among kills that overlap it may be dead already."""
        try:
            self.kill(kind)
        except NobodyThere:
            self.nothing_to_kill[kind] += 1
            return False
        return True

    def kill(self, kind: Kind) -> None:
        """NobodyThere."""
        {
            "replica": self._kill_replica,
            "node": self._kill_node,
            "directory": lambda: self._kill_actor(kind, self.nodes.directory),
            "host_store": lambda: self._kill_actor(
                kind, lambda: self.nodes.host_store(self.draw.choice(self.nodes.ids))
            ),
            "ingress": lambda: self._kill_actor(kind, self.nodes.ingress),
        }[kind]()

    def move(self) -> None:
        """Moves a session, one whose turn runs if there is any."""
        talk, session = self._some_session()
        if talk is None:
            return
        began = time.monotonic()
        with contextlib.suppress(httpx.TransportError):
            response = httpx.post(f"{self.nodes.url}/v1/sessions/{session}/migrate", headers=talk.headers, timeout=40)
            if response.status_code == 200:
                self.moves.append(Move(talk.key, session, began, time.monotonic()))
            else:
                self.refused_moves.append(refusal_of(response))

    def _kill_replica(self) -> None:
        victim = _busiest(replicas(self.nodes.url).values())
        victims = self._owned(lambda owner: owner == victim["id"])
        _kill_process(victim["pid"])
        self.kills.append(Kill("replica", time.monotonic(), victims))

    def _kill_node(self) -> None:
        victim = _busiest(entry for entry in replicas(self.nodes.url).values() if entry["node"] in self.nodes.ids)
        victims = self._owned(lambda owner: owner == victim["id"])
        self.kills.append(Kill("node", time.monotonic(), victims))
        self.nodes.remove(victim["node"])
        self.nodes.add()

    def _kill_actor(self, kind: Kind, actor: Callable[[], Any]) -> None:
        try:
            process = process_of(actor())
        except (RayActorError, GetTimeoutError, NodeDiedError, ValueError, LookupError) as error:
            raise NobodyThere(kind) from error  # Ray knows no such actor, or one that is dead
        at = time.monotonic()  # what comes of it comes later
        _kill_process(process)
        self.kills.append(Kill(kind, at))

    # -------------------------------------------------------------------------------------------- what is known

    def whole(self) -> bool:
        """Whether every part is there, and every log has its full set, but for those of clients that gave up."""
        if len(replicas(self.nodes.url)) < self.nodes.count:
            return False
        try:
            for node in self.nodes.ids:
                process_of(self.nodes.host_store(node))
        except (RayError, ValueError, TimeoutError):
            return False
        whole = True
        for talk in self.workload.talks:
            if talk.given_up:
                continue  # what was lost for good
            placed = self._placed(talk)
            for session in list(talk.sessions):
                entry = placed.get(session)
                if entry is None or len(entry["copies"]) < COPIES:
                    whole = False
                    if entry is not None and entry["replica"] is None:
                        self._show(talk, session)
        return whole

    def _show(self, talk: Talk, session: str) -> None:
        """A session without an owner gets one when somebody asks for it."""
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"{self.nodes.url}/v1/sessions/{session}", headers=talk.headers, timeout=40)

    def _placed(self, talk: Talk) -> dict[str, dict[str, Any]]:
        with contextlib.suppress(httpx.TransportError):
            response = httpx.get(f"{self.nodes.url}/v1/sessions", headers=talk.headers, timeout=15)
            if response.status_code == 200:
                return {entry["id"]: entry for entry in response.json()["data"]}
        return {}

    def _owned(self, by: Callable[[str | None], bool]) -> frozenset[tuple[str, str]]:
        return frozenset(
            (talk.key, session)
            for talk in self.workload.talks
            for session, entry in self._placed(talk).items()
            if by(entry["replica"])
        )

    def _some_session(self) -> tuple[Talk | None, str]:
        running = [(talk, session) for talk in self.workload.talks for session in list(talk.running)]
        known = [(talk, session) for talk in self.workload.talks for session in talk.sessions]
        choices = running or known
        return self.draw.choice(choices) if choices else (None, "")

    def _busy(self) -> None:
        """A kill while nobody decodes shows little."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not self.workload.over:
            answers = [answer for talk in self.workload.talks for answer in list(talk.running.values())]
            if sum(len(answer.events) > 2 for answer in answers) >= 2:
                return
            time.sleep(0.05)


def _busiest(running: Iterable[dict[str, Any]]) -> dict[str, Any]:
    busiest = max(running, key=lambda entry: entry["running"], default=None)
    if busiest is None:
        raise NobodyThere("replica")
    return busiest


def _kill_process(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        raise NobodyThere(f"process {process}") from None
