"""From the start of an engine's process to its first token, with its weights in memory: for `bench/round.py`.

A checkpoint of the whole geometry is written to a file system that has room, in memory if there is one, and an engine
is started on it twice, in processes of their own: Triton's cache is empty first, and full the second time. The
tokenizer is the demo model's, so that text takes less than a real one's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.proposal_models import PUBLIC
from bench.round_checkpoint import bytes_of, shapes_of, write_models
from bench.round_models import DEVICE
from model.config import DraftConfig, TargetConfig
from state.geometry import PAGE_TOKENS

LANES, POOL_TOKENS, IMAGES, PROMPT = 16, 131072, 16, 1024
PLACES = ("/dev/shm", tempfile.gettempdir())
LIMIT_SECONDS = 240
CACHES = ("empty", "full")


def ready_rows(model: str, target: TargetConfig, draft: DraftConfig) -> list[dict[str, Any]]:
    """Without room for the files one row, which says why it has no time."""
    size = sum(map(bytes_of, shapes_of(target, draft)))
    place = next((place for place in PLACES if Path(place).is_dir() and room(place) > 1.02 * size), None)
    if place is None:
        return [{"model": model, "why": f"no file system has room for {size} bytes", "seconds": None}]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=place) as name, tempfile.TemporaryDirectory() as cache:
        begun = time.perf_counter()
        size = write_models(Path(name), target, draft)
        print(f"wrote {size} bytes to {place} in {time.perf_counter() - begun:.1f} s", flush=True)
        for state in CACHES:
            row = {"model": model, "lanes": LANES, "pool_tokens": POOL_TOKENS, "prompt": PROMPT}
            row |= {"weights_bytes": size, "triton_cache": state} | started(Path(name), target, draft.kind, cache)
            rows.append(row)
            print(row, flush=True)
    return rows


def room(place: str) -> int:
    return shutil.disk_usage(place).free


def started(directory: Path, target: TargetConfig, backend: str, cache: str) -> dict[str, Any]:
    options = {
        "model": str(directory / "target"),
        "draft": str(directory / "draft"),
        "backend": backend,
        "device": DEVICE,
        "dtype": "bfloat16",
        "lanes": LANES,
        "images": IMAGES,
        "pages": POOL_TOKENS // PAGE_TOKENS,
        "context": min(POOL_TOKENS, target.max_positions),
        "public_rows": min(PUBLIC, target.vocab_size),
    }
    command = [sys.executable, "-m", "bench.round_start", json.dumps(options), str(PROMPT)]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    begun = time.time()
    done = subprocess.run(
        [*command, str(begun)], stdout=subprocess.PIPE, env=environment, check=True, timeout=LIMIT_SECONDS
    )
    told = json.loads(done.stdout.splitlines()[-1])
    return {"total_s": round(sum(told["seconds"].values()), 2), **told}
