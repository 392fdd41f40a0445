"""What a session brings from an engine that is not the same (decision 23), and what its document says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployment.engine.commands import Drop, Export, Foreign, Fork, Import, Sampling, Submit
from deployment.engine.engine import Engine
from deployment.engine.events import Evicted, Exported, Failed, Imported
from deployment.whole_documents import NOTHING, Slices
from state.document import open_document
from state.errors import MissingSegment, StateError
from state.fingerprint import Matter
from state.geometry import PAGE_TOKENS
from state.image_pieces import ImagePart
from state.session_record import SessionRecord
from tests.engine.driving import Driver, models, options, prompt
from tests.engine.tiny import TinyDriver

IDS = prompt(0)


class OtherFingerprint(Driver):
    """An engine that differs in one fact of its fingerprint, and in nothing that a test could feel."""

    def __init__(self, field: str, **more: Any) -> None:
        super().__init__("dflash2", images=4, **more)
        loaded = models("dflash2")
        facts = {**loaded.fingerprint, field: "another"}
        changed = replace(loaded, fingerprint=facts)
        self.engine = Engine(changed, options("dflash2", images=4, **more), self.events.append)


def turned(driver: Driver, tokens: int = 6) -> tuple[int, ...]:
    """Runs a turn in session `s`; returns the ledger."""
    finished = driver.run(IDS, session="s", stable_boundary=20, max_tokens=tokens, ignore_eos=True)
    return IDS + finished.token_ids


def exported(driver: Driver, record: SessionRecord | None = None, **how: Any) -> Exported:
    answer = driver.call(Export("e", "s", record, **how))
    assert isinstance(answer, Exported), answer
    return answer


@pytest.fixture(scope="module")
def source() -> tuple[Driver, tuple[int, ...], bytes]:
    driver = Driver("dflash2", images=4)
    ledger = turned(driver)
    return driver, ledger, bytes(exported(driver, SessionRecord("s", ledger, frontier=len(ledger) - 1)).document)


@pytest.mark.parametrize(
    ("field", "matter"),
    [
        ("tokenizer", "text"), ("template", "text"), ("weights", "weights"), ("config", "weights"),
        ("geometry.kv_layers", "weights"), ("drafter", "form"), ("geometry.window", "form"),
        ("geometry.kv_dtype", "form"), ("geometry.page_tokens", "form"), ("numeric_path", "numeric"),
    ],
)  # fmt: skip
def test_state_across_a_mismatch_is_not_loaded_and_the_ledger_is_kept(source, field: str, matter: Matter) -> None:
    _, ledger, document = source
    here = OtherFingerprint(field)
    answer = here.call(Import("i", "s", document))
    assert isinstance(answer, Imported) and answer.frontiers == () and answer.foreign is not None
    assert (answer.foreign.mismatch.field, answer.foreign.mismatch.matter) == (field, matter)
    assert answer.record is not None and answer.record.ledger == ledger
    assert not here.engine.memory.checkpoints


def test_the_next_turn_after_a_mismatch_is_rebuilt_from_the_ledger_and_says_so(source) -> None:
    _, ledger, document = source
    here = OtherFingerprint("numeric_path")
    here.call(Import("i", "s", document))
    turn = here.submit(ledger, session="s", max_tokens=12, ignore_eos=True)
    here.steps()
    assert (here.started(turn).hit, here.started(turn).reused) == ("none", 0)
    assert here.streamed(turn) == Driver("dflash2").run(ledger, max_tokens=12, ignore_eos=True).token_ids


def test_another_numeric_path_loads_where_that_is_accepted_and_nothing_else_does(source) -> None:
    _, _, document = source
    here = OtherFingerprint("numeric_path", accept_numeric_path=True)
    answer = here.call(Import("i", "s", document))
    assert isinstance(answer, Imported) and answer.frontiers == (20, len(source[1]) - 1)
    assert answer.foreign is not None and answer.foreign.mismatch.matter == "numeric"
    other = OtherFingerprint("drafter", accept_numeric_path=True)
    assert other.call(Import("i", "s", document)).frontiers == ()


def test_an_exact_import_refuses_every_mismatch_by_name_and_leaves_the_session_what_it_had(source) -> None:
    _, _, document = source
    here = OtherFingerprint("numeric_path", accept_numeric_path=True)
    turned(here)
    before = here.engine.memory.checkpoints
    answer = here.call(Import("i", "s", document, exact=True))
    assert isinstance(answer, Failed) and (answer.code, answer.param) == ("fingerprint_mismatch", "numeric_path")
    assert "another" in answer.message and here.engine.memory.checkpoints == before


def test_state_of_a_really_other_drafter_is_rebuilt_and_named(source) -> None:
    answer = Driver("dflash", images=4).call(Import("i", "s", source[2]))
    assert isinstance(answer, Imported) and answer.frontiers == ()
    assert answer.foreign is not None and answer.foreign.mismatch.field == "backend"


def test_a_foreign_ledger_stays_foreign_when_it_goes_on_to_travel(source) -> None:
    _, ledger, document = source
    here = OtherFingerprint("weights")
    answer = here.call(Import("i", "s", document))
    assert isinstance(answer.foreign, Foreign)
    onward = exported(here, answer.record, foreign=answer.foreign)
    manifest = open_document(onward.document).manifest
    assert manifest.checkpoints == () and manifest.fingerprint == dict(models("dflash2").fingerprint)
    back = source[0].call(Import("i", "back", onward.document))
    assert back.foreign is None and back.record.ledger == ledger


def test_a_damaged_segment_costs_its_checkpoint_and_not_the_session_unless_all_must_be_exact(source) -> None:
    _, ledger, document = source
    frontiers = [entry.frontier for entry in open_document(document).manifest.checkpoints]
    damaged = bytearray(document)
    damaged[-33] ^= 1  # the payload's last byte, before the digest of the head
    here = Driver("dflash2", images=4)
    free = here.engine.memory.images.free
    refused = here.call(Import("i", "s", bytes(damaged), exact=True))
    assert isinstance(refused, Failed) and refused.code == "bad_state" and "sha256" in refused.message
    assert here.engine.memory.images.free == free
    answer = here.call(Import("i", "s", bytes(damaged)))
    assert isinstance(answer, Imported) and list(answer.frontiers) == frontiers[:-1] and len(frontiers) == 2
    assert answer.record is not None and answer.record.ledger == ledger
    here.engine.memory.check_invariants()


def test_tokens_that_this_model_does_not_have_are_refused_unless_another_tokenizer_made_them(source) -> None:
    record = SessionRecord("s", (2**31,))
    document = exported(source[0], record, checkpoints=False).document
    answer = source[0].call(Import("i", "x", document))
    assert isinstance(answer, Failed) and answer.code == "bad_state" and "manifest.ledger[0]" in answer.message
    assert isinstance(OtherFingerprint("tokenizer").call(Import("i", "x", document)), Imported)


def test_a_ledger_beyond_the_last_image_travels_and_only_the_rest_is_prefilled(source) -> None:
    stayed, ledger, _ = source
    longer = (*ledger, *prompt(1))
    destination = Driver("dflash2", images=4)
    answer = destination.call(Import("i", "s", exported(stayed, SessionRecord("s", longer)).document))
    assert isinstance(answer, Imported) and answer.record is not None and answer.record.ledger == longer
    turn = destination.submit(longer, session="s", max_tokens=4, ignore_eos=True)
    destination.steps()
    started = destination.started(turn)
    assert (started.hit, started.reused, started.prefilled) == ("peer", len(ledger) - 1, len(prompt(1)) + 1)


def test_every_checkpoint_of_a_session_travels_in_one_document_with_common_pages_once(source) -> None:
    _, _, document = source
    destination = Driver("dflash2", images=4)
    answer = destination.call(Import("i", "s", document))
    assert isinstance(answer, Imported) and answer.frontiers == (20, len(source[1]) - 1)
    destination.engine.memory.check_invariants()
    again = exported(destination, open_document(document).manifest.session.record())
    assert again.document == document
    assert again.kinds == ("turn_start", "turn_end") and again.frontiers == answer.frontiers


def test_a_turns_end_brings_what_the_turn_added_and_no_slice_more_than_it_may() -> None:
    driver, before, slice_bytes, prompt = TinyDriver("dflash2", images=8, pages=24), NOTHING, 1000, OUTSIDE
    for number in range(3):
        driver.run(prompt, session="s", max_tokens=40, ignore_eos=True)
        ledger = driver.engine._sessions.checkpoints("s")[-1].ledger
        prompt = (*ledger, *[number] * 40)
        record, slices = SessionRecord("s", ledger, frontier=len(ledger) - 1), Slices(before)
        pieces = 0
        while True:
            known = slices.known
            part = driver.call(slices.asking(Export("e", "s", record, slice_bytes=slice_bytes)))
            sizes = [len(segment.data) for segment in part.segments]
            assert not known & {segment.sha256 for segment in part.segments} and sum(sizes[:-1]) < slice_bytes
            slices.take(part)
            if part.piece is not None:
                pieces += 1
                assert sum(sizes) + len(part.piece.data) <= slice_bytes
            if part.whole:
                break
        already = set(before.places)
        before = slices.put_together(part)
        whole = exported(driver, record)
        assert pieces > 1 and before.document.tobytes() == whole.document, "it is the document that goes out at once"
        assert (part.kinds, part.frontiers) == (whole.kinds, whole.frontiers)
        full_pages = len(ledger) // PAGE_TOKENS
        assert len(already & set(before.places)) >= full_pages - 1 and slices.known == set(before.places) | already


def test_an_image_whose_pieces_another_ones_came_between_begins_anew() -> None:
    driver, documents = TinyDriver("dflash2", images=8, pages=24), dict[str, bytes]()
    for name in ("s", "other"):
        driver.run((*OUTSIDE, len(name)), session=name, max_tokens=4, ignore_eos=True)
    slices = {name: Slices(NOTHING) for name in ("s", "other")}
    for name in ("s", "s", "other", "other", "s", *["s"] * 400, *["other"] * 400):
        if name not in documents:
            part = driver.call(slices[name].asking(Export("e", name, slice_bytes=1000)))
            slices[name].take(part)
            if part.whole:
                documents[name] = slices[name].put_together(part).document.tobytes()
    assert documents == {name: driver.call(Export("e", name)).document for name in ("s", "other")}


def _begun(driver: Driver, size: int) -> ImagePart:
    return ImagePart(driver.engine._sessions.checkpoints("s")[-1].serial, size)


def sliced(driver: Driver, slices: Slices, most: int | None = None) -> bytes:
    """The document of session `s` as its slices bring it; b"" if only so many are asked for, and more would come."""
    asked = 0
    while asked != most:
        part = driver.call(slices.asking(Export("e", "s", slice_bytes=1000)))
        slices.take(part)
        if part.whole:
            return slices.put_together(part).document.tobytes()
        asked += 1
    return b""


def test_an_image_that_was_left_half_way_is_whole_for_who_asks_next() -> None:
    driver = TinyDriver("dflash2", images=8, pages=24)
    driver.run(OUTSIDE, session="s", max_tokens=4, ignore_eos=True)
    left = Slices(NOTHING)
    assert not sliced(driver, left, 2), "who asked has left, and the engine stands within the image"
    whole = driver.call(Export("e", "s")).document
    other = Slices(NOTHING)
    assert not sliced(driver, other, 1)
    assert sliced(driver, left) == whole, "who comes back after another one has begun it anew"
    assert sliced(driver, other) == sliced(driver, Slices(NOTHING)) == whole


def test_slices_are_of_the_moment_of_the_first_whatever_turns_come_between() -> None:
    driver = TinyDriver("dflash2", images=8, pages=24)
    driver.run(OUTSIDE, session="s", max_tokens=4, ignore_eos=True)
    ledger = driver.engine._sessions.checkpoints("s")[-1].ledger
    before, slices = driver.call(Export("e", "s")).document, Slices(NOTHING)
    assert not sliced(driver, slices, 1)
    driver.run((*ledger, 1, 2, 3), session="s", max_tokens=6, ignore_eos=True)
    after = driver.call(Export("e", "s")).document
    assert sliced(driver, slices) == before != after
    late = Slices(NOTHING)
    assert not sliced(driver, late, 1)
    driver.call(Drop("d", "s"))
    driver.run(OUTSIDE, session="s", max_tokens=4, ignore_eos=True)
    gone = driver.call(late.asking(Export("e", "s", slice_bytes=1000)))
    assert isinstance(gone, Failed) and (gone.code, gone.param) == ("unknown_checkpoint", "chosen")
    late.begin_anew()
    assert sliced(driver, late) == driver.call(Export("e", "s")).document


def test_an_id_that_somebody_else_has_given_to_his_state_finds_nothing_of_mine() -> None:
    """Ids of checkpoints come with unsigned documents, and are no secret of whoever got one."""
    driver = TinyDriver("dflash2", images=12, pages=48)
    driver.run(OUTSIDE, session="s", max_tokens=4, ignore_eos=True)
    mine, slices = driver.call(Export("e", "s")).document, Slices(NOTHING)
    assert not sliced(driver, slices, 1)
    elsewhere = TinyDriver("dflash2", images=12, pages=48)
    elsewhere.run((*OUTSIDE, 3), session="s", max_tokens=9, ignore_eos=True)
    for own, his in zip(*(one.engine._sessions.checkpoints("s") for one in (driver, elsewhere)), strict=True):
        object.__setattr__(his, "id", own.id)
    foreign = elsewhere.call(Export("e", "s")).document
    assert isinstance(driver.call(Import("i", "his", foreign, tenant="other")), Imported)
    assert sliced(driver, slices) == mine
    assert sliced(driver, Slices(NOTHING)) == mine
    driver.call(Drop("d", "s"))
    for name in ("one", "two"):  # in places that were mine
        assert isinstance(driver.call(Import("i", name, foreign, tenant="other")), Imported)
    his = open_document(driver.call(Export("e", "two")).document).manifest
    assert [s.sha256 for s in his.segments] == [s.sha256 for s in open_document(foreign).manifest.segments]
    known = open_document(driver.call(Export("e", "two", without=frozenset())).document).manifest
    assert [s.sha256 for s in known.segments] == [s.sha256 for s in his.segments]


def test_what_is_not_what_the_engine_says_of_it_is_never_put_together() -> None:
    driver = TinyDriver("dflash2", images=8, pages=24)
    driver.run(OUTSIDE, session="s", max_tokens=4, ignore_eos=True)
    first, second = (
        driver.call(Export("e", "s", slice_bytes=1000, begun=begun)) for begun in (None, _begun(driver, 1000))
    )
    slices = Slices(NOTHING)
    with pytest.raises(StateError, match="from 1000 on came after None"):
        slices.take(second)
    slices.take(first)
    other = replace(second.piece, checkpoint="another")
    with pytest.raises(StateError, match="another from 1000 on"):
        slices.take(replace(second, piece=other))
    whole = Slices(NOTHING)
    while not (last := driver.call(whole.asking(Export("e", "s", slice_bytes=1 << 20)))).whole:
        whole.take(last)
    whole.take(last)
    longer = (last.sizes[0] + 1, *last.sizes[1:])
    with pytest.raises(StateError, match=f"has {longer[0]}"):
        whole.put_together(replace(last, sizes=longer))
    with pytest.raises(StateError, match="a document came with"):
        whole.put_together(replace(last, trailer=last.trailer[1:]))


def test_a_signature_is_that_of_the_clusters_key(tmp_path) -> None:
    files = {secret: tmp_path / secret for secret in ("ours", "same", "other")}
    for name, file in files.items():
        file.write_text("x" * 16 if name == "other" else "k" * 16 + "\n")
    ours, same, other = (
        Driver("dflash2", images=4, cluster_key_file=file) for file in files.values()
    )  # fmt: skip
    turned(ours)
    document = exported(ours).document
    assert same.call(Import("i", "s", document)).signed is True
    assert other.call(Import("i", "s", document)).signed is False
    assert Driver("dflash2", images=4).call(Import("i", "s", document)).signed is False


def test_state_from_outside_does_not_become_the_clusters_own_by_passing_through_it(tmp_path, source) -> None:
    (tmp_path / "key").write_text("k" * 16)
    here, there = (Driver("dflash2", images=6, cluster_key_file=tmp_path / "key") for _ in range(2))
    assert here.call(Import("i", "s", source[2], tenant="t")).signed is False
    moved = there.call(Import("i", "s", exported(here).document, tenant="t"))
    assert moved.signed is False and moved.frontiers
    there.call(Fork("f", "s", "child"))
    child = there.call(Export("e", "child")).document
    assert here.call(Import("i", "back", child, tenant="t")).signed is False
    own = there.submit(IDS, session="own", tenant="t", max_tokens=2, ignore_eos=True)
    there.steps()
    assert there.started(own).reused == 0, "nobody else in the tenant finds it"


OUTSIDE = tuple((i * 5 + 1) % 7 for i in range(40))


def importing(tmp_path: Path, **how: Any) -> tuple[TinyDriver, tuple[int, ...]]:
    """A cluster with a key in which session `s` is state that another one made, and the session's ledger."""
    (tmp_path / "key").write_text("k" * 16)
    elsewhere = TinyDriver("dflash2", images=4)
    ledger = OUTSIDE + elsewhere.run(OUTSIDE, session="s", max_tokens=4, ignore_eos=True).token_ids
    here = TinyDriver("dflash2", cluster_key_file=tmp_path / "key", **how)
    assert here.call(Import("i", "s", exported(elsewhere).document, tenant="t")).signed is False
    return here, ledger


