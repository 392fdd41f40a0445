"""Which turns can never run? They are refused before they wait for anything."""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

from deployment.engine import errors
from deployment.engine.commands import LogprobsMode, Priority, Resumed, Sampling, Submit, ThinkingBudget
from deployment.engine.errors import EngineError
from deployment.engine.logprobs import MAX_LOGPROBS

MAX_STOP_CHARACTERS = 1024
"""Of a stop string: the text of that many characters may have to be held back, and is searched at each token."""

MAX_ADDED = 1e4
"""Of a bias or a penalty. Larger ones say nothing more, and logits in FP32 have their limits."""

REPETITION = (0.01, 100.0)
"""Of a repetition penalty, which divides and multiplies logits."""


def check_submit(submit: Submit, limit: int, public_rows: int, end_ids: Collection[int]) -> None:
    """Raises EngineError, naming the field, for a turn that can never run. `limit`: the context limit; `public_rows`:
    rows of the public vocabulary; `end_ids`: the model's end tokens."""
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
    if not 0 <= submit.system_boundary <= len(prompt):
        raise EngineError(
            errors.INVALID_REQUEST,
            f"system_boundary is {submit.system_boundary}, must be between 0 and the prompt's {len(prompt)} tokens",
            "system_boundary",
        )
    _check_waiting(submit)
    _check_sampling(submit.sampling)
    _check_penalties(submit.sampling, public_rows)
    _check_stop_ids(submit, public_rows, () if submit.ignore_eos else end_ids)
    _check_stop_strings(submit.stop_strings)
    if submit.thinking is not None:
        _check_thinking(submit.thinking, public_rows)
    if submit.resumed is not None:
        _check_resumed(submit, submit.resumed, limit, public_rows)
    if submit.grammar is not None and submit.ignore_eos:
        message = f"ignore_eos is true, must be false with {submit.grammar.field}: a grammar's end is an end token"
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
    least, most = REPETITION
    if not least <= sampling.repetition_penalty <= most:
        message = f"repetition_penalty is {sampling.repetition_penalty}, must be {least:g} to {most:g} (1: none)"
        raise EngineError(errors.INVALID_REQUEST, message, "repetition_penalty")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if not abs(value) <= MAX_ADDED:
            message = f"{name} is {value}, must be {-MAX_ADDED:g} to {MAX_ADDED:g}"
            raise EngineError(errors.INVALID_REQUEST, message, name)
    for token, added in sampling.logit_bias:
        if not 0 <= token < public_rows:
            message = f"logit_bias names token id {token}, which is outside the vocabulary [0, {public_rows})"
            raise EngineError(errors.INVALID_REQUEST, message, "logit_bias")
        if not abs(added) <= MAX_ADDED:
            message = f"logit_bias of token {token} is {added}, must be {-MAX_ADDED:g} to {MAX_ADDED:g}"
            raise EngineError(errors.INVALID_REQUEST, message, "logit_bias")
    if sampling.min_tokens < 0:
        message = f"min_tokens is {sampling.min_tokens}, must be at least 0"
        raise EngineError(errors.INVALID_REQUEST, message, "min_tokens")
    for name in ("logprobs", "prompt_logprobs"):
        value, most = getattr(sampling, name), min(MAX_LOGPROBS, public_rows)
        if value is not None and not 0 <= value <= most:
            raise EngineError(errors.INVALID_REQUEST, f"{name} is {value}, must be 0 to {most}", name)
    if sampling.logprobs_mode not in get_args(LogprobsMode):
        message = f"logprobs_mode is {sampling.logprobs_mode!r}, must be {' or '.join(get_args(LogprobsMode))}"
        raise EngineError(errors.INVALID_REQUEST, message, "logprobs_mode")


def _check_stop_ids(submit: Submit, public_rows: int, end_ids: Collection[int]) -> None:
    wrong = next((token for token in submit.stop_ids if not 0 <= token < public_rows), None)
    if wrong is not None:
        message = f"stop_token_ids names token id {wrong}, which is outside the vocabulary [0, {public_rows})"
        raise EngineError(errors.INVALID_REQUEST, message, "stop_token_ids")
    ends = {*submit.stop_ids, *(token for token in end_ids if token < public_rows)}
    if submit.sampling.min_tokens and len(ends) == public_rows:
        message = (
            f"stop_token_ids holds every token, so that none may come before min_tokens, {submit.sampling.min_tokens}"
        )
        raise EngineError(errors.INVALID_REQUEST, message, "stop_token_ids")


def _check_stop_strings(strings: tuple[str, ...]) -> None:
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            message = f"stop: a string has {len(string)} characters, must have 1 to {MAX_STOP_CHARACTERS}"
            raise EngineError(errors.INVALID_REQUEST, message, "stop")
        try:
            string.encode()
        except UnicodeEncodeError as error:
            message = f"stop: a string holds a lone surrogate at character {error.start}, which is no text"
            raise EngineError(errors.INVALID_REQUEST, message, "stop") from None


def _check_thinking(thinking: ThinkingBudget, public_rows: int) -> None:
    if thinking.tokens < 0:
        message = f"thinking_budget is {thinking.tokens}, must be at least 0"
        raise EngineError(errors.INVALID_REQUEST, message, "thinking_budget")
    if not thinking.close or not all(0 <= token < public_rows for token in thinking.close):
        message = f"thinking_budget: the closing ids are {list(thinking.close)}, must be ids of [0, {public_rows})"
        raise EngineError(errors.INVALID_REQUEST, message, "thinking_budget")


def _check_resumed(submit: Submit, resumed: Resumed, limit: int, public_rows: int) -> None:
    ids = resumed.token_ids
    wrong = next((token for token in ids if not 0 <= token < public_rows), None)
    if wrong is not None:
        message = f"resumed.token_ids names token id {wrong}, which is outside the vocabulary [0, {public_rows})"
        raise EngineError(errors.INVALID_REQUEST, message, "resumed")
    left = limit - len(submit.prompt_ids)
    most = left if submit.max_tokens is None else min(left, submit.max_tokens)
    if len(ids) > most:
        message = f"resumed.token_ids has {len(ids)} ids, more than the {most} that max_tokens and the context allow"
        raise EngineError(errors.INVALID_REQUEST, message, "resumed")
    if any(accepted < 0 for accepted in resumed.rounds) or len(resumed.rounds) > max(0, len(ids) - 1):
        message = f"resumed.rounds is {list(resumed.rounds)}, must be accepted drafts of rounds of {len(ids)} ids"
        raise EngineError(errors.INVALID_REQUEST, message, "resumed")
    scored = tuple(entry.token for entry in resumed.logprobs)
    if scored != (ids if submit.sampling.logprobs is not None else ()):
        wanted = (
            "of resumed.token_ids, each" if submit.sampling.logprobs is not None else "none, as logprobs is not set"
        )
        message = f"resumed.logprobs are of {len(scored)} ids, must be {wanted}"
        raise EngineError(errors.INVALID_REQUEST, message, "resumed")


def _check_waiting(submit: Submit) -> None:
    if submit.priority not in get_args(Priority):
        message = f"priority is {submit.priority!r}, must be {' or '.join(get_args(Priority))}"
        raise EngineError(errors.INVALID_REQUEST, message, "priority")
    if submit.queue_seconds is not None and not 0.0 <= submit.queue_seconds < float("inf"):
        message = f"queue_seconds is {submit.queue_seconds}, must be a finite number of at least 0"
        raise EngineError(errors.INVALID_REQUEST, message, "queue_seconds")
