"""From directories to something that runs: target, drafter, text, the state's geometry and fingerprint."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deployment.engine.drafting import MAX_DRAFT_TOKENS, check_steps
from deployment.engine.options import EngineOptions
from kernels import NUMERICS
from model.block_scales import BlockScales
from model.chat_template import ChatTemplate
from model.config import (
    DraftConfig,
    TargetConfig,
    check_fit,
    load_draft_config,
    load_target_config,
)
from model.drafter import Drafter
from model.errors import ModelError
from model.generation_defaults import GenerationDefaults, load_generation_defaults
from model.heads import ProposalHead, load_rows
from model.media_rules import MediaRules, load_media_rules
from model.placeholders import MediaTokens
from model.rotary_config import YarnConfig
from model.target import Target
from model.tokenizer import Tokenizer
from model.vision import Tower
from model.vision_config import load_vision_config
from model.weights import WeightFiles
from state.fingerprint import make_fingerprint
from state.geometry import StateGeometry

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Vision:
    """What turns media into embeddings of the target: the tower, its inputs' rules, and their tokens' spelling."""

    tower: Tower
    rules: MediaRules
    tokens: MediaTokens


@dataclass(frozen=True)
class Models:
    """Everything that is loaded once and never changes. `draft_tokens` is K, 0 without a drafter. `vision` is None for
    a target of text alone. `quantised`: the blocks of a target that is stored in FP8. `skipped`: names of the tensors
    in each directory that nothing here uses."""

    target: Target
    vision: Vision | None
    drafter: Drafter | None
    draft_tokens: int
    context: int
    defaults: GenerationDefaults
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    geometry: StateGeometry
    fingerprint: Mapping[str, str | int]
    device: torch.device
    dtype: torch.dtype
    quantised: BlockScales | None
    skipped: Mapping[Path, tuple[str, ...]]

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.config.target_layer_ids if self.drafter else ()


def load_models(options: EngineOptions, *, dry: bool = False) -> Models:
    """Loads what `options` name. Raises ModelError with one sentence naming what is wrong.

    `dry` finds every mistake that loading would find, and reads no weights: the result holds none and cannot run.
    """
    dtype, placed = _placement(options)
    device = torch.device("meta") if dry else placed
    config = stretched(load_target_config(options.model), options.yarn_factor)
    tokenizer = Tokenizer.load(options.model)
    public_rows = _public_rows(options, config, tokenizer)
    context = _context_limit(options, config)
    draft_config = _draft_config(options, config)
    draft_tokens = _draft_tokens(options, draft_config)
    files = WeightFiles.open(options.model)
    target = Target.load(files, config, public_rows, device, dtype)
    vision = _vision(options.model, files, target, tokenizer)
    skipped = {options.model: files.unused()}
    drafter, draft_weights, draft_constants = None, "none", "none"
    if draft_config is not None and options.draft is not None:
        draft_files = WeightFiles.open_draft(options.draft)
        causal = draft_causality(draft_config, options)
        head = _proposal_head(options, target)
        drafter = Drafter.load(draft_files, draft_config, causal, target.embedding, head)
        skipped[options.draft] = draft_files.unused()
        draft_weights = draft_files.sha256(options.hash_all_weights)
        draft_constants = _digest(replace(draft_config, causal=causal, max_positions=0, block_size=0))
    for directory, names in skipped.items():
        if names and not dry:
            logger.info("%s: %d tensors are not used: %s", directory, len(names), ", ".join(kinds_of(names)))
    chat_template = ChatTemplate.load(options.model)
    geometry = state_geometry(config, draft_config, dtype)
    constants = replace(config, max_positions=0, eos_ids=())
    fingerprint = make_fingerprint(
        geometry,
        config=_digest((constants, vision.tower.config, vision.rules) if vision else constants),
        draft_config=draft_constants,
        weights=files.sha256(options.hash_all_weights),
        drafter=draft_weights,
        tokenizer=tokenizer.sha256,
        template=chat_template.sha256,
        backend=options.backend,
        numeric_path=numeric_path(placed, options.dtype),
    )
    return Models(
        target=target,
        vision=vision,
        drafter=drafter,
        draft_tokens=draft_tokens,
        context=context,
        defaults=load_generation_defaults(options.model, config),
        tokenizer=tokenizer,
        chat_template=chat_template,
        geometry=geometry,
        fingerprint=fingerprint,
        device=device,
        dtype=dtype,
        quantised=files.quantised,
        skipped=skipped,
    )


def draft_causality(config: DraftConfig, options: EngineOptions) -> tuple[bool, ...]:
    """Decision 1: the option, else the checkpoint, else non-causal; one flag a layer."""
    if options.draft_causal != "auto":
        return (options.draft_causal == "true",) * config.num_layers
    return config.causal if config.causal is not None else (False,) * config.num_layers


def state_geometry(target: TargetConfig, draft: DraftConfig | None, dtype: torch.dtype) -> StateGeometry:
    """Sizes of all planes. In BF16 a ring holds BF16 keys and FP16 values (decision 8), in FP32 both are FP32."""
    sizes = {
        "kv_layers": len(target.full_layers),
        "kv_heads": target.num_kv_heads,
        "kv_head_dim": target.head_dim,
        "gdn_layers": len(target.gdn_layers),
        "gdn_heads": target.gdn_value_heads,
        "gdn_key_dim": target.gdn_key_dim,
        "gdn_value_dim": target.gdn_value_dim,
        "conv_channels": target.conv_channels,
        "conv_history": target.conv_kernel - 1,
        "hidden_size": target.hidden_size,
    }
    if draft is not None:
        sizes |= {
            "ring_layers": len(draft.sliding_layers),
            "full_layers": len(draft.full_layers),
            "draft_kv_heads": draft.num_kv_heads,
            "draft_head_dim": draft.head_dim,
            "window": draft.window or 0,
        }
    return StateGeometry(
        **sizes,
        kv_dtype=dtype,
        conv_dtype=dtype,
        hidden_dtype=dtype,
        ring_key_dtype=dtype,
        ring_value_dtype=torch.float16 if dtype == torch.bfloat16 else dtype,
    )


def numeric_path(device: torch.device, dtype: str) -> str:
    """What computes: library, kernel set, device and dtype. State of one path is not that of another (decision 23)."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"torch {torch.__version__}, kernels {NUMERICS} on {card} in {dtype}"


