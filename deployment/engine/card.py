"""Is the card free? A replica that takes another's place comes before the other's memory has gone."""

from __future__ import annotations

import logging
import shutil
import subprocess
import time
from collections.abc import Callable

import torch

from deployment.engine.options import EngineOptions
from model.errors import ModelError

WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.5

logger = logging.getLogger(__name__)


def wait_for_card(options: EngineOptions) -> None:
    """Waits until the card has room for the weights at least. Raises ModelError naming who holds it."""
    device = torch.device(options.device)
    if device.type == "cuda":
        directories = [directory for directory in (options.model, options.draft) if directory is not None]
        needed = sum(file.stat().st_size for directory in directories for file in directory.glob("*.safetensors"))
        wait_for_room(options.device, needed, lambda: torch.cuda.mem_get_info(device)[0], holders)


def wait_for_room(
    card: str,
    needed: int,
    free: Callable[[], int],
    holders: Callable[[], list[str]],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """`needed`, `free()`: bytes. `holders()`: what other processes have of the card, in words."""
    deadline, told = clock() + WAIT_SECONDS, False
    while free() < needed:
        who = ", ".join(holders()) or "nobody that can be named"
        if clock() >= deadline:
            raise ModelError(
                f"device {card}: the weights need {_gib(needed)} and {_gib(free())} are free after "
                f"{WAIT_SECONDS:.0f} s; the card is held by {who}"
            )
        if not told:
            logger.warning("waiting for %s: %s of %s are free, held by %s", card, _gib(free()), _gib(needed), who)
            told = True
        sleep(_POLL_SECONDS)


def holders() -> list[str]:
    """Processes on this machine's cards, as the driver's own tool names them; none where there is no such tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    entries = [[part.strip() for part in line.split(",")] for line in listed.splitlines() if line.strip()]
    return [f"process {entry[0]} ({', '.join(entry[1:])})" for entry in entries]


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
