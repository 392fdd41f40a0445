"""The rows of the target's head among which a drafter proposes: all public ones, or a chosen list of them.

An indexed head scores fewer rows, and its choice is mapped back to token ids. Its rows are kept in ascending order of
their ids, so that "the lower row" and "the lower token id" are the same rule (decision 9). Verification always uses the
full head: a token outside the list can be generated, but not proposed.

The index file is a safetensors file with one tensor, `rows`, int32 [N].
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kernels.head import head_scores
from model.errors import ModelError
from model.target import Target


@dataclass(frozen=True)
class ProposalHead:
    """The first `rows` rows of `weight` [N, H]; `token_ids` int64 [rows], ascending, or None where row and token id are
    the same."""

    weight: torch.Tensor
    rows: int
    token_ids: torch.Tensor | None

    @classmethod
    def full(cls, target: Target) -> ProposalHead:
        """All public rows; shares the target's memory."""
        return cls(target.head, target.public_rows, None)

    @classmethod
    def indexed(cls, target: Target, rows: torch.Tensor) -> ProposalHead:
        """The listed rows, int64 [N] ascending; a copy of N rows of the head."""
        rows = rows.to(target.head.device)
        return cls(target.head[rows], len(rows), rows)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [..., H] -> FP32 [..., rows]."""
        return head_scores(hidden, self.weight, self.rows)

    def tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Token ids of head rows: int64 [...] -> int64 [...]."""
        return rows if self.token_ids is None else self.token_ids[rows]


def load_rows(path: Path, public_rows: int) -> torch.Tensor:
    """The index file's rows, int64 [N] ascending. Raises ModelError naming what is wrong."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            if "rows" not in file.keys():  # noqa: SIM118 - a safetensors handle is not iterable
                raise ModelError(f"{path}: tensor rows is missing")
            rows = file.get_tensor("rows")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read as a proposal head's index: {error}") from None
    if rows.dtype != torch.int32 or rows.dim() != 1 or not len(rows):
        raise ModelError(f"{path}: rows is {rows.dtype} {list(rows.shape)}, must be int32 [N] with N of at least 1")
    rows = rows.to(torch.int64).sort().values
    if bool((rows[1:] == rows[:-1]).any()):
        raise ModelError(f"{path}: rows holds {int(rows[1:][rows[1:] == rows[:-1]][0])} twice")
    if int(rows[0]) < 0 or int(rows[-1]) >= public_rows:
        wrong = int(rows[0]) if int(rows[0]) < 0 else int(rows[-1])
        raise ModelError(f"{path}: rows holds {wrong}, but the public token ids are 0 to {public_rows - 1}")
    return rows
