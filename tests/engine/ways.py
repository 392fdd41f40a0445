"""Ways that a session takes from one tiny engine to where it goes on, and what is compared there."""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deployment.engine.commands import Drop, Export, Fork, Import, Publish, Sampling
from deployment.engine.durable_sessions import DurableSessions
from deployment.engine.events import Exported, Imported, Publishing
from deployment.engine.options import Backend
from state.background import BackgroundWriter
from state.byte_store import DirectoryStore
from state.document import open_document
from state.durable import DurableTier, Published
from state.files import OsFiles
from state.names import Epoch, Order, SessionKey
from state.session_record import SessionRecord
from tests.engine.tiny import DRAFT_TOKENS, PUBLIC, TinyDriver

WINDOW = 32
WIDTH = DRAFT_TOKENS + 1
WAYS = ("device", "host", "file", "durable")
MORE = 5
"""Tokens after the place where a session was saved: some rounds, and sometimes a longer one."""
BUDGET = 1 << 24
SAMPLED = Sampling(temperature=0.9, seed=11)
_names = itertools.count()


@dataclass(frozen=True)
class Case:
    """A session that is saved at frontier `frontier`, after a round that committed `committed` tokens."""

    frontier: int
    committed: int
    backend: Backend
    sampling: Sampling
    way: str


@dataclass(frozen=True)
class Continued:
    """What a turn gave, and the sha256 of every segment of the state that its session has after it."""

    tokens: tuple[int, ...]
    rounds: tuple[int, ...]
    segments: tuple[tuple[int, tuple[str, ...]], ...]


def product() -> list[Case]:
    frontiers = range(WINDOW, 3 * WINDOW + 1)
    factors = itertools.product(frontiers, range(1, WIDTH + 1), ("dflash", "dflash2"), (Sampling(), SAMPLED), WAYS)
    return [Case(*levels) for levels in factors]  # pyright: ignore[reportArgumentType]


