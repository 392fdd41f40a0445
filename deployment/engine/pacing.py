"""How much of which prompt is prefilled before the lanes that decode get their next round? No tensors, no clock.

A slice lasts about `max_stall_ms` while lanes decode, going by the speed of the slices before; with nobody decoding
it has `chunk` tokens. Every slice has a cost of its own, reading all weights: so a short one, cut off by its prompt's
end, is slow for its tokens, and says nothing of how many would fit. Slices end at whole pages where they can, so that
where a prompt is cut does not change how the recurrence is blocked, whatever the clock said.

Between several prompts the shortest rest goes first, interactive before background: the mean time to the first token
is smallest that way, and a short prompt joins the rounds instead of waiting for a long one. A lane that was passed
over `PASSED` times goes next whatever its length, so that a stream of short prompts delays a long one, but never
stops it.
"""

from __future__ import annotations

from collections.abc import Sequence

from deployment.engine.lane import Lane
from state.geometry import PAGE_TOKENS

PASSED = 4


class PrefillPacer:
    """`chunk`: tokens of a slice at most; `max_stall_ms`: how long one may last while lanes decode."""

    def __init__(self, chunk: int, max_stall_ms: float) -> None:
        self._chunk = chunk
        self._seconds = max_stall_ms / 1000
        self._speed: float | None = None
        self._fitting = 0

    def choose(self, lanes: Sequence[Lane]) -> Lane:
        """The lane that gets the next slice; the others have been passed over once more."""

        def rank(lane: Lane) -> tuple[bool, bool, int]:
            background = lane.submit.priority == "background"
            return lane.passed < PASSED, background, lane.prefill_end - lane.frontier

        chosen = min(lanes, key=rank)
        for lane in lanes:
            lane.passed = 0 if lane is chosen else lane.passed + 1
        return chosen

    def slice_end(self, lane: Lane, decoding: bool) -> int:
        """Where the next slice of a lane's prompt ends; always beyond its frontier."""
        size = self._chunk
        if decoding:
            # the first slice is a guess: one page costs little on any device, and its speed is known then
            size = min(size, max(PAGE_TOKENS, self._fitting))
        end = lane.frontier + size
        if size >= PAGE_TOKENS:
            end -= end % PAGE_TOKENS  # beyond the frontier still: the slice has a whole page at least
        for boundary in (lane.system_boundary, lane.boundary):
            if lane.frontier < boundary:
                end = min(end, boundary)
        return min(end, lane.prefill_end)

    def measured(self, tokens: int, seconds: float) -> None:
        """How long a slice took. Half of the estimate is the last slice's: prompts get slower as they grow."""
        speed = tokens / max(seconds, 1e-6)
        if self._speed is None:
            self._speed = speed
        elif speed > self._speed or seconds > self._seconds or tokens > self._fitting - PAGE_TOKENS:
            self._speed = (self._speed + speed) / 2
        self._fitting = int(self._speed * self._seconds)