def stretched(config: TargetConfig, factor: float | None) -> TargetConfig:
    """The target with its positions stretched by YaRN, 1 to 4 times; None leaves it as it is. Raises ModelError."""
    if factor is None:
        return config
    if not 1.0 <= factor <= 4.0:
        raise ModelError(f"yarn_factor is {factor:g}, must be between 1 and 4")
    if config.rotary.yarn is not None:
        raise ModelError(f"yarn_factor is {factor:g}, but the model's config has a YaRN of its own")
    rotary = replace(config.rotary, yarn=YarnConfig.of_factor(factor, config.max_positions))
    return replace(config, rotary=rotary, max_positions=int(config.max_positions * factor))


def kinds_of(names: Sequence[str]) -> list[str]:
    """The first parts of tensor names, as in `mtp` and `visual`, each once."""
    return sorted({name.partition(".")[0] for name in names})


def _public_rows(options: EngineOptions, config: TargetConfig, tokenizer: Tokenizer) -> int:
    """Decision 5: what the tokenizer knows, unless the option says otherwise."""
    rows = tokenizer.public_rows if options.public_rows is None else options.public_rows
    if not 1 <= rows <= config.vocab_size:
        source = f"{options.model}: the tokenizer knows" if options.public_rows is None else "public_rows asks for"
        raise ModelError(f"{source} {rows} rows of the vocabulary, must be 1 to the model's {config.vocab_size}")
    return rows


def _vision(directory: Path, files: WeightFiles, target: Target, tokenizer: Tokenizer) -> Vision | None:
    config = load_vision_config(directory, target.config)
    if config is None or not Tower.is_in(files):
        return None
    rules = load_media_rules(directory, config)
    embedding = target.embedding
    tower = Tower.load(files, config, rules, embedding.device, embedding.dtype)
    return Vision(tower, rules, MediaTokens.of(config, tokenizer))


def _proposal_head(options: EngineOptions, target: Target) -> ProposalHead:
    if options.proposal_head is None:
        return ProposalHead.full(target)
    return ProposalHead.indexed(target, load_rows(options.proposal_head, target.public_rows))


def _digest(constants: object) -> str:
    """Identifies a config's constants: frozen dataclasses print all of their fields."""
    return hashlib.sha256(repr(constants).encode()).hexdigest()


def _placement(options: EngineOptions) -> tuple[torch.dtype, torch.device]:
    if options.dtype not in DTYPES:
        raise ModelError(f"dtype is {options.dtype!r}, must be one of {', '.join(DTYPES)}")
    try:
        device = torch.device(options.device)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ModelError(f"device is {options.device!r}, must be cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not count:
            raise ModelError(f"device is {options.device!r}, but torch sees no CUDA device on this machine")
        if (device.index or 0) >= count:
            raise ModelError(f"device is {options.device!r}, but torch sees only {count} CUDA device(s)")
    return DTYPES[options.dtype], device


def _context_limit(options: EngineOptions, config: TargetConfig) -> int:
    if options.context is None:
        return config.max_positions
    if not 2 <= options.context <= config.max_positions:
        raise ModelError(f"context is {options.context}, must be between 2 and the model's {config.max_positions}")
    return options.context


def _draft_config(options: EngineOptions, target: TargetConfig) -> DraftConfig | None:
    if options.backend not in ("none", "dflash", "dflash2"):
        raise ModelError(f"backend is {options.backend!r}, must be none, dflash or dflash2")
    if options.backend == "none":
        return None
    if options.draft is None:
        raise ModelError(f"draft is required because backend is {options.backend}")
    config = load_draft_config(options.draft)
    if config.kind != options.backend:
        raise ModelError(f"backend is {options.backend}, but {options.draft} holds a {config.kind} drafter")
    check_fit(target, config)
    return config


def _draft_tokens(options: EngineOptions, config: DraftConfig | None) -> int:
    if config is None:
        return 0
    tokens = config.block_size - 1 if options.draft_tokens is None else options.draft_tokens
    if not 1 <= tokens <= MAX_DRAFT_TOKENS:
        raise ModelError(f"draft_tokens is {tokens}, must be between 1 and {MAX_DRAFT_TOKENS}")
    try:
        check_steps(options.draft_tokens_by_lanes, tokens)
    except ValueError as error:
        raise ModelError(str(error)) from None
    return tokens
