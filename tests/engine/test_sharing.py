"""What one turn leaves behind and another one finds: shared prefixes, tenants, branches, the image policy, eviction."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from deployment.engine.commands import Drop, Export, Fork, Import, Sampling, Submit
from deployment.engine.events import Captured, Event, Evicted, Exported, Failed, Finished, Imported, Started
from state.errors import StateError
from state.session_record import SessionRecord
from tests.engine.driving import Driver, prompt
from tests.engine.hashing import Clock, hash_engine, undisturbed

CONTEXT = 3000
SYSTEM = tuple(token % 50 for token in range(150))


class Hashed:
    """An engine whose model is a hash, and the turns that it runs one after another."""

    def __init__(self, **options: Any) -> None:
        self.events: list[Event] = []
        self.engine = hash_engine(Clock(), self.events, CONTEXT, **options)
        self._turns = itertools.count()

    def run(self, ids: tuple[int, ...], **fields: Any) -> tuple[Started, tuple[int, ...]]:
        """One turn to its end; its tokens are what an undisturbed run gives."""
        submit = Submit(turn=f"t{next(self._turns)}", prompt_ids=ids, **{"max_tokens": 8, **fields})
        self.engine.execute(submit)
        while self.engine.step():
            pass
        finished = self.events[-1]
        assert isinstance(finished, Finished), finished
        assert finished.token_ids == undisturbed(submit, CONTEXT)[0]
        (started,) = [event for event in self.events if isinstance(event, Started) and event.turn == submit.turn]
        return started, (*ids, *finished.token_ids)

    def captured(self) -> list[tuple[str, int]]:
        return [(event.kind, event.frontier) for event in self.events if isinstance(event, Captured)]

    @property
    def images_used(self) -> int:
        return self.engine.memory.images.slots - self.engine.memory.images.free

    @property
    def pages_used(self) -> int:
        return self.engine.memory.target.pages - self.engine.memory.target.free


# ------------------------------------------------------------------------------------------------ shared prefixes


def test_a_fresh_session_goes_on_from_the_tap_of_another_one_and_shares_its_pages():
    hashed = Hashed()
    hashed.run((*SYSTEM, *[1] * 20), session="a", system_boundary=150)
    assert (hashed.images_used, hashed.pages_used) == (2, 3)  # tap and turn end hold the same three pages
    started, _ = hashed.run((*SYSTEM, *[2] * 20), session="b", system_boundary=150)
    assert (started.hit, started.reused, started.prefilled) == ("device", 150, 20)
    assert (hashed.images_used, hashed.pages_used) == (3, 4)  # two full pages are shared, the partial one is copied
    tap, a, b = hashed.engine.memory.checkpoints
    assert tap.kind == "tap" and tap.pages[:2] == a.pages[:2] == b.pages[:2]
    assert [hashed.engine.memory.target.refcount(page) for page in tap.pages] == [3, 3, 2]


def test_the_tap_outlives_the_session_that_left_it_and_belongs_to_no_session():
    hashed = Hashed()
    hashed.run((*SYSTEM, *[1] * 20), session="a", system_boundary=150)
    hashed.engine.execute(Drop("d", "a"))
    assert hashed.images_used == 1 and len(hashed.engine._sessions) == 0
    assert hashed.run((*SYSTEM, *[2] * 20), session="b")[0].reused == 150


def test_turns_of_another_tenant_find_nothing():
    hashed = Hashed()
    ids = (*SYSTEM, *[1] * 20)
    _, ledger = hashed.run(ids, session="a", tenant="one", system_boundary=150, stable_boundary=160)
    for later in (ids, ledger):
        assert hashed.run(later, session="b", tenant="another")[0].hit == "none"
        hashed.engine.execute(Drop("d", "b"))
        assert hashed.run(later, tenant="another")[0].hit == "none"
        assert hashed.run(later, tenant="one")[0].reused >= 160


def test_a_turn_without_a_session_finds_a_prefix_and_leaves_the_system_block_only():
    hashed = Hashed()
    hashed.run((*SYSTEM, *[1] * 20), system_boundary=150)
    assert [(c.kind, c.frontier) for c in hashed.engine.memory.checkpoints] == [("tap", 150)]
    assert hashed.run((*SYSTEM, *[2] * 20), system_boundary=150)[0].reused == 150
    assert hashed.images_used == 1 and not hashed.captured()


def test_at_least_one_token_is_prefilled_though_the_whole_prompt_is_kept():
    hashed = Hashed()
    hashed.run((*SYSTEM, 1), system_boundary=150)
    started, _ = hashed.run(SYSTEM)
    assert (started.hit, started.prefilled) == ("none", 150)


def test_state_from_outside_is_found_by_its_own_session_alone_and_so_is_what_comes_of_it():
    """Whoever can import a state could otherwise put any text into the prompts of others."""
    source = Driver("none", images=4)
    ledger = prompt(0) + source.run(prompt(0), session="s", max_tokens=4, ignore_eos=True).token_ids
    document = source.call(Export("e", "s")).document
    driver = Driver("none", images=6)
    assert isinstance(driver.call(Import("i", "s", document)), Imported)
    mine = driver.submit((*ledger, 290, 291), session="s", max_tokens=4, ignore_eos=True, system_boundary=len(ledger))
    driver.steps()
    assert driver.started(mine).hit == "peer" and len(driver.captured(mine)) == 1
    longer = (*ledger, 290, 291, *driver.streamed(mine))
    assert isinstance(driver.call(Fork("f", "s", "child")), Imported)
    for session in ("t", None):
        other = driver.submit(longer, session=session, max_tokens=4, ignore_eos=True)
        driver.steps()
        assert driver.started(other).hit == "none"
        driver.call(Drop("d", "t"))
    again = driver.submit(longer, session="s", max_tokens=4, ignore_eos=True)
    driver.steps()
    assert driver.started(again).reused == len(longer) - 1


# ------------------------------------------------------------------------------------------------ branches


@pytest.mark.parametrize("edit", ["last answer", "second message", "first message", "everything"])
def test_a_regeneration_goes_on_from_its_turn_start_and_an_edit_from_the_deepest_exact_prefix(edit):
    """Full histories of three turns; the hash model's tokens differ for whoever goes on from a wrong place."""
    hashed = Hashed()
    history: tuple[int, ...] = ()
    starts: list[int] = []
    for number in range(3):
        history = (*history, *[number] * 30)
        starts.append(len(history) - 2)
        _, history = hashed.run(history, session="s", stable_boundary=starts[-1])
    changed, reused = {
        "last answer": (history[: starts[2] + 2], starts[2]),
        "second message": ((*history[: starts[1] + 1], *[40] * 30), starts[1]),
        "first message": ((*history[:28], 41, 42), starts[0]),
        "everything": ((40, *history), 0),
    }[edit]
    started, _ = hashed.run(changed, session="s", stable_boundary=len(changed) - 2)
    assert (started.hit, started.reused) == ("device" if reused else "none", reused)


