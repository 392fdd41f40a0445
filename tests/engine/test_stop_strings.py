"""Stop strings: what is shown, and when, whatever the tokens and rounds are cut into."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deployment.engine.commands import Cancel, Sampling
from deployment.engine.events import Tokens
from deployment.engine.stop_strings import StopMatch, StopStrings
from tests.engine.driving import Driver, alone, models, prompt, seeded

# ------------------------------------------------------------------------------------------------ the matcher


class Pieces:
    """A tokenizer whose id i stands for the i-th piece of a text."""

    def __init__(self, data: bytes, cuts: Sequence[int]) -> None:
        edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
        self.pieces = [data[a:b] for a, b in pairwise(edges)]

    def bytes_of(self, ids) -> bytes:
        return b"".join(self.pieces[i] for i in ids)

    def text(self, count: int) -> str:
        return self.bytes_of(range(count)).decode(errors="replace")


@dataclass(frozen=True)
class Watched:
    """`free[i]`: ids free after i + 1 pushes. `pushed`: ids up to the end."""

    match: StopMatch | None
    free: tuple[int, ...]
    pushed: int


def watch(tokens: Pieces, strings: Sequence[str], **more) -> Watched:
    stops, free = StopStrings(strings, tokens.bytes_of, **more), []
    for token in range(len(tokens.pieces)):
        match = stops.push(token)
        if match is not None:
            return Watched(match, tuple(free), token + 1)
        free.append(stops.free)
    return Watched(None, tuple(free), len(tokens.pieces))


def reference(text: str, strings: Sequence[str]) -> tuple[int, int] | None:
    """(start, end) of the match that ends first; of several, the longest."""
    found = [(at + len(s), at) for s in strings for at in range(len(text)) if text.startswith(s, at)]
    end, start = min(found, default=(-1, -1))
    return (start, end) if found else None


LETTERS = st.text("abä€", max_size=24)
STRINGS = st.lists(st.text("abä€", min_size=1, max_size=5), min_size=1, max_size=4)
CUTS = st.lists(st.integers(0, 100), max_size=30)


@settings(max_examples=300, deadline=None)
@given(LETTERS, STRINGS, CUTS, st.booleans())
@example("aab", ["ab"], [1, 1, 1, 2], False)
@example("b€a", ["€"], [2, 3], False)
def test_every_split_into_tokens_gives_the_same_text(text, strings, cuts, include):
    tokens = Pieces(text.encode(), cuts)
    watched = watch(tokens, strings, include=include)
    expected = reference(text, strings)
    if expected is None:
        assert watched.match is None
        return
    assert watched.match is not None
    shown, cut = tokens.text(watched.match.shown), watched.match.text_cut
    assert shown[: len(shown) - cut] == text[: expected[include]]
    # not one id more than the text needs, apart from ids without text
    needed = tokens.pieces[: watched.match.shown]
    while needed and not needed[-1]:
        needed.pop()
    assert include or len(b"".join(needed[:-1])) < max(1, len(text[: expected[0]].encode()))
    before = len(tokens.bytes_of(range(watched.pushed - 1)))
    assert before < len(text[: expected[1]].encode()) <= len(tokens.bytes_of(range(watched.pushed)))


@settings(max_examples=300, deadline=None)
@given(LETTERS, STRINGS, CUTS, LETTERS, CUTS)
def test_what_is_free_is_never_taken_back_and_what_is_held_could_still_be_a_match(text, strings, cuts, more, later):
    """An id is held if and only if some continuation makes it part of a match (of strings that do not hide another)."""
    tokens = Pieces(text.encode(), cuts)
    watched = watch(tokens, strings)
    assert list(watched.free) == sorted(watched.free)
    if watched.match is not None:
        assert not watched.free or watched.free[-1] <= watched.match.shown
        return
    free = watched.free[-1]
    longer = Pieces(b"", [])
    longer.pieces = [*tokens.pieces, *Pieces(more.encode(), later).pieces]
    continued = watch(longer, strings)
    assert continued.match is None or continued.match.shown >= free
    if free < len(tokens.pieces) and not any(a != b and a in b for a in strings for b in strings):
        ends = [string.encode()[n:] for string in strings for n in range(len(string.encode()))]
        outcomes = []
        for end in ends:
            longer.pieces = [*tokens.pieces, end]
            outcomes.append(watch(longer, strings).match)
        held = [m for m in outcomes if m and (m.shown <= free or (m.shown == free + 1 and m.text_cut))]
        assert held


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=12), st.sampled_from(["a", "é", "€b"]), st.binary(max_size=4), CUTS, st.booleans())
def test_bytes_that_are_no_text_change_nothing(before, string, after, cuts, include):
    data = before + string.encode() + after
    tokens = Pieces(data, cuts)
    match = watch(tokens, [string], include=include).match
    assert match is not None
    shown = tokens.text(match.shown)
    at = data.index(string.encode()) + (len(string.encode()) if include else 0)
    assert shown[: len(shown) - match.text_cut] == data[:at].decode(errors="replace")


def test_a_match_that_leaves_less_than_min_tokens_is_none_and_a_later_one_counts():
    tokens = Pieces(b"a!bc!d", [1, 2, 3, 4, 5])
    assert watch(tokens, ["!"], min_tokens=1).match == StopMatch("!", 1, 0)
    assert watch(tokens, ["!"], min_tokens=2).match == StopMatch("!", 4, 0)
    assert watch(tokens, ["!"], min_tokens=5).match is None
    assert watch(tokens, ["!"], min_tokens=2, include=True).match == StopMatch("!", 2, 0)


def test_the_string_that_ends_first_wins_and_the_longest_of_those():
    assert watch(Pieces(b"xabcd", []), ["abcd", "c"]).match == StopMatch("c", 1, 2)
    assert watch(Pieces(b"xabcd", []), ["bc", "abc", "abcd"]).match == StopMatch("abc", 1, 4)


# ------------------------------------------------------------------------------------------------ the engine

DRAFTERS = [("none", None), ("dflash", 3), ("dflash2", 7)]
INDEX = 6
"""A prompt whose answer has long accepted runs."""


@functools.cache
def undisturbed() -> tuple[int, ...]:
    return alone(prompt(INDEX), 40).token_ids


def text_of(ids: Sequence[int]) -> str:
    return models("none").tokenizer.decode(ids)


def shown_text(driver: Driver, turn: str) -> str:
    """The answer as a client puts it together from the events."""
    finished = driver.finished(turn)
    assert driver.streamed(turn) == finished.token_ids
    cuts = [event.text_cut for event in driver.of(turn) if isinstance(event, Tokens)]
    assert not any(cuts[:-1]) and (finished.text_cut == 0 or cuts[-1] == finished.text_cut)
    text = text_of(finished.token_ids)
    return text[: len(text) - finished.text_cut]


@pytest.mark.parametrize("backend, draft_tokens", DRAFTERS)
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_anywhere_in_the_answer_ends_state_and_stream_at_its_token(backend, draft_tokens, include):
    """Strings of 1 to 9 characters from all over the greedy answer, against cutting its text."""
    whole = undisturbed()
    text = text_of(whole)
    driver = Driver(backend, draft_tokens, lanes=4, images=8)
    strings = [text[at : at + 1 + at % 9] for at in range(5, len(text) - 9, 11)]
    turns = [
        driver.submit(
            prompt(INDEX), session=f"s{i}", max_tokens=40, ignore_eos=True, stop_strings=(string, "never\0there"),
            include_stop_string=include,
        )
        for i, string in enumerate(strings)
    ]  # fmt: skip
    driver.steps()
    for turn, string in zip(turns, strings, strict=True):
        finished = driver.finished(turn)
        at = text.index(string)
        ending = next(n for n in range(41) if len(text_of(whole[:n])) >= at + len(string))
        assert (finished.finish_reason, finished.stop_string, finished.stop_id) == ("stop", string, None)
        assert shown_text(driver, turn) == text[: at + len(string) * include]
        assert finished.token_ids + finished.hidden_ids == whole[:ending]
        assert finished.frontier == len(prompt(INDEX)) + ending - 1
    kept = driver.engine.memory.checkpoints[-1]
    finished = driver.finished(turns[-1])
    assert kept.ledger == prompt(INDEX) + finished.token_ids + finished.hidden_ids


@pytest.mark.parametrize("backend, draft_tokens", DRAFTERS)
def test_nothing_of_a_stop_string_is_ever_sent_and_a_false_start_comes_later(backend, draft_tokens):
    whole = undisturbed()
    text = text_of(whole)
    almost = text[10:22] + "\0"
    driver = Driver(backend, draft_tokens, images=2)
    turn = driver.submit(prompt(INDEX), max_tokens=40, ignore_eos=True, stop_strings=(almost, text[60:66]))
    sent: list[int] = []
    while driver.engine.step():
        sent = list(driver.streamed(turn))
        ledger_text = text_of(whole[: len(sent)])
        held = max(
            (n for s in (almost, text[60:66]) for n in range(1, len(s)) if ledger_text.endswith(s[:n])), default=0
        )
        assert held == 0 or driver.finished(turn)
    assert shown_text(driver, turn) == text[: text.index(text[60:66])]


@pytest.mark.parametrize("ending", ["length", "eos", "cancel"])
def test_what_was_held_back_is_sent_when_the_turn_ends_otherwise(ending):
    whole = undisturbed()
    text = text_of(whole[:9])
    driver = Driver("dflash2", images=2)
    stop_ids = (whole[9],) if ending == "eos" else ()
    turn = driver.submit(
        prompt(INDEX), max_tokens=9 if ending == "length" else 40, ignore_eos=True, stop_ids=stop_ids,
        stop_strings=(text_of(whole) + "\0",),
    )  # fmt: skip
    if ending == "cancel":
        driver.engine.step()
        driver.engine.step()
        assert driver.streamed(turn) == ()
        driver.engine.execute(Cancel(turn))
    driver.steps()
    finished = driver.finished(turn)
    if ending == "cancel":
        assert finished.finish_reason == "cancelled" and finished.token_ids
        assert driver.streamed(turn) == finished.token_ids == whole[: len(finished.token_ids)]
        assert finished.frontier == len(prompt(INDEX)) + len(finished.token_ids) - 1
        return
    cut = whole.index(whole[9]) if ending == "eos" else 9
    assert finished.finish_reason == ("stop" if ending == "eos" else "length")
    assert finished.token_ids == driver.streamed(turn) == whole[:cut]
    assert finished.hidden_ids == ((whole[9],) if ending == "eos" else ()) and finished.stop_string is None
    assert ending == "eos" or shown_text(driver, turn) == text


@pytest.mark.parametrize("backend, draft_tokens", DRAFTERS)
@pytest.mark.parametrize("max_tokens", [3, 4, 5])
def test_stop_beats_length_when_both_come_with_one_token_or_in_one_round(backend, draft_tokens, max_tokens):
    """An accepted run [a, b, STOP, c, d] with a budget that ends at STOP or behind it."""
    whole = undisturbed()
    at = next(i for i in range(2, 30) if whole[i] not in whole[:i] and text_of(whole[i : i + 1]).strip())
    skipped = prompt(INDEX) + whole[: at - 2]
    by_id = Driver(backend, draft_tokens, images=2).run(
        skipped, max_tokens=max_tokens, ignore_eos=True, stop_ids=(whole[at],)
    )
    assert (by_id.finish_reason, by_id.stop_id) == ("stop", whole[at])
    assert by_id.token_ids == whole[at - 2 : at]
    string = text_of(whole[at - 2 : at + 1])
    by_text = Driver(backend, draft_tokens, images=2).run(
        skipped, max_tokens=max_tokens, ignore_eos=True, stop_strings=(string,)
    )
    assert (by_text.finish_reason, by_text.stop_string, by_text.token_ids) == ("stop", string, ())
    assert by_text.hidden_ids == whole[at - 2 : at + 1]


def test_an_end_token_before_a_stop_string_of_the_same_round_wins():
    plain = alone(prompt(8), 100).token_ids
    ends = set(models("none").defaults.eos_ids)
    cut = next(i for i, token in enumerate(plain) if token in ends)
    after = text_of(plain[cut : cut + 6])
    assert after not in text_of(plain[:cut])
    finished = Driver("dflash2", images=2).run(prompt(8), max_tokens=200, stop_strings=(after,))
    assert (finished.stop_id, finished.stop_string, finished.token_ids) == (plain[cut], None, plain[:cut])


def test_a_stop_string_before_min_tokens_does_not_end_the_turn():
    whole = undisturbed()
    text = text_of(whole)
    character = max(set(text), key=text.count)
    for least in (0, 3, 11):
        driver = Driver("dflash2", images=2)
        turn = driver.submit(
            prompt(INDEX), sampling=Sampling(min_tokens=least), max_tokens=40, ignore_eos=True,
            stop_strings=(character,),
        )  # fmt: skip
        driver.steps()
        finished = driver.finished(turn)
        assert finished.finish_reason == "stop" and len(finished.token_ids) >= least
        shown = shown_text(driver, turn)
        assert text.startswith(shown + character) and shown.count(character) == text[: len(shown)].count(character)
        assert least == 0 or character in shown


@pytest.mark.parametrize("backend, draft_tokens", [("none", None), ("dflash", 15)])
def test_seeded_text_ends_at_the_same_character_with_and_without_drafting(backend, draft_tokens):
    whole = alone(prompt(4), 40, seeded(11)).token_ids
    text = text_of(whole)
    driver = Driver(backend, draft_tokens, images=2)
    turn = driver.submit(prompt(4), sampling=seeded(11), max_tokens=40, ignore_eos=True, stop_strings=(text[30:35],))
    driver.steps()
    assert shown_text(driver, turn) == text[: text.index(text[30:35])]


@pytest.mark.parametrize("string", ["", "x" * 1025, "\ud800"])
def test_strings_that_cannot_be_searched_are_refused(string):
    driver = Driver("none", images=2)
    assert driver.failed(driver.submit(prompt(0), stop_strings=("a", string))).param == "stop"
