"""Which work does a request belong to, by what its client says without meaning a session of ours? (decision 19)

Agents name their conversation in a header or a field of their own. Such a name chooses the replica and where state is
kept; it is never a reason to refuse a request, so that a value which is no text says nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

LONGEST = 128
"""Characters; a longer name is replaced by its sha256."""

HEADERS = (
    "x-claude-code-session-id",
    "session_id",  # Codex
    "conversation_id",  # Codex
    "x-opencode-session",
    "x-session-affinity",  # opencode
    "x-kilocode-taskid",
    "x-task-id",  # Cline
    "x-litellm-session-id",
    "x-dynamo-session-id",
)
"""Where common agents and proxies send it, the finest name first."""

_CLAUDE_CODE = re.compile(r"_session_([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})$")


def hint_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """1 to 128 characters, or None if the request names nothing. `headers` with lower-case names."""
    for value in _named(headers, body):
        if isinstance(value, str) and value:
            return value if len(value) <= LONGEST else hashlib.sha256(value.encode()).hexdigest()
    return None


def _named(headers: Mapping[str, str], body: Mapping[str, Any]) -> Iterator[Any]:
    yield body.get("prompt_cache_key")
    for name in HEADERS:
        yield headers.get(name)
    metadata = body.get("metadata")
    if isinstance(metadata, dict):
        yield metadata.get("session_id")
        yield _claude_code_session(metadata.get("user_id"))


def _claude_code_session(user: Any) -> str | None:
    """Its `user_id` ends with `_session_` and a uuid, or is JSON that has a `session_id`. A user is none."""
    if not isinstance(user, str):
        return None
    if user.startswith("{"):
        try:
            parsed = json.loads(user)
        except (ValueError, RecursionError):
            return None
        return parsed.get("session_id") if isinstance(parsed, dict) else None
    found = _CLAUDE_CODE.search(user)
    return found.group(1) if found else None