def test_two_answers_of_one_length_to_one_prompt_are_both_kept():
    hashed = Hashed()
    ids = tuple(range(40))
    answers = [hashed.run(ids, session="s", sampling=Sampling(seed=seed))[1] for seed in (1, 2)]
    assert answers[0] != answers[1]
    for ledger in answers:
        assert hashed.run((*ledger, 3), session="s")[0].reused == len(ledger) - 1


# ------------------------------------------------------------------------------------------------ the image policy


def test_short_turns_leave_no_image_and_the_session_still_goes_on_to_its_end():
    hashed = Hashed(image_min_tokens=100)
    _, ledger = hashed.run(tuple(range(20)), session="s")
    assert hashed.captured() == [("turn_end", 27)]  # a ledger travels with images: the first is always kept
    for number in range(3):
        started, ledger = hashed.run((*ledger, *[number] * 12), session="s", stable_boundary=len(ledger) + 10)
        assert (started.hit, started.reused) == ("device", 27)
    assert len(ledger) == 28 + 60 and hashed.images_used == 1
    _, ledger = hashed.run((*ledger, *[5] * 34), session="s")
    assert hashed.captured()[1:] == [("turn_end", 129)]


def test_exactly_the_least_number_of_tokens_leaves_no_image():
    hashed = Hashed(image_min_tokens=100)
    _, ledger = hashed.run(tuple(range(20)), session="s")
    _, longer = hashed.run((*ledger, *[1] * 92), session="s")  # frontier 127: 100 after the first
    assert len(longer) == 128 and len(hashed.captured()) == 1
    hashed.run((*ledger, *[2] * 93), session="s")
    assert hashed.captured()[1:] == [("turn_end", 128)]


