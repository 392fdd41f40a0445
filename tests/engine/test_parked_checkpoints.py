"""What is kept for one turn (a prompt's state for a follower, a preempted turn's own) is released however it ends."""

from __future__ import annotations

from deployment.engine import errors
from deployment.engine.commands import Preempt
from deployment.engine.events import Failed, Finished
from tests.engine.hashing import undisturbed
from tests.engine.test_preemption import Hashed


def world_with_a_follower_that_waits() -> Hashed:
    """One lane, in which turn "a" decodes; its prompt's state is parked for turn "b"."""
    world = Hashed(lanes=1, images=3)
    world.submit("a", max_tokens=100, followers=("b",))
    world.submit("b", max_tokens=5, after="a", queue_seconds=5.0)
    world.steps(3)
    assert len(world.engine.memory.checkpoints) == 1
    return world


def test_a_follower_that_waits_too_long_gives_back_what_was_kept_for_it():
    world = world_with_a_follower_that_waits()
    world.clock.now = 6.0
    world.steps(1)
    (failed,) = world.of("b")
    assert isinstance(failed, Failed) and failed.code == errors.QUEUE_TIMEOUT
    assert not world.engine.memory.checkpoints
    world.steps()
    assert isinstance(world.of("a")[-1], Finished)


def test_a_follower_that_cannot_be_opened_gives_back_what_was_kept_for_it(monkeypatch):
    world = world_with_a_follower_that_waits()

    def lost(*_arguments):
        raise RuntimeError("device lost")

    monkeypatch.setattr(world.engine._admission, "open", lost)
    world.steps()
    (failed,) = world.of("b")
    assert isinstance(failed, Failed) and failed.code == errors.INTERNAL_ERROR
    assert isinstance(world.of("a")[-1], Finished)
    assert not world.engine.memory.checkpoints and not world.engine.memory.sequences


def test_a_preempted_turn_that_cannot_be_resumed_gives_back_what_it_had_and_the_next_one_runs(monkeypatch):
    world = Hashed(lanes=1, images=3)
    world.submit("a", max_tokens=100)
    world.steps(5)
    world.engine.execute(Preempt("a"))
    assert len(world.engine.memory.checkpoints) == 1

    def lost(*_arguments):
        raise RuntimeError("device lost")

    monkeypatch.setattr(world.engine._admission, "resume", lost)
    world.steps()
    failed = world.of("a")[-1]
    assert isinstance(failed, Failed) and failed.code == errors.INTERNAL_ERROR
    assert not world.engine.memory.checkpoints and not world.engine._suspended
    after = world.submit("c", max_tokens=5)
    world.steps()
    finished = world.of("c")[-1]
    assert isinstance(finished, Finished) and finished.token_ids == undisturbed(after, 256)[0]
