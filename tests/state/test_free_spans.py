"""What is free is what was given and not taken, in as few pieces as there can be."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from state.free_spans import FreeSpans, Span

SIZE = 64


def pieces(free: set[int]) -> list[Span]:
    starts = sorted(at for at in free if at - 1 not in free)
    ends = sorted(at + 1 for at in free if at + 1 not in free)
    return [Span(start, end - start) for start, end in zip(starts, ends, strict=True)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.booleans(), st.integers(0, 20)), max_size=60))
def test_spans_are_those_of_a_set_of_bytes(steps: list[tuple[int, bool, int]]) -> None:
    """Each step takes one, from the bottom or the top, and gives back the n-th of those that are taken, if there is."""
    spans, free, taken = FreeSpans(), set(range(SIZE)), list[Span]()
    assert spans.give(Span(0, SIZE)) == Span(0, SIZE)
    for size, from_top, back in steps:
        fitting = [span for span in pieces(free) if span.size >= size]
        hole = spans.take(size, from_top=from_top)
        assert hole == ((fitting[-1] if from_top else fitting[0]) if fitting else None)
        if hole is not None:
            place = hole.end - size if from_top else hole.place
            taken.append(Span(place, size))
            free -= set(range(place, place + size))
            for rest in (Span(hole.place, place - hole.place), Span(place + size, hole.end - place - size)):
                if rest.size:
                    assert spans.give(rest) == rest
        if back < len(taken):
            span = taken.pop(back)
            free |= set(range(span.place, span.end))
            joined = spans.give(span)
            assert joined in pieces(free) and joined.place <= span.place and span.end <= joined.end
        assert list(spans) == pieces(free)
        assert spans.total == len(free)
        assert spans.largest == max((span.size for span in pieces(free)), default=0)