def reused(driver: Driver, prompt: tuple[int, ...], **fields: Any) -> int:
    turn = driver.submit(prompt, tenant="t", max_tokens=2, ignore_eos=True, **fields)
    driver.steps()
    return driver.started(turn).reused


@pytest.mark.parametrize("another", [False, True])
def test_state_from_outside_stays_outside_where_a_turn_has_outlived_all_that_its_session_held(
    tmp_path, another: bool
) -> None:
    here, ledger = importing(tmp_path, lanes=2, images=2 if another else 1)
    turn = here.submit((*ledger, 1, 2), session="s", tenant="t", max_tokens=60, ignore_eos=True)
    while not here.started_events(turn):
        here.engine.step()
    for number in range(here.engine.memory.images.slots):
        here.submit((number,) * 60, session=f"{number}", tenant="t", max_tokens=3, ignore_eos=True)
        while any(lane.session == f"{number}" for lane in here.engine._lanes) or here.engine._scheduler.waiting:
            here.engine.step()
    assert Evicted("s") in here.events
    if another:  # the same session has something of its own again when the turn ends
        here.submit((3, 4, 3), session="s", tenant="t", max_tokens=1, ignore_eos=True)
    here.steps()
    document = exported(here).document
    assert open_document(document, key=b"k" * 16).signed is False
    end = (*ledger, 1, 2, *here.finished(turn).token_ids)
    assert reused(here, (*end, 1), session="own") == 0, "nobody else in the tenant finds it"
    here.engine._sessions.check_invariants()