def test_a_taps_tokens_count_for_all_sessions_but_those_of_another_session_do_not():
    hashed = Hashed(image_min_tokens=100)
    for session in "ab":
        hashed.run((*SYSTEM, *[1] * 20), session=session, system_boundary=150)
    assert hashed.captured() == [] and hashed.images_used == 1
    hashed.run((*SYSTEM, *[1] * 120), session="a", system_boundary=150)
    hashed.run((*SYSTEM, *[1] * 120), session="b", system_boundary=150)
    assert hashed.captured() == [("turn_end", 277)] * 2


def test_a_long_prompt_leaves_a_ladder_and_its_session_keeps_four_images_that_stand_apart():
    hashed = Hashed(prefill_chunk=512, lanes=1)
    ids = tuple(token * 7 % 60 for token in range(2900))
    hashed.run(ids, session="s", stable_boundary=2890)
    assert hashed.captured() == [("tap", 1024), ("tap", 2048), ("turn_start", 2890), ("turn_end", 2907)]
    hashed.run((*ids[:2000], 60), session="s")
    assert [c.frontier for c in hashed.engine._sessions.checkpoints("s")] == [1024, 2048, 2907, 2008]
    assert hashed.run((*ids[:2100], 60), session="s")[0].reused == 2048


def test_a_long_answer_leaves_images_on_its_way(monkeypatch):
    monkeypatch.setattr("state.image_policy.LONG_TURN_TOKENS", 100)
    hashed = Hashed()
    hashed.run(tuple(range(10)), session="s", max_tokens=350)
    kinds = [kind for kind, _ in hashed.captured()]
    frontiers = [frontier for _, frontier in hashed.captured()]
    assert kinds == ["tap", "tap", "tap", "turn_end"] and frontiers[-1] == 359
    assert all(100 <= after - before < 105 for before, after in itertools.pairwise([0, *frontiers[:3]]))


def test_a_long_answer_that_finds_no_place_for_an_image_looks_for_one_as_seldom_as_if_it_had(monkeypatch, caplog):
    monkeypatch.setattr("state.image_policy.LONG_TURN_TOKENS", 100)
    hashed = Hashed(lanes=1, images=0)
    hashed.run(tuple(range(10)), session="s", max_tokens=350)
    failed = [record.message for record in caplog.records if record.message.startswith("no ")]
    assert hashed.captured() == [] and [message.split()[1] for message in failed] == ["tap"] * 3 + ["turn_end"]


