"""What a deployment is told: one pydantic model for `serve run`, `serve deploy` and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deployment.engine.drafting import Steps, check_steps, read_steps
from deployment.engine.log_lines import LogFormat, LogLevel, LogOptions
from deployment.engine.options import Backend, Capture, EngineOptions
from deployment.hub import AUTO, hub_id, located, public_drafter
from deployment.media_limits import HOST_NAME, MediaLimits, check_host
from model import DEMO

_MEDIA = MediaLimits()

DEFAULT_PLACE = "default"
"""Of `durable`: see `deployment/durable_place.py`."""


class AppArgs(BaseModel):
    """Arguments of `deployment.app:build`. Without any it serves the embedded demo model with its DFlash2 drafter.

    `model`, `draft`: a directory, or a name on the Hugging Face hub; `draft` `auto`: the public one of the model.
    `model_name`: how clients call it; `model_aliases`: other names that they may use.
    `draft_tokens` None: the draft checkpoint's block size - 1. `draft_tokens_by_lanes`: text as in "1:15,3:7,8:0", or
    a mapping. `context` None: the model's. `num_cpus` None: 0.1 a
    replica on a CPU (bookkeeping only), 1 on a GPU. `host_store_bytes` is a node's budget for Host replicas.
    `most_replicas`: there are `replicas` at least, and up to so many while turns run and wait for lanes.
    `tenant_state_bytes`: what a tenant's sessions may keep in each node's host store (None: no limit).
    `hash_all_weights`: every byte of the weights is hashed at start, so that state of any others is known as such.
    `accept_numeric_path`: state that another library, kernel set or card made is loaded, not prefilled again.
    `accept_new_weights`: append turns go on from a ledger that another model of the same tokenizer made (decision 23).
    `durable`: where sessions outlive the cluster, an absolute path or a URL that every node can reach, `none`, or
    `default`, which is a directory of the head node's user and will not do where replicas are on others; and
    `durable_bytes`, its budget. `durable_key_env`: the name of the variable, in the environment of every node's Ray,
    that holds the keys it is encrypted with: 64 hex digits each, the first one for what is written.
    `staged_bytes`: a replica's memory for sessions that are on their way to it, and `staged_seconds`, how long what
    came may wait there for the rest.
    `own_process`: the engine runs in a process beside its replica's (None: on a GPU it does).
    `capture`: when a GPU's rounds become graphs: at the `start`, `lazily` when each first comes, or `never`.
    `detach_seconds`: how long a turn with a session or an idempotency key goes on while nobody reads it (decision 22).
    `stuck_seconds`: an engine that has work and does nothing for so long is replaced (None: 60 on a GPU, 600 on a CPU,
    where one slice of a large model's prompt may take more than a minute).
    `stream_grace_seconds`: how long streams may go on whose ingress is being replaced.
    `media_hosts`: from where images and videos are fetched that a request names by http(s) URL, as `example.org`,
    `example.org:8443` or `*.example.org`, a list or text with commas; none: from nowhere. `media_items`: images and
    videos of a request; `media_bytes`, of one of them, and `media_total_bytes`, of all, as files; `media_pixels`: of an
    image; `media_frames`, `media_seconds`: of a video. `media_cache_bytes`: of what the tower made of them, kept on a
    replica's device.
    `api_keys`: a file of the keys that are taken, and of whom they are (`deployment/api_keys.py`); without it every key
    is a tenant of its own, and web pages are kept out but for those of the server itself (`deployment/web_pages.py`),
    which `localhost`, an address and `host_names` name. The file lies on the head node, where the ingress runs, and is
    read again when it changes.
    `import_bytes`: of a document that is imported, which its ingress holds in memory; what a host store could not hold
    is refused all the same.
    `log_format`: text, or JSON with session, turn and epoch as fields. `log_texts`: prompts and answers are fields too.
    `cluster_key_file`: a secret of at least 16 bytes, the same on every node, that signs sessions.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: Path = DEMO / "target"
    model_name: str | None = None
    model_aliases: tuple[str, ...] = ()
    draft: Path | None = None
    backend: Backend = "dflash2"
    draft_tokens: int | None = Field(default=None, ge=1, le=15)
    draft_tokens_by_lanes: Steps = ()
    draft_causal: Literal["auto", "true", "false"] = "auto"
    proposal_head: Path | None = None
    yarn_factor: float | None = Field(default=None, ge=1, le=4)
    public_rows: int | None = Field(default=None, ge=1)
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    lanes: int = Field(default=4, ge=1, le=256)
    context: int | None = Field(default=None, ge=2)
    images: int = Field(default=64, ge=1)
    image_min_tokens: int | None = Field(default=None, ge=0)
    pages: int | None = Field(default=None, ge=1)
    prefill_chunk: int | None = Field(default=None, ge=1)
    max_stall_ms: float = Field(default=70.0, gt=0)
    queue_turns: int = Field(default=1024, ge=1)
    queue_seconds: float | None = Field(default=None, ge=0)
    tenant_lanes: int | None = Field(default=None, ge=1)
    tenant_queued_tokens: int | None = Field(default=None, ge=1)
    tenant_state_bytes: int | None = Field(default=None, ge=1)
    preempt_seconds: float | None = Field(default=2.0, ge=0)
    staged_bytes: int = Field(default=4 << 30, ge=0)
    staged_seconds: float = Field(default=60.0, ge=0)
    hash_all_weights: bool = False
    accept_numeric_path: bool = False
    accept_new_weights: bool = False
    api_keys: Path | None = None
    host_names: tuple[str, ...] = ()
    cluster_key_file: Path | None = None
    durable: str | None = DEFAULT_PLACE
    durable_bytes: int = Field(default=16 << 30, ge=0)
    durable_key_env: str | None = Field(default=None, min_length=1)
    media_hosts: tuple[str, ...] = ()
    media_items: int = Field(default=_MEDIA.items, ge=0)
    media_bytes: int = Field(default=_MEDIA.item_bytes, ge=0)
    media_total_bytes: int = Field(default=_MEDIA.total_bytes, ge=0)
    media_pixels: int = Field(default=_MEDIA.pixels, ge=1)
    media_frames: int = Field(default=_MEDIA.frames, ge=2)
    media_seconds: float = Field(default=_MEDIA.seconds, gt=0)
    media_cache_bytes: int = Field(default=512 << 20, ge=1)
    own_process: bool | None = None
    capture: Capture = "start"
    check_invariants: bool = False
    detach_seconds: float = Field(default=30.0, ge=0)
    stuck_seconds: float | None = Field(default=None, gt=0)
    stream_grace_seconds: float = Field(default=50.0, ge=0)
    replicas: int = Field(default=2, ge=1)
    most_replicas: int | None = Field(default=None, ge=1)
    num_cpus: float | None = Field(default=None, ge=0)
    host_store_bytes: int = Field(default=1 << 30, ge=1 << 20)
    import_bytes: int = Field(default=16 << 30, ge=0)
    log_format: LogFormat = "text"
    log_level: LogLevel = "INFO"
    log_texts: bool = False

    @field_validator("draft_tokens_by_lanes", mode="before")
    @classmethod
    def _steps(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return tuple(value.items())
        return read_steps(value) if isinstance(value, str) else value

    @field_validator("durable")
    @classmethod
    def _place(cls, value: str | None) -> str | None:
        if value is None or value == "none":
            return None
        if value != DEFAULT_PLACE and not (value.startswith("/") or "://" in value):
            raise ValueError(f"must be an absolute path, a URL, {DEFAULT_PLACE} or none")
        return value

    @field_validator("host_names", "media_hosts", "model_aliases", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value

    @field_validator("model_aliases")
    @classmethod
    def _visible(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not name.isprintable() or not name.strip():
                raise ValueError(f"a model's name has visible characters, got {name!r}")
        return names

    @field_validator("media_hosts")
    @classmethod
    def _hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            check_host(host)
        return hosts

    @field_validator("host_names")
    @classmethod
    def _names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not HOST_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a host; one is written as example.org, without a port")
        return names

    @field_validator("api_keys")
    @classmethod
    def _absolute(cls, file: Path | None) -> Path | None:
        if file is not None and not file.is_absolute():
            raise ValueError("must be an absolute path, since a replica's directory is its own")
        return file

    @model_validator(mode="after")
    def _check_replicas(self) -> AppArgs:
        if self.most_replicas is not None and self.most_replicas < self.replicas:
            raise ValueError(f"most_replicas: {self.most_replicas} is less than replicas, which is {self.replicas}")
        return self

    @model_validator(mode="after")
    def _check_texts(self) -> AppArgs:
        if self.log_texts and (self.log_format != "json" or self.log_level not in ("DEBUG", "INFO")):
            has = f"log_format is {self.log_format} and log_level {self.log_level}"
            raise ValueError(f"log_texts: texts are fields of a turn's line, which is JSON of level INFO, but {has}")
        return self

    @model_validator(mode="after")
    def _check_key(self) -> AppArgs:
        if self.durable_key_env is not None and self.durable is None:
            raise ValueError(f"durable_key_env: {self.durable_key_env!r} is given, but durable is none")
        return self

    @model_validator(mode="after")
    def _choose_draft(self) -> AppArgs:
        check_steps(self.draft_tokens_by_lanes)
        if self.backend == "none":
            if self.draft is not None:
                raise ValueError(f"draft: {self.draft} is given, but backend is none; choose dflash or dflash2")
            for name in ("draft_tokens", "draft_tokens_by_lanes"):
                if getattr(self, name):
                    raise ValueError(f"{name}: {getattr(self, name)} is given, but backend is none")
        elif self.draft == AUTO and self.model != DEMO / "target":
            self.draft = public_drafter(self.model, self.backend)
        elif self.draft in (None, AUTO):
            if self.model != DEMO / "target":
                message = f"draft: backend {self.backend} needs a draft checkpoint for {self.model}: a directory"
                raise ValueError(f"{message}, a name on the Hugging Face hub, or auto")
            self.draft = DEMO / self.backend
        return self

    @classmethod
    def of(cls, **values: Any) -> AppArgs:
        """Settings of a command line: None means not given. Raises ValueError with one sentence naming the field."""
        try:
            return cls(**{name: value for name, value in values.items() if value is not None})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise ValueError(f"{place}: {message}, got {first['input']!r}" if place else message) from None

    def engine_options(self) -> EngineOptions:
        """The engine's part. What is on the hub is fetched; the default place is that of an application
        (`deployment/durable_place.py`). Raises ValueError naming the field."""
        return EngineOptions(
            model=located("model", self.model),
            draft=None if self.draft is None else located("draft", self.draft),
            backend=self.backend,
            draft_tokens=self.draft_tokens,
            draft_tokens_by_lanes=self.draft_tokens_by_lanes,
            device=self.device,
            dtype=self.dtype,
            lanes=self.lanes,
            context=self.context,
            images=self.images,
            image_min_tokens=self.image_min_tokens,
            pages=self.pages,
            media_cache_bytes=self.media_cache_bytes,
            durable=None if self.durable == DEFAULT_PLACE else self.durable,
            durable_bytes=self.durable_bytes,
            durable_key_env=None if self.durable == DEFAULT_PLACE else self.durable_key_env,
            own_process=self.own_process,
            capture=self.capture,
            check_invariants=self.check_invariants,
            prefill_chunk=self.prefill_chunk,
            max_stall_ms=self.max_stall_ms,
            queue_turns=self.queue_turns,
            queue_seconds=self.queue_seconds,
            tenant_lanes=self.tenant_lanes,
            tenant_queued_tokens=self.tenant_queued_tokens,
            preempt_seconds=self.preempt_seconds,
            draft_causal=self.draft_causal,
            proposal_head=self.proposal_head,
            yarn_factor=self.yarn_factor,
            public_rows=self.public_rows,
            staged_bytes=self.staged_bytes,
            staged_seconds=self.staged_seconds,
            hash_all_weights=self.hash_all_weights,
            accept_numeric_path=self.accept_numeric_path,
            cluster_key_file=self.cluster_key_file,
            log_format=self.log_format,
            log_level=self.log_level,
        )

    @property
    def logs(self) -> LogOptions:
        return LogOptions(self.log_format, self.log_level, self.log_texts)

    @property
    def media_limits(self) -> MediaLimits:
        return MediaLimits(
            items=self.media_items,
            item_bytes=self.media_bytes,
            total_bytes=self.media_total_bytes,
            pixels=self.media_pixels,
            frames=self.media_frames,
            seconds=self.media_seconds,
            hosts=self.media_hosts,
        )

    @property
    def patience(self) -> float:
        """`stuck_seconds`, which depend on the device."""
        return self.stuck_seconds or (60.0 if self.device == "cuda" else 600.0)

    @property
    def model_id(self) -> str:
        """The name that clients use, and that answers have."""
        known = "demo" if self.model == DEMO / "target" else hub_id(self.model) or self.model.name
        return self.model_name or known

    @property
    def model_ids(self) -> tuple[str, ...]:
        """All names under which clients may ask for the model."""
        return tuple(dict.fromkeys((self.model_id, *self.model_aliases)))

    @property
    def ray_actor_options(self) -> dict[str, float]:
        if self.device == "cuda":
            return {"num_gpus": 1, "num_cpus": 1 if self.num_cpus is None else self.num_cpus}
        return {"num_cpus": 0.1 if self.num_cpus is None else self.num_cpus}
