"""Random trees of forks against independent runs: every branch is what it would be alone, and all memory comes back."""

from __future__ import annotations

import random

import pytest

from deployment.engine import errors
from deployment.engine.commands import Drop, Fork, Sampling, Submit
from deployment.engine.events import Event, Failed, Finished, Imported
from tests.engine.hashing import VOCABULARY, Clock, hash_engine, undisturbed

CONTEXT = 512
TREES = 50


class Tree:
    """A tree of sessions that fork, go on and end at random. `room`: images beside the lanes."""

    def __init__(self, seed: int, room: int) -> None:
        self._rng = random.Random(seed)
        self.events: list[Event] = []
        self.engine = hash_engine(Clock(), self.events, CONTEXT, lanes=2, images=room, prefill_chunk=96)
        self.ledgers: dict[str, tuple[int, ...]] = {}
        self._names = iter(f"s{number}" for number in range(1000))
        self._turns = 0

    def grow(self, steps: int) -> None:
        self.go_on(next(self._names))
        for _ in range(steps):
            name = self._rng.choice(list(self.ledgers)) if self.ledgers else next(self._names)
            action = self._rng.choice([self.go_on, self.go_on, self.fork, self.fork, self.release])
            (action if name in self.ledgers else self.go_on)(name)
            self.engine.memory.check_invariants()
            self.engine._sessions.check_invariants()

    def go_on(self, name: str) -> None:
        """A turn that keeps the whole ledger, or goes back to somewhere in it."""
        ledger = self.ledgers.get(name, ())
        if self._rng.random() < 0.3:
            ledger = ledger[: self._rng.randint(0, len(ledger))]
        if len(ledger) > CONTEXT - 140:
            ledger = ledger[:100]
        new = tuple(self._rng.randrange(VOCABULARY) for _ in range(self._rng.randint(1, 100)))
        ids = (*ledger, *new)
        self._turns += 1
        submit = Submit(
            turn=f"t{self._turns}",
            prompt_ids=ids,
            session=name,
            max_tokens=self._rng.randint(1, 30),
            stable_boundary=self._rng.randrange(len(ids)),
            sampling=Sampling(seed=self._rng.randrange(3)),
        )
        self.engine.execute(submit)
        while self.engine.step():
            pass
        finished = self.events[-1]
        assert isinstance(finished, Finished)
        assert (finished.token_ids, finished.rounds) == undisturbed(submit, CONTEXT)[:2]
        self.ledgers[name] = (*ids, *finished.token_ids)

    def fork(self, name: str) -> None:
        """Where there is room, a fork takes images and not one page: each page has as many holders more as forked
        checkpoints have it."""
        child = next(self._names)
        memory, sessions = self.engine.memory, self.engine._sessions
        roomy = memory.images.free >= len(sessions.whole(name))
        free = memory.target.free
        before = [memory.target.refcount(page) for page in range(memory.target.pages)]
        self.engine.execute(Fork("f", name, child))
        answer = self.events[-1]
        if isinstance(answer, Failed):  # nothing of it is held any more, or there is no room for a second one
            assert answer.code == errors.UNKNOWN_SESSION or not roomy
            return
        assert isinstance(answer, Imported)
        self.ledgers[child] = self.ledgers[name]
        if roomy:
            forked = sessions.checkpoints(child)
            assert forked and memory.target.free == free
            for page, count in enumerate(before):
                assert memory.target.refcount(page) == count + sum(page in c.pages for c in forked)

    def release(self, name: str) -> None:
        self.engine.execute(Drop("d", name))
        del self.ledgers[name]


@pytest.mark.parametrize("room", [40, 5])
def test_every_branch_of_a_random_tree_is_what_it_would_be_alone_and_all_memory_comes_back(room):
    """With room for all images, and with so little that most forks and turns evict others."""
    for seed in range(TREES):
        tree = Tree(seed, room)
        tree.grow(20)
        for name in list(tree.ledgers):
            tree.release(name)
        memory = tree.engine.memory
        assert not memory.checkpoints and not memory.sequences
        assert (memory.images.free, memory.target.free) == (memory.images.slots, memory.target.pages)
        assert memory.draft is not None and memory.draft.free == memory.draft.pages