@pytest.mark.parametrize("tap", [False, True])
def test_a_session_whose_turn_end_has_no_image_moves_with_the_deepest_one_and_prefills_the_rest(tap):
    """With and without an image of its own: then the tap of its tenant goes with it."""
    driver, other = (Driver("dflash2", images=6, image_min_tokens=60) for _ in range(2))
    boundary = 61 if tap else 0
    first = (prompt(0) * 3)[:70]
    ledger = first + driver.run(first, session="s", max_tokens=6, ignore_eos=True, system_boundary=boundary).token_ids
    ledger += (290, 291)
    ledger += driver.run(ledger, session="s", max_tokens=6, ignore_eos=True).token_ids
    exported = driver.call(Export("e", "s", SessionRecord("s", ledger)))
    assert isinstance(exported, Exported)
    assert (exported.kinds, exported.frontiers) == ((("tap",), (61,)) if tap else (("turn_end",), (75,)))
    assert other.call(Import("i", "s", exported.document)).record.ledger == ledger
    turn = other.submit(ledger, session="s", max_tokens=20, ignore_eos=True)
    other.steps()
    assert (other.started(turn).hit, other.started(turn).reused) == ("peer", exported.frontiers[0])
    whole = Driver("none", images=2).run(ledger, max_tokens=20, ignore_eos=True)
    assert other.streamed(turn) == whole.token_ids


def test_a_session_keeps_four_images_beside_explicit_ones_and_always_where_its_last_turn_began_and_ended():
    memory, table = (hashed := Hashed()).engine.memory, hashed.engine._sessions
    for number, kind in enumerate(["explicit", "turn_start", "explicit", *["turn_end", "turn_start"] * 4]):
        sequence = memory.open(200)
        frontier = 100 - number  # later ones spare less and less
        sequence.settle(frontier)
        sequence.context_frontier = frontier
        table.add("s", memory.capture(sequence, (7,) * frontier, "prompt", kind))
        memory.close(sequence)
        table.check_invariants()
    kept = table.checkpoints("s")
    assert [c.kind for c in kept].count("explicit") == 2 and len(kept) == 6
    assert [c.frontier for c in kept[-2:]] == [91, 90]


# ------------------------------------------------------------------------------------------------ eviction


def test_the_image_that_spares_least_goes_first_though_it_was_used_last():
    hashed = Hashed(lanes=1, images=3)
    for session, length in (("long", 900), ("short", 20), ("middle", 300)):
        hashed.run((len(session), *[1] * length), session=session)
    hashed.run((50, *[1] * 100), session="new")
    assert [event.session for event in hashed.events if isinstance(event, Evicted)] == ["short"]
    hashed.run((51, *[1] * 100), session="newer")
    assert [event.session for event in hashed.events if isinstance(event, Evicted)] == ["short", "new"]


def test_what_is_spared_counts_from_the_nearest_kept_ancestor():
    """The end of a long session that has an image shortly before it spares less than a short session's only one."""
    hashed = Hashed(lanes=1, images=3)
    _, ledger = hashed.run((40, *[1] * 900), session="long")
    hashed.run((*ledger, 1, 1, 1), session="long")
    hashed.run((41, *[1] * 100), session="short")
    hashed.run((42, *[1] * 100), session="new")
    kept = [c.frontier for c in hashed.engine._sessions.checkpoints("long")]
    assert kept == [908] and hashed.engine._sessions.checkpoints("short")


def test_the_image_to_go_on_from_is_not_evicted_for_the_turn_that_waits_for_it_though_it_is_worth_least():
    hashed = Hashed(lanes=1, images=8, pages=8)
    hashed.run((*SYSTEM, 1), system_boundary=150)  # 50 tokens a page
    hashed.run((40, *[1] * 120), session="b")  # 64 tokens a page
    started, _ = hashed.run((*SYSTEM, *[2] * 60), session="c", max_tokens=170)  # 2 pages are shared, one is missing
    assert started.reused == 150 and not hashed.engine._sessions.checkpoints("b")


def test_for_pages_what_gives_none_back_stays_though_it_spares_least():
    hashed = Hashed(lanes=1, images=8, pages=8)
    hashed.run((*SYSTEM, *[1] * 10), session="a", system_boundary=150)
    hashed.run((40, *[1] * 120), session="b")  # 3 and 2 of 8 pages
    started, _ = hashed.run((*SYSTEM, *[2] * 60), session="c", max_tokens=170)  # 2 shared, 4 fresh
    assert started.reused == 150
    assert hashed.engine._sessions.checkpoints("a") and not hashed.engine._sessions.checkpoints("b")


