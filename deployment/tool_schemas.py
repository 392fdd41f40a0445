"""What a request body says of tools: the one that must be called, and those that were called before."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator


class NamedFunction(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str


class NamedTool(BaseModel):
    """A `tool_choice` that names the function to call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: NamedFunction


def an_object(arguments: Any) -> Any:
    """The arguments of a call as they came, an object or its text. Raises ValueError for anything else."""
    try:
        known = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        known = None
    if not isinstance(known, dict):
        raise ValueError("must be the JSON text of an object")
    return arguments


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str | dict[str, Any] = "{}"

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, arguments: Any) -> Any:
        return an_object(arguments)


class CalledBefore(BaseModel):
    """A call in the conversation's history."""

    model_config = ConfigDict(extra="allow")

    function: CalledFunction
