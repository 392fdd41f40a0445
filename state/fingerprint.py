"""Was this state made by what would go on from it? Facts by name, compared exactly."""

from __future__ import annotations

from collections.abc import Mapping

from state.errors import FingerprintMismatch
from state.geometry import StateGeometry

Fingerprint = Mapping[str, str | int]
"""Named facts; every one of them must be equal before a state is loaded."""


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


def compare(stored: Fingerprint, here: Fingerprint) -> None:
    """Raises `FingerprintMismatch` naming the first field that differs, or that only one side has."""
    for field in [*here, *(field for field in stored if field not in here)]:
        theirs, ours = stored.get(field), here.get(field)
        if type(theirs) is not type(ours) or theirs != ours:
            raise FingerprintMismatch(field, theirs, ours)