def test_a_session_that_stood_on_a_tap_is_told_evicted_when_the_tap_goes_and_is_held_no_longer():
    hashed = Hashed(lanes=1, images=2, image_min_tokens=40)
    start = SYSTEM[:60]
    for name in ("s", "u"):
        hashed.run((*start, 1, 2), session=name, tenant="t", system_boundary=60, max_tokens=3)
    assert len(hashed.engine._sessions) == 2 and not hashed.engine._sessions.checkpoints("s")
    for number in range(3):
        hashed.run((50 + number, *[number] * 200), session=f"other {number}", tenant="t", max_tokens=3)
    assert {"s", "u"} <= {event.session for event in hashed.events if isinstance(event, Evicted)}
    holding = [n for n in range(3) if hashed.engine._sessions.checkpoints(f"other {n}")]
    assert hashed.engine.facts()["sessions"] == len(holding) > 0


def test_a_session_that_has_another_tap_on_its_way_stays_when_one_goes():
    hashed = Hashed(lanes=1, images=3, image_min_tokens=40)
    hashed.run((*SYSTEM[:60], 1, 2), session="s", tenant="t", system_boundary=60, max_tokens=3)
    longer = (*SYSTEM[:60], *[7] * 60)
    hashed.run((*longer, 3), session="u", tenant="t", system_boundary=120, max_tokens=3)
    sessions, held = hashed.engine._sessions, hashed.engine._sessions._holders
    (deeper,) = [c for c, holder in held.items() if holder.name is None and c.frontier == 120]
    sessions._evict(deeper)
    assert len(sessions) == 2 and not any(isinstance(event, Evicted) for event in hashed.events)
    (last,) = [c for c, holder in held.items() if holder.name is None]
    sessions.discard(last)
    assert {event.session for event in hashed.events if isinstance(event, Evicted)} == {"s", "u"} and not len(sessions)


def test_a_tenant_that_fills_the_device_pushes_out_its_own_images_and_not_anothers():
    hashed = Hashed(lanes=1, images=5)
    hashed.run((40, *[1] * 20), session="small", tenant="one")  # worth the least of all
    for number in range(8):
        hashed.run((50 + number, *[1] * 300), session=f"large {number}", tenant="another")
    evicted = [event.session for event in hashed.events if isinstance(event, Evicted)]
    assert len(evicted) == 4 and all(session.startswith("large") for session in evicted)
    for number in range(3):
        hashed.run((30 + number, *[1] * 10), session=f"new {number}", tenant="one")
    evicted = [event.session for event in hashed.events if isinstance(event, Evicted)]
    assert sum(session.startswith("large") for session in evicted) > 4 and "small" not in evicted


def test_for_pages_too_a_tenant_keeps_its_share():
    hashed = Hashed(lanes=1, images=20, pages=16)
    hashed.run((40, *[1] * 60), session="small", tenant="one")
    for number in range(8):
        hashed.run((50 + number, *[1] * 200), session=f"large {number}", tenant="another")
    assert hashed.engine._sessions.checkpoints("small")


def test_what_runs_takes_the_last_image_of_anybody():
    """Also of a tenant that holds no more than its share: or the turn could never run."""
    hashed = Hashed(lanes=1, images=20, pages=8)
    hashed.run((40, *[1] * 60), session="small", tenant="one")
    started, _ = hashed.run((50, *[1] * 400), session="large", tenant="another", max_tokens=80)
    assert started.prefilled == 401 and not hashed.engine._sessions.checkpoints("small")


def test_all_pages_are_counted_once_for_all_that_has_to_go(monkeypatch):
    hashed = Hashed(lanes=1, images=20, pages=16)
    for number in range(4):
        hashed.run((40 + number, *[1] * 200), session=f"of {number}", tenant=f"tenant {number % 2}")
    memory, sessions = hashed.engine.memory, hashed.engine._sessions
    asked, evictable = [], sessions.evictable
    monkeypatch.setattr(sessions, "evictable", lambda *which: asked.append(which) or evictable(*which))
    memory.close(sessions.with_room(lambda: memory.open(12 * 64), keep=None))
    assert len([event for event in hashed.events if isinstance(event, Evicted)]) == 3 and len(asked) == 1
    sessions.check_invariants()


