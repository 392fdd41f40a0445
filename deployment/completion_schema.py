"""The body of a text completion."""

from __future__ import annotations

from typing import Any

from pydantic import Field, StrictBool, field_validator

from deployment.schemas import GenerationBody, TokenId

COMPLETION_TOKENS = 16
"""The interface's own default for the answer of a text completion."""

MOST_PROMPTS = 256
"""Of one request: each is a turn of its own."""


class CompletionBody(GenerationBody):
    """One prompt or several, as text or token ids. `max_tokens` 0 asks for nothing but the prompt's own figures."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: int | None = Field(default=None, strict=True, ge=0, le=20)
    echo: StrictBool = False
    max_tokens: int | None = Field(default=None, strict=True, ge=0)
    max_completion_tokens: int | None = Field(default=None, strict=True, ge=0)

    @field_validator("prompt")
    @classmethod
    def _not_too_many(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) and len(prompt) > MOST_PROMPTS:
            raise ValueError(f"has {len(prompt)} prompts, at most {MOST_PROMPTS} are taken in one request")
        return prompt

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [one if isinstance(one, str) else tuple(one) for one in self.prompt if not isinstance(one, int)]
        return several or [tuple(one for one in self.prompt if isinstance(one, int))]

    @property
    def wanted(self) -> int:
        """How many tokens the answer has at most."""
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return COMPLETION_TOKENS if asked is None else asked

    @property
    def token_budget(self) -> int:
        """What the engine generates, which is never nothing."""
        return max(1, self.wanted)

    @property
    def scores_only(self) -> bool:
        """Whether all that counts is how likely the prompt is: then an end token must not be left out, since clients
        take the last entry of the log-probabilities for that of the token after the prompt."""
        return self.echo and self.logprobs is not None and self.token_budget == 1
