"""How a model's makers would have it sampled: `generation_config.json`, in plain data that needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from model.fields import Fields, read_json

if TYPE_CHECKING:
    from model.config import TargetConfig


@dataclass(frozen=True)
class GenerationDefaults:
    """What a request gets that does not say otherwise. `temperature` 0 is greedy, `top_k` 0 keeps all tokens. Without a
    file: the model's distribution as it is."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    eos_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


NO_DEFAULTS = GenerationDefaults()


def load_generation_defaults(directory: Path, config: TargetConfig) -> GenerationDefaults:
    """Reads `generation_config.json`; what it leaves out is temperature 1, no filter, no penalty and the config's eos.

    The bounds are those of a request's fields. Raises ModelError.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return GenerationDefaults(eos_ids=config.eos_ids)
    fields = Fields(f"generation config ({path})", read_json(path))
    temperature = fields.number("temperature", 1.0, above=None)
    if temperature < 0:
        fields.fail(f"temperature is {temperature:g}, but must be at least 0")
    top_p = fields.number("top_p", 1.0)
    if top_p > 1:
        fields.fail(f"top_p is {top_p:g}, but must be at most 1")
    eos_ids = fields.ids("eos_token_id") or config.eos_ids
    check_eos(fields, eos_ids, config.vocab_size)
    greedy = fields.flag("do_sample", True) is False
    return GenerationDefaults(
        temperature=0.0 if greedy else temperature,
        top_k=fields.integer("top_k", 0, minimum=0),
        top_p=top_p,
        eos_ids=eos_ids,
        min_p=_within(fields, "min_p", 0.0, 0.0, 1.0),
        repetition_penalty=_within(fields, "repetition_penalty", 1.0, 0.01, 100.0),
        presence_penalty=_within(fields, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=_within(fields, "frequency_penalty", 0.0, -2.0, 2.0),
    )


def check_eos(fields: Fields, eos_ids: tuple[int, ...], vocab_size: int) -> None:
    for token in eos_ids:
        if token >= vocab_size:
            fields.fail(f"eos_token_id has {token}, but vocab_size is {vocab_size}")


def _within(fields: Fields, name: str, default: float, least: float, most: float) -> float:
    value = fields.number(name, default, above=None)
    if not least <= value <= most:
        fields.fail(f"{name} is {value:g}, but must be {least:g} to {most:g}")
    return value
