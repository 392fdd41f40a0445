"""Rotary positions of a sequence with media: three axes (time, height, width), which are equal for text.

    text:   one step a token, on all axes
    frame:  with p the position where it begins, placeholder k of a grid of columns c has (p, p + k // c, p + k % c);
            what follows goes on at p + max(rows, columns)

After its media a sequence's positions are its cache ordinals plus one number, the rope delta, never above 0. Only the
target's rotary knows these positions: pages, draws and the drafter go by cache ordinals.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model.placeholders import MediaSpan


def rope_delta(spans: Sequence[MediaSpan], ordinal: int) -> int:
    """Position minus ordinal of a text token at `ordinal`, and of all that follow it up to the next span."""
    return sum(_steps(span) - span.length for span in spans if span.stop <= ordinal)


def media_positions(spans: Sequence[MediaSpan], start: int, stop: int) -> torch.Tensor:
    """Positions of the ordinals [start, stop), which may begin and end inside a span: int64 [stop - start, 3]."""
    positions = torch.arange(start, stop)[:, None].repeat(1, 3)
    delta = 0
    for span in spans:
        if span.start >= stop:
            break
        begin, end = max(start, span.start), min(stop, span.stop)
        if begin < end:
            k = torch.arange(begin, end) - span.start
            axes = torch.stack((torch.zeros_like(k), k // span.columns, k % span.columns), dim=-1)
            positions[begin - start : end - start] = span.start + delta + axes
        change = _steps(span) - span.length
        delta += change
        positions[max(0, span.stop - start) :] += change
    return positions


def _steps(span: MediaSpan) -> int:
    return max(span.rows, span.columns)
