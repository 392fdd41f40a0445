"""Thinking budget: which id comes next whatever the model would say.

Once a turn has spent its budget inside think blocks, an open block is closed by the ids of `close`, one after another.
They are kept like drawn ids, and the sampler has no part in them: random numbers are keyed by position, so that what
follows is what would follow if the model had closed the block itself.
"""

from __future__ import annotations

from deployment.engine.commands import ThinkingBudget


class ThinkingLimit:
    """Follows one answer. Ids are pushed as they are kept, in order."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._open = budget.opened
        self._left = budget.tokens
        self._closing = 0

    @property
    def forced(self) -> int | None:
        """The id that must come next; None if the model chooses."""
        if self._closing or (self._open and self._left == 0):
            return self._budget.close[self._closing]
        return None

    def push(self, token: int) -> None:
        if self.forced is not None:
            self._closing = (self._closing + 1) % len(self._budget.close)
            self._open = self._closing > 0
        elif self._open and token == self._budget.end:
            self._open = False
        elif self._open:
            self._left -= 1
        else:
            self._open = token == self._budget.begin
