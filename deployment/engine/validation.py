"""Which turns can never run? They are refused before they wait for anything."""

from __future__ import annotations

from deployment.engine import errors
from deployment.engine.errors import EngineError
from deployment.engine.messages import Sampling, Submit


def check_submit(submit: Submit, limit: int, public_rows: int) -> None:
    """Raises EngineError, naming the field, for a turn that can never run. `limit`: the context limit; `public_rows`:
    rows of the public vocabulary."""
    prompt = submit.prompt_ids
    if not prompt:
        raise EngineError(errors.INVALID_REQUEST, "the prompt is empty, must have at least one token", "prompt")
    wrong = next((token for token in prompt if not 0 <= token < public_rows), None)
    if wrong is not None:
        raise EngineError(
            errors.INVALID_REQUEST, f"prompt token id {wrong} is outside the vocabulary [0, {public_rows})", "prompt"
        )
    if len(prompt) >= limit:
        raise EngineError(
            errors.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {len(prompt)} tokens, but the context limit is {limit} tokens, of which at least one "
            "must be left for the answer",
            "prompt",
        )
    if submit.max_tokens is not None and submit.max_tokens < 1:
        raise EngineError(
            errors.INVALID_REQUEST, f"max_tokens is {submit.max_tokens}, must be at least 1", "max_tokens"
        )
    if not 0 <= submit.stable_boundary <= len(prompt):
        raise EngineError(
            errors.INVALID_REQUEST,
            f"stable_boundary is {submit.stable_boundary}, must be between 0 and the prompt's {len(prompt)} tokens",
            "stable_boundary",
        )
    _check_sampling(submit.sampling)
    _check_penalties(submit.sampling, public_rows)
    if submit.grammar is not None and submit.ignore_eos:
        message = "ignore_eos is true, must be false with a response_format: a grammar's end is an end token"
        raise EngineError(errors.INVALID_REQUEST, message, "ignore_eos")


def _check_sampling(sampling: Sampling) -> None:
    if not 0.0 <= sampling.temperature < float("inf"):
        message = f"temperature is {sampling.temperature}, must be a finite number of at least 0"
        raise EngineError(errors.INVALID_REQUEST, message, "temperature")
    if sampling.top_k < 0:
        raise EngineError(errors.INVALID_REQUEST, f"top_k is {sampling.top_k}, must be at least 0 (0: all)", "top_k")
    if not 0.0 < sampling.top_p <= 1.0:
        raise EngineError(errors.INVALID_REQUEST, f"top_p is {sampling.top_p}, must be above 0 and at most 1", "top_p")
    if not 0.0 <= sampling.min_p <= 1.0:
        raise EngineError(errors.INVALID_REQUEST, f"min_p is {sampling.min_p}, must be between 0 and 1", "min_p")
    if not 0 <= sampling.sub < 1 << 32:
        raise EngineError(errors.INVALID_REQUEST, f"sub is {sampling.sub}, must be in [0, 2^32)", "sub")
    if not 0 <= sampling.seed < 1 << 64:
        raise EngineError(errors.INVALID_REQUEST, f"seed is {sampling.seed}, must be in [0, 2^64)", "seed")


def _check_penalties(sampling: Sampling, public_rows: int) -> None:
    if not 0.0 < sampling.repetition_penalty < float("inf"):
        message = f"repetition_penalty is {sampling.repetition_penalty}, must be a finite number above 0 (1: none)"
        raise EngineError(errors.INVALID_REQUEST, message, "repetition_penalty")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if not abs(value) < float("inf"):
            raise EngineError(errors.INVALID_REQUEST, f"{name} is {value}, must be a finite number", name)
    for token, added in sampling.logit_bias:
        if not 0 <= token < public_rows:
            message = f"logit_bias names token id {token}, which is outside the vocabulary [0, {public_rows})"
            raise EngineError(errors.INVALID_REQUEST, message, "logit_bias")
        if not abs(added) < float("inf"):
            message = f"logit_bias of token {token} is {added}, must be a finite number"
            raise EngineError(errors.INVALID_REQUEST, message, "logit_bias")
    if sampling.min_tokens < 0:
        message = f"min_tokens is {sampling.min_tokens}, must be at least 0"
        raise EngineError(errors.INVALID_REQUEST, message, "min_tokens")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= min(20, public_rows):
        message = f"logprobs is {sampling.logprobs}, must be 0 to 20"
        raise EngineError(errors.INVALID_REQUEST, message, "logprobs")
