"""Was this state made by what would go on from it? Facts by name, compared exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from state.errors import FingerprintMismatch

# Whoever only speaks of sessions, as a host store does, has no need of torch.
if TYPE_CHECKING:
    from state.geometry import StateGeometry

Fingerprint = Mapping[str, str | int]
"""Named facts; every one of them must be equal before a state is loaded."""

Matter = Literal["text", "weights", "form", "numeric"]
"""What a difference means (decision 23). `text`: tokenizer or template, so that stored token ids say something else.
`weights`: another model of the same text. `form`: drafter, dtypes, page size or S; the same tokens in another state.
`numeric`: another library, kernel set or card; the same tokens, nearly the same state."""

MATTERS: tuple[Matter, ...] = ("text", "weights", "form", "numeric")
"""Gravest first."""

_OF_DRAFTER_OR_FORM = {
    "backend",
    "draft_config",
    "drafter",
    "geometry.page_tokens",
    "geometry.ring_layers",
    "geometry.full_layers",
    "geometry.draft_kv_heads",
    "geometry.draft_head_dim",
    "geometry.window",
}


@dataclass(frozen=True)
class Mismatch:
    """One fact that differs. `stored`, `here`: its values; None where a side does not have it."""

    field: str
    matter: Matter
    stored: str | int | None
    here: str | int | None


def make_fingerprint(
    geometry: StateGeometry,
    *,
    config: str,
    draft_config: str,
    weights: str,
    drafter: str,
    tokenizer: str,
    template: str,
    backend: str,
    numeric_path: str,
) -> dict[str, str | int]:
    """All that a state depends on, in the order in which a mismatch is reported.

    `config`, `draft_config`: digests of the constants of target and drafter (rotary, norms, taps, causality);
    `weights`, `drafter`: digests of the checkpoints ("none" without a drafter); `tokenizer`, `template`: their sha256;
    `numeric_path`: library, kernel set and device, since other arithmetic gives another state.
    """
    named: dict[str, str | int] = {
        "tokenizer": tokenizer,
        "template": template,
        "config": config,
        "weights": weights,
        "backend": backend,
        "draft_config": draft_config,
        "drafter": drafter,
    }
    named |= {f"geometry.{name}": value for name, value in geometry.facts().items()}
    return named | {"numeric_path": numeric_path}


def compare(stored: Fingerprint, here: Fingerprint) -> Mismatch | None:
    """The gravest difference, of several equally grave ones the first in `make_fingerprint`'s order. None if equal."""
    found: list[Mismatch] = []
    for field in [*here, *(field for field in stored if field not in here)]:
        theirs, ours = stored.get(field), here.get(field)
        if type(theirs) is not type(ours) or theirs != ours:
            found.append(Mismatch(field, _matter_of(field), theirs, ours))
    return min(found, key=lambda mismatch: MATTERS.index(mismatch.matter), default=None)


def require_equal(stored: Fingerprint, here: Fingerprint) -> None:
    """Raises `FingerprintMismatch` naming the gravest difference."""
    mismatch = compare(stored, here)
    if mismatch is not None:
        raise FingerprintMismatch(mismatch.field, mismatch.stored, mismatch.here)


def _matter_of(field: str) -> Matter:
    if field in ("tokenizer", "template"):
        return "text"
    if field == "numeric_path":
        return "numeric"
    if field in _OF_DRAFTER_OR_FORM or (field.startswith("geometry.") and field.endswith("_dtype")):
        return "form"
    return "weights"  # and whatever we do not know: another writer may have had a reason for it
