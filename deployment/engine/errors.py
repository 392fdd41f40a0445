"""The engine's refusals. Each has a code that stays the same for ever, a sentence for a person, and maybe a field."""

from __future__ import annotations

INVALID_REQUEST = "invalid_request"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
OVERLOADED = "overloaded"
QUEUE_TIMEOUT = "queue_timeout"
UNKNOWN_SESSION = "unknown_session"
UNKNOWN_TURN = "unknown_turn"
UNKNOWN_CHECKPOINT = "unknown_checkpoint"
GRAMMAR_DEAD_END = "grammar_dead_end"
BAD_STATE = "bad_state"
FINGERPRINT_MISMATCH = "fingerprint_mismatch"
INTERNAL_ERROR = "internal_error"


class EngineError(Exception):
    """A refusal with a stable `code`; `param` names the request field at fault, if one is."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
