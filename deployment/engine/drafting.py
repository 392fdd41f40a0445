"""How many tokens does a round draft, K? Fewer the more lanes decode, if a table says so.

One lane leaves most of a device idle, so that long blocks cost it little; many lanes pay for every column. The table
holds steps of lanes and K, ascending: the last step whose lanes are reached counts, and K = 0 drafts nothing. Below
the first step, and without a table, K is the engine's own.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_DRAFT_TOKENS = 15

Steps = tuple[tuple[int, int], ...]
"""(decoding lanes, K), ascending in lanes."""


@dataclass(frozen=True)
class DraftTokens:
    """`most`: K without a table. Raises ValueError for `steps` that do not fit it."""

    most: int
    steps: Steps = ()

    def __post_init__(self) -> None:
        check_steps(self.steps, self.most)

    def of(self, lanes: int) -> int:
        """K of a round of so many lanes."""
        return next((tokens for least, tokens in reversed(self.steps) if least <= lanes), self.most)


def check_steps(steps: Steps, most: int = MAX_DRAFT_TOKENS) -> None:
    """Raises ValueError, naming the field, for a table that cannot be kept to. `most`: the engine's K."""
    before = 0
    for lanes, tokens in steps:
        if lanes <= before:
            raise ValueError(f"draft_tokens_by_lanes has {lanes} lanes after {before}, must be ascending from 1")
        if not 0 <= tokens <= most:
            wanted = f"0 to {most}, which is draft_tokens or its limit"
            raise ValueError(f"draft_tokens_by_lanes drafts {tokens} tokens at {lanes} lanes, must be {wanted}")
        before = lanes


def read_steps(text: str) -> Steps:
    """Steps written as in `1:15,3:7,8:0`. Raises ValueError for what is not."""
    try:
        pairs = [step.split(":") for step in text.split(",")]
        return tuple((int(lanes), int(tokens)) for lanes, tokens in pairs)
    except ValueError:
        raise ValueError("must be lanes and tokens as in 1:15,3:7,8:0") from None