def pairwise() -> list[Case]:
    """Some of the product in which every two levels of two factors meet."""
    cases: list[Case] = []
    for frontier in range(WINDOW, 3 * WINDOW + 1):
        for number in range(WIDTH):
            turn = frontier // WIDTH
            backend = ("dflash", "dflash2")[(number + turn) % 2]
            sampling = (Sampling(), SAMPLED)[(number // 2 + turn // 2) % 2]
            cases.append(Case(frontier, number + 1, backend, sampling, WAYS[(number + frontier) % len(WAYS)]))
    return cases


class Planted:
    """Drafts of a round are those that are given, so that the round commits as many tokens as a test wants."""

    def __init__(self, propose: Any, drafts: Sequence[int]) -> None:
        self._propose = propose
        self._drafts = drafts

    def __call__(self, *round_: Any) -> Any:
        proposal = self._propose(*round_)
        drafts = proposal.drafts.clone()
        drafts[0, : len(self._drafts)] = torch.tensor(self._drafts)
        return replace(proposal, drafts=drafts)


class World:
    """Engines of one backend, used by one case after the other, so that they are full of what others left."""

    def __init__(self, backend: Backend) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ways-")
        self.root = Path(self._directory.name)
        self.backend: Backend = backend
        self.source = TinyDriver(backend, lanes=1, images=6, pages=24)
        self.elsewhere = TinyDriver(backend, lanes=1, images=6, pages=24)
        self.scratch = TinyDriver(backend, lanes=1, images=0, pages=24)

    def saved(self, case: Case) -> tuple[int, ...]:
        """Runs session `s` of the source to the case's place; returns its ledger."""
        self.source.call(Drop("d", "s"))
        self.elsewhere.call(Drop("d", "s"))
        start = case.frontier - case.committed
        known = undisturbed(start)
        drafter: Any = self.source.engine.models.drafter
        propose = drafter.propose
        drafter.propose = Planted(propose, known[start + 1 : case.frontier])
        try:
            finished = self.source.run(
                known[:start], session="s", tenant=new_tenant(), max_tokens=case.committed + 1, ignore_eos=True
            )
        finally:
            drafter.propose = propose
        assert finished.rounds == (case.committed - 1,) and finished.frontier == case.frontier, case
        assert known[:start] + finished.token_ids == known[: case.frontier + 1], "the turn was not what never stopped"
        return known[: case.frontier + 1]

    def moved(self, case: Case, ledger: tuple[int, ...]) -> tuple[TinyDriver, str]:
        """Where and under which name the session goes on."""
        if case.way == "device":
            assert isinstance(self.source.call(Fork("f", "s", "child")), Imported)
            return self.source, "child"
        if case.way == "durable":
            return through_the_durable_tier(self.source, self.backend, self.root / "store", ledger), "s"
        document = exported(self.source, ledger)
        if case.way == "file":
            path = self.root / f"{next(_names)}.dfs"
            path.write_bytes(document)
            document = path.read_bytes()
        taken(self.elsewhere, document, case.frontier)
        return self.elsewhere, "s"

    def from_nothing(self, ledger: tuple[int, ...], sampling: Sampling) -> Continued:
        """The turn in an engine that has no state to go on from."""
        return continued(self.scratch, None, ledger, sampling)


def exported(driver: TinyDriver, ledger: Sequence[int]) -> bytes:
    answer = driver.call(Export("e", "s", SessionRecord("s", tuple(ledger), frontier=len(ledger) - 1)))
    assert isinstance(answer, Exported), answer
    return bytes(answer.document)


def taken(driver: TinyDriver, document: bytes, frontier: int) -> None:
    answer = driver.call(Import("i", "s", document))
    assert isinstance(answer, Imported) and answer.frontiers == (frontier,), answer


class Unsynced(OsFiles):
    """Files of a machine that never fails: hundreds of syncs would take longer than all else."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


def through_the_durable_tier(source: TinyDriver, backend: Backend, root: Path, ledger: Sequence[int]) -> TinyDriver:
    """Published by an engine's thread, written by another, and read by an engine with a tier of its own."""
    outcomes: list[object] = []
    writer = BackgroundWriter(places=1, most_bytes=BUDGET)
    tier = DurableTier(DirectoryStore(root, Unsynced()), BUDGET, open_document)
    source.engine._exchange._durable = DurableSessions(tier, writer, 1e-4, lambda *told: outcomes.append(told[2]))
    key, order = SessionKey("a" * 64, f"session-{next(_names)}"), Order(Epoch(1, 1), 1)
    answer = source.call(Publish("p", "s", key, order, SessionRecord("s", tuple(ledger), frontier=len(ledger) - 1)))
    assert isinstance(answer, Publishing), answer
    assert writer.close(timeout=30) and len(outcomes) == 1 and isinstance(outcomes[0], Published), outcomes
    reopened = DurableTier(DirectoryStore(root, Unsynced()), BUDGET, open_document)
    idle = BackgroundWriter(places=1, most_bytes=BUDGET)
    found = DurableSessions(reopened, idle, 1e-4, lambda *told: None)
    idle.close(timeout=30)
    driver = TinyDriver(backend, lanes=1, images=6, pages=24, durable=found)
    with reopened.reading(key) as reading:
        assert reading is not None and reading.publication.order == order
        taken(driver, reading.document, len(ledger) - 1)
    return driver


def continued(driver: TinyDriver, session: str | None, ledger: tuple[int, ...], sampling: Sampling) -> Continued:
    turn = driver.submit(
        ledger, session=session, tenant=new_tenant(), sampling=sampling, max_tokens=MORE, ignore_eos=True
    )
    driver.steps()
    finished, started = driver.finished(turn), driver.started(turn)
    assert started.reused == (len(ledger) - 1 if session else 0), "the state was not used"
    segments = () if session is None else state_of(driver, session)
    return Continued(finished.token_ids, finished.rounds, segments)


def state_of(driver: TinyDriver, session: str) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Frontier and digests of every checkpoint that a session has."""
    answer = driver.call(Export("e", session))
    assert isinstance(answer, Exported), answer
    manifest = open_document(answer.document).manifest
    digests = [segment.sha256.hex() for segment in manifest.segments]
    return tuple((entry.frontier, tuple(digests[index] for index in entry.segments)) for entry in manifest.checkpoints)


@functools.cache
def undisturbed(start: int) -> tuple[int, ...]:
    """The ledger of a greedy turn that never stopped. Its prompt is `start` random tokens: an answer soon repeats
    itself, and then the states of all frontiers are alike."""
    prompt = tuple(random.Random(start).choices(range(PUBLIC), k=start))
    return prompt + _plain().run(prompt, tenant=new_tenant(), max_tokens=WIDTH + 1 + MORE, ignore_eos=True).token_ids


@functools.cache
def _plain() -> TinyDriver:
    return TinyDriver("none", lanes=1, images=0, pages=24)


def new_tenant() -> str:
    """Of which no session has anything to share."""
    return f"tenant-{next(_names)}"