def test_a_turn_whose_session_was_dropped_leaves_no_tap_of_state_from_outside(tmp_path) -> None:
    here, ledger = importing(tmp_path, images=8, prefill_chunk=8, image_min_tokens=4)
    system = (*ledger, *(3, 1) * 16)
    turn = here.submit((*system, 2), session="s", tenant="t", system_boundary=len(system), max_tokens=2)
    here.engine.step()
    here.call(Drop("d", "s"))
    here.steps()
    assert here.started(turn).reused and reused(here, (*system, 4)) == 0


def test_a_turn_that_follows_one_from_outside_leaves_no_tap_of_it(tmp_path) -> None:
    here, ledger = importing(tmp_path, images=8, image_min_tokens=4)
    first = Submit("first", (*ledger, *(3, 1) * 16), tenant="t", session="s", max_tokens=2, followers=("second",))
    here.engine.execute(first)
    prompt = first.prompt_ids
    second = replace(
        first, turn="second", session=None, followers=(), after="first", system_boundary=len(prompt)
    )  # fmt: skip
    here.engine.execute(second)
    here.steps()
    assert here.started("second").reused == len(prompt) and reused(here, (*prompt, 4)) == 0


def test_a_checkpoint_whose_segments_are_missing_costs_the_session_only_that_checkpoint(source, monkeypatch) -> None:
    _, ledger, document = source
    from deployment.engine import exchange

    class Gappy:
        """An open document whose first checkpoint lies in a store that has lost it."""

        def __init__(self, blob: bytes, **how: object) -> None:
            self._whole = open_document(blob)
            self.manifest, self.signed = self._whole.manifest, False
            self.check_tokens, self.check_fit = self._whole.check_tokens, self._whole.check_fit
            self.check_payload, self.record = self._whole.check_payload, self._whole.record

        def load(self, memory, entry):
            if entry is self.manifest.checkpoints[0]:
                raise MissingSegment("image", bytes(32))
            return self._whole.load(memory, entry)

    monkeypatch.setattr(exchange, "open_document", Gappy)
    here = Driver("dflash2", images=4)
    answer = here.call(Import("i", "s", document))
    assert isinstance(answer, Imported) and answer.frontiers == (len(ledger) - 1,)
    assert answer.record is not None and answer.record.ledger == ledger


def test_a_seeded_turn_goes_on_from_a_document_as_if_it_had_stayed() -> None:
    sampling = Sampling(temperature=0.9, seed=5)
    stayed, destination = Driver("dflash2", images=4), Driver("dflash2", images=4)
    ledger = turned(stayed, 9)
    destination.call(Import("i", "s", exported(stayed).document))
    ends = [
        d.run(ledger, session="s", sampling=sampling, max_tokens=20, ignore_eos=True) for d in (stayed, destination)
    ]
    assert (ends[0].token_ids, ends[0].rounds) == (ends[1].token_ids, ends[1].rounds)


def test_a_key_file_that_cannot_be_a_secret_is_refused_by_name(tmp_path) -> None:
    for file, problem in ((tmp_path / "none", "cannot be read"), (tmp_path / "short", "holds 3 bytes")):
        if file.name == "short":
            file.write_bytes(b"abc\n")
        with pytest.raises(ValueError, match=f"cluster_key_file: .*{problem}"):
            options(cluster_key_file=file)
