"""What an engine is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deployment.engine.drafting import Steps, check_steps
from deployment.engine.log_lines import LogFormat, LogLevel

Backend = Literal["none", "dflash", "dflash2"]
Capture = Literal["start", "lazily", "never"]

MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 4096


@dataclass(frozen=True)
class EngineOptions:
    """`model`, `draft`: Hugging Face directories; `draft` is needed unless `backend` is `none`.

    `draft_tokens`: K in 1..15 (None: the drafter's block size - 1). `draft_tokens_by_lanes`: another K, 0 to
    `draft_tokens`, from so many decoding lanes on, as in ((3, 7), (8, 0)). A seed's tokens then depend on who else
    decodes where they depend on K: with DFlash2 at a positive temperature, unless the turn is reproducible. `lanes`:
    sequences that decode together. `context`: limit of prompt + published tokens (None: the model's). `images`:
    checkpoints kept on the device beside the lanes. `image_min_tokens`: a turn leaves an image only for more tokens
    than that since the nearest kept one (None: as many as cost as much to prefill as an image costs to keep, 512 for
    one of 187 MiB, 0 for a small model). `pages`: pages of 64 tokens in each pool (None: every lane at full context,
    and half as much for checkpoints). `prefill_chunk`: tokens of one prefill slice (None: 512 on a CPU, 2048
    on a card, which needs so many for its speed). `draft_causal`: overrides what the
    drafter's checkpoint says or leaves unsaid about causality inside the block (decision 1). `proposal_head`: an index
    file of the token ids that may be proposed (None: all public ones). `yarn_factor`: 1 to 4, stretches the target's
    positions by YaRN. `public_rows`: rows of the vocabulary that may be chosen (None: highest token id known to the
    tokenizer + 1).

    `max_stall_ms`: how long one prefill slice may keep decoding lanes waiting. `queue_turns`: turns that may wait.
    `queue_seconds`: how long a turn may wait for its first lane, unless it says so itself (None: without end).
    `tenant_lanes`, `tenant_queued_tokens`: lanes of one tenant, and tokens of its prompts that wait (None: no limit).
    `preempt_seconds`: how long an interactive turn waits before it takes other turns' lanes (None: it never does).

    `staged_bytes`: segments of sessions on their way that may wait for their document; `staged_seconds`: for how long
    (`deployment/engine/staging.py`).

    `media_cache_bytes`: of what a vision tower made of images and videos, to be kept on the device, so that the next
    turn, a fork or another session with the same ones does not run it again.

    `hash_all_weights`: the fingerprint covers every byte of the weights, not headers and samples alone; all engines
    that share sessions must agree about it.
    `accept_numeric_path`: state that another library, kernel set or card made is loaded, not rebuilt from the ledger.
    `cluster_key_file`: a secret that signs exported sessions, and tells those of this cluster from others (None: no
    session is known as such).
    `durable`: where sessions become durable, an absolute path or a URL (None: nowhere), and `durable_bytes`, how much
    all who use that place may keep there. `durable_key_env`: the variable of the environment that holds the keys it is
    encrypted with (None: it is not).
    `own_process`: the engine runs in a process of its own (None: on a card it does, on a CPU it is a thread).
    `capture`: when a card's rounds are captured as graphs: all that are to be expected before the engine is ready, each
    when it first comes, or never.
    `check_invariants`: all books are compared after every step, and a difference ends the engine; for tests and for
    hunting faults, since it takes time in proportion to pages and images.
    `log_format`, `log_level`: of a process of its own, on stderr.
    """

    model: Path
    draft: Path | None = None
    backend: Backend = "none"
    draft_tokens: int | None = None
    draft_tokens_by_lanes: Steps = ()
    device: str = "cpu"
    dtype: str = "float32"
    lanes: int = 4
    context: int | None = None
    images: int = 64
    image_min_tokens: int | None = None
    pages: int | None = None
    prefill_chunk: int | None = None
    draft_causal: Literal["auto", "true", "false"] = "auto"
    proposal_head: Path | None = None
    yarn_factor: float | None = None
    public_rows: int | None = None
    max_stall_ms: float = 70.0
    queue_turns: int = 1024
    queue_seconds: float | None = None
    tenant_lanes: int | None = None
    tenant_queued_tokens: int | None = None
    preempt_seconds: float | None = 2.0
    staged_bytes: int = 4 << 30
    staged_seconds: float = 60.0
    media_cache_bytes: int = 512 << 20
    hash_all_weights: bool = False
    accept_numeric_path: bool = False
    cluster_key_file: Path | None = None
    durable: str | None = None
    durable_bytes: int = 16 << 30
    durable_key_env: str | None = None
    own_process: bool | None = None
    capture: Capture = "start"
    check_invariants: bool = False
    log_format: LogFormat = "text"
    log_level: LogLevel = "INFO"

    def __post_init__(self) -> None:
        """Raises ValueError naming the field for a limit that nobody could keep."""
        check_steps(self.draft_tokens_by_lanes)
        if self.durable is not None and not (self.durable.startswith("/") or "://" in self.durable):
            raise ValueError(f"durable is {self.durable!r}, must be an absolute path or a URL")
        if self.durable_key_env is not None and self.durable is None:
            raise ValueError(f"durable_key_env is {self.durable_key_env!r}, but durable names no place to be encrypted")
        if self.durable_bytes < 0:
            raise ValueError(f"durable_bytes is {self.durable_bytes}, must not be negative")
        for name in ("queue_turns", "tenant_lanes", "tenant_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        for name in ("queue_seconds", "preempt_seconds", "image_min_tokens"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} is {value}, must be at least 0")
        for name in ("staged_bytes", "staged_seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 0")
        if self.images < 0:
            raise ValueError(f"images is {self.images}, must not be negative")
        if self.media_cache_bytes < 1:
            raise ValueError(f"media_cache_bytes is {self.media_cache_bytes}, must be at least 1")
        if not self.max_stall_ms > 0:
            raise ValueError(f"max_stall_ms is {self.max_stall_ms}, must be above 0")
        self.cluster_key()

    @property
    def slice_tokens(self) -> int:
        """Tokens of one prefill slice, at most."""
        return self.prefill_chunk or (512 if self.device == "cpu" else 2048)

    @property
    def in_process(self) -> bool:
        """Whether the engine has a process of its own."""
        return self.device != "cpu" if self.own_process is None else self.own_process

    def cluster_key(self) -> bytes | None:
        """Raises ValueError for a file that cannot be read, or that holds too little to be a secret."""
        return None if self.cluster_key_file is None else read_key(self.cluster_key_file, "cluster_key_file")


def read_key(file: Path, field: str) -> bytes:
    """A cluster's secret, without white space around it. ValueError naming the field that named the file."""
    try:
        with file.open("rb") as stream:
            key = stream.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise ValueError(f"{field}: {file} cannot be read: {error.strerror}") from None
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        held = f"{len(key)} bytes" if len(key) <= MAX_KEY_BYTES else "more"
        raise ValueError(f"{field}: {file} holds {held}, must hold {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes")
    return key
