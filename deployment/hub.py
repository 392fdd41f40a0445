"""Models by their name on the Hugging Face hub, and which drafter belongs to which target.

A directory that exists is one; else OWNER/NAME is looked for on the hub, whose own variables (HF_HOME, HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE) hold.
"""

from __future__ import annotations

import re
from pathlib import Path

AUTO = Path("auto")
"""As a drafter: the public one of the target."""

_TEXTS = ("*.json", "*.jinja", "*.txt")
_WEIGHTS = ("*.safetensors",)
"""What a model is read from: no pickled weights, no other formats."""

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_VARIANT = re.compile(r"-(FP8|FP8-Dynamic|BF16)$")
"""Weights of another precision have the same drafter."""

DRAFTERS = {
    "Qwen3.5-4B": {"dflash": "z-lab/Qwen3.5-4B-DFlash"},
    "Qwen3.5-9B": {"dflash": "z-lab/Qwen3.5-9B-DFlash"},
    "Qwen3.5-27B": {"dflash": "z-lab/Qwen3.5-27B-DFlash"},
    "Qwen3.5-35B-A3B": {"dflash": "z-lab/Qwen3.5-35B-A3B-DFlash"},
    "Qwen3.5-397B-A17B": {"dflash": "z-lab/Qwen3.5-397B-A17B-DFlash"},
    "Qwen3.6-27B": {"dflash": "z-lab/Qwen3.6-27B-DFlash"},
    "Qwen3.6-35B-A3B": {"dflash": "z-lab/Qwen3.6-35B-A3B-DFlash", "dflash2": "incoai/Qwen3.6-35B-A3B-DFlash2"},
    "Qwen3.8-27B": {"dflash2": "z-lab/Qwen3.8-27B-DFlash2"},
}
"""By the name of the target and the backend."""


def hub_id(place: Path) -> str | None:
    """The name on the hub that is meant; None: a directory is."""
    name = place.as_posix()
    return name if _ID.fullmatch(name) and not place.exists() else None


def located(field: str, place: Path, *, weights: bool = True) -> Path:
    """The model's directory here; what is on the hub is fetched first, or found where it was fetched to before.
    Raises ValueError naming the field."""
    name = hub_id(place)
    if name is None:
        return place
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        message = f"{field}: there is no directory {name}, and to look on the Hugging Face hub needs huggingface_hub"
        raise ValueError(f"{message}: pip install 'dflash-serve[hub]'") from None
    try:
        return Path(snapshot_download(name, allow_patterns=[*_TEXTS, *(_WEIGHTS if weights else ())]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).strip().splitlines()
        what = f"there is no directory {name}, and it cannot be had from the Hugging Face hub"
        raise ValueError(f"{field}: {what}: {why[0] if why else type(error).__name__}") from None


def public_drafter(target: Path, backend: str) -> Path:
    """The drafter that is published for a target, by the last part of its name. Raises ValueError naming the field."""
    known = DRAFTERS.get(_VARIANT.sub("", target.name), {})
    if backend in known:
        return Path(known[backend])
    others = [f"with backend {other} it is {drafter}" for other, drafter in known.items()]
    what = others[0] if others else f"of {', '.join(DRAFTERS)} it knows one"
    raise ValueError(f"draft: auto knows no {backend} drafter of {target}; {what}")