def test_turns_that_wait_for_pages_are_tried_again_when_something_was_freed_and_counted_once_together(monkeypatch):
    hashed = Hashed(lanes=4, images=20, pages=16)
    hashed.run((40, *[1] * 200), session="kept", tenant="one")
    tried, counted = [], []
    admission, sessions = hashed.engine._admission, hashed.engine._sessions
    restore, count = admission._restore, sessions._count_evictable
    monkeypatch.setattr(
        admission, "_restore", lambda submit, *rest: tried.append(submit.turn) or restore(submit, *rest)
    )
    monkeypatch.setattr(sessions, "_count_evictable", lambda *which: counted.append(which) or count(*which))
    hashed.engine.execute(Submit("long", tuple([2] * 700), max_tokens=40))
    hashed.engine.execute(Submit("short", tuple([5] * 90), max_tokens=30))
    hashed.engine.step()
    counted.clear()
    for name in ("w0", "w1", "w2"):
        hashed.engine.execute(Submit(name, (3, *[4] * 400), tenant=name, max_tokens=40))
    hashed.engine.step()
    assert tried[-3:] == ["w0", "w1", "w2"] and len(counted) == 1
    tried.clear()
    while not any(isinstance(event, Finished) and event.turn == "short" for event in hashed.events):
        hashed.engine.step()
    assert not tried, "nothing was freed, and nothing came"
    hashed.engine.step()
    assert tried == ["w0", "w1", "w2"]
    while hashed.engine.step():
        pass
    assert {event.turn for event in hashed.events if isinstance(event, Finished)} >= {"long", "short", "w0", "w1", "w2"}


def test_state_that_nobody_vouches_for_counts_for_whose_it_is():
    hashed = Hashed(lanes=1, images=5)
    hashed.run((40, *[1] * 20), session="small", tenant="one")
    hashed.run((41, *[1] * 300), session="made", tenant="another")
    memory, sessions = hashed.engine.memory, hashed.engine._sessions
    (made,) = sessions.checkpoints("made")
    for number in range(6):
        image = sessions.with_room(lambda: memory.fork(made), keep=None, source=made)
        sessions.replace(f"in {number}", [image], "disk", "another", shared=False)
        assert sessions.is_private(f"in {number}")
    assert sessions.checkpoints("small") and not sessions.checkpoints("in 0")


# ------------------------------------------------------------------------------------------------ books


def test_a_leak_ends_the_engine_at_the_step_that_made_it_when_invariants_are_checked():
    checked, unchecked = Hashed(), Hashed(check_invariants=False)
    for hashed in (checked, unchecked):
        hashed.engine.memory.target.allocate(1)
        hashed.engine.execute(Submit("t", (1, 2, 3), max_tokens=2))
    assert unchecked.engine.step()
    with pytest.raises(StateError, match="page 0 counts 1 references, but 0 exist"):
        checked.engine.step()


def test_a_checkpoint_that_the_tree_lost_is_a_difference_in_the_books():
    hashed = Hashed()
    hashed.run((1, 2, 3), session="s")
    (checkpoint,) = hashed.engine.memory.checkpoints
    hashed.engine._sessions._tree.remove(checkpoint)
    hashed.engine.execute(Submit("t", (1, 2, 3), max_tokens=2))
    with pytest.raises(StateError, match="prefix tree"):
        hashed.engine.step()


def test_a_system_boundary_beyond_the_prompt_is_refused_by_name():
    hashed = Hashed()
    hashed.engine.execute(Submit("t", (1, 2, 3), system_boundary=4))
    (failed,) = hashed.events
    assert isinstance(failed, Failed) and failed.param == "system_boundary"
