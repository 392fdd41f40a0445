"""Which shapes do rounds have, and prefill slices? On a CPU each its own; on a card few, since they are captured as
graphs.

Up to `EXACT_ROWS` lanes a round has a row for each of them; above, it has as many as the next bucket, and the rows that
no lane is in are padding: extents of 0, and an image that nobody holds. Buckets waste at most a fifth of a round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from deployment.engine.drafting import DraftTokens
from deployment.engine.logprobs import MAX_LOGPROBS

EXACT_ROWS = 16
SLICES = range(64, 769, 64)
"""Columns of the prefill slices that are captured. From the host the launches of a slice of 27B took 39 to 60 ms, as
long as the card needs for 450 to 700 columns: a shorter slice would take as long as those."""


@dataclass(frozen=True)
class RoundShape:
    """`rows`: B, padding included. `pending`: columns of features that are taken into the draft context. `drafts`:
    tokens that the drafter proposes, 0 for none. `width`: W, columns that the target verifies."""

    rows: int
    pending: int
    drafts: int
    width: int


@dataclass(frozen=True)
class Traits:
    """What some row of a round asks for, and no other round pays for. `greedy`: all rows are. `masks`: rows that have a
    mask. `told`: rows that want log-probabilities, and `alternatives`, how many of the best tokens they hear of;
    `processed`: some of them after all controls."""

    greedy: bool
    min_p: bool
    reproducible: bool
    penalised: bool
    masks: int
    told: int
    alternatives: int
    processed: bool = False


GREEDY = Traits(greedy=True, min_p=False, reproducible=False, penalised=False, masks=0, told=0, alternatives=0)
SAMPLED = replace(GREEDY, greedy=False)
"""Of most rounds."""


def exact(lanes: int) -> int:
    return lanes


def bucketed(lanes: int) -> int:
    """Rows of a round of so many lanes: 1 .. 16, 20, 24, 28, 32, 40, 48, 56, 64, 80 .."""
    if lanes <= EXACT_ROWS:
        return lanes
    step = (1 << (lanes - 1).bit_length()) // 8
    return -(-lanes // step) * step


@dataclass(frozen=True)
class Shapes:
    """`bucket`: rows for a number of lanes. `few`: all columns that there could be are computed, whatever a round needs
    of them, and rare traits are paid for without being asked for."""

    draft_tokens: DraftTokens
    bucket: Callable[[int], int] = exact
    few: bool = False

    @classmethod
    def on(cls, device: torch.device, draft_tokens: DraftTokens) -> Shapes:
        if device.type == "cuda":
            return cls(draft_tokens, bucketed, few=True)
        return cls(draft_tokens)

    @property
    def most_width(self) -> int:
        return self.draft_tokens.most + 1

    def most_rows(self, lanes: int) -> int:
        return max(self.bucket(count) for count in range(1, lanes + 1))

    def most_cells(self, lanes: int) -> int:
        """Columns of all rows together, in the largest round."""
        return max(self.bucket(count) * (self.draft_tokens.of(count) + 1) for count in range(1, lanes + 1))

    def of(self, extents: list[int], pending: list[int], whole_block: bool) -> RoundShape:
        """For lanes with these proposal extents P and pending features. `whole_block`: the drafter proposes K tokens
        however few are verified (DFlash2)."""
        most = self.draft_tokens.of(len(extents))
        verified = max(extents)
        if self.few and verified:
            verified = most
        drafts = most if whole_block and verified else verified
        columns = self.most_width if self.few else max(pending)
        return RoundShape(self.bucket(len(extents)), columns, drafts, verified + 1)

    def expected(self, lanes: int) -> list[RoundShape]:
        """Those of rounds of 1 .. `lanes` lanes that have tokens left, the largest first."""
        most = self.draft_tokens.of
        sizes = {(self.bucket(count), most(count)) for count in range(1, lanes + 1)}
        shapes = [RoundShape(rows, self.most_width, drafts, drafts + 1) for rows, drafts in sizes]
        return sorted(shapes, key=lambda shape: (shape.rows, shape.drafts), reverse=True)

    def slice(self, tokens: int) -> int | None:
        """Columns that prefill so many tokens, the last of them padding; None: exactly as many, and not as a graph."""
        return next((columns for columns in SLICES if tokens <= columns), None) if self.few else None

    def traits(self, wanted: Traits, rows: int, vocabulary: int) -> Traits:
        """`wanted`, or what covers it among few, for a round of so many `rows`."""
        if not self.few:
            return wanted
        alternatives = min(MAX_LOGPROBS, vocabulary) if wanted.told else 0
        told = min(1 << (wanted.told - 1).bit_length(), rows) if wanted.told else 0
        sampled, masks = not wanted.greedy, rows if wanted.masks else 0
        return Traits(wanted.greedy, sampled, sampled, wanted.penalised, masks, told, alternatives, wanted.processed)
