"""What a client is told: one sentence, the field at fault, and a code that stays the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deployment.engine import errors as engine

STATUS_OF_CODE = {
    engine.INVALID_REQUEST: 400,
    engine.CONTEXT_LENGTH_EXCEEDED: 400,
    engine.OVERLOADED: 429,
    engine.QUEUE_TIMEOUT: 503,
    engine.UNKNOWN_SESSION: 404,
    engine.GRAMMAR_DEAD_END: 400,
    engine.BAD_STATE: 503,
    engine.FINGERPRINT_MISMATCH: 409,
    engine.INTERNAL_ERROR: 500,
}

_TYPE_OF_STATUS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                   404: "invalid_request_error", 409: "conflict_error", 422: "invalid_request_error",
                   429: "rate_limit_error", 503: "unavailable_error"}  # fmt: skip


@dataclass(frozen=True)
class Refused:
    """A refusal as a value, so that a user's mistake crosses replicas without an exception and its traceback."""

    status: int
    code: str
    message: str
    param: str | None = None

    @property
    def body(self) -> dict[str, object]:
        """The OpenAI error object."""
        kind = _TYPE_OF_STATUS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def error(self) -> RequestError:
        return RequestError(self.status, self.code, self.message, self.param)


class RequestError(Exception):
    """Raised inside one process; `refused` is what the client gets."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.refused = Refused(status, code, message, param)


TURN_CANCELLED = Refused(409, "turn_cancelled", "the turn was cancelled")


def invalid(message: str, param: str | None = None) -> RequestError:
    return RequestError(400, engine.INVALID_REQUEST, message, param)


def invalid_media(message: str, param: str) -> RequestError:
    return RequestError(400, "invalid_media", message, param)


def media_too_large(message: str, param: str) -> RequestError:
    return RequestError(413, "media_too_large", message, param)


def field_name(place: Iterable[str | int]) -> str:
    """A field inside a body, as in `messages[0].content`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def unknown_session(session: str) -> RequestError:
    """The same for a session that never was, was deleted, or belongs to another tenant."""
    return RequestError(404, "session_not_found", f"session {session!r} does not exist", "session")


def session_exists(session: str) -> RequestError:
    return RequestError(409, "session_exists", f"session {session!r} exists already", "id")


def session_busy(session: str, what: str) -> RequestError:
    return RequestError(409, "session_busy", f"session {session!r} is busy: {what}", "session")


def session_unavailable(session: str, why: str) -> RequestError:
    return RequestError(503, "session_unavailable", f"session {session!r} cannot be continued now: {why}", "session")


def turn_not_kept(turn: str) -> RequestError:
    message = f"the events of turn {turn} are not kept any more; its session's transcript has its text"
    return RequestError(410, "turn_not_kept", message, "turn")


def of_engine(code: str, message: str, param: str | None) -> Refused:
    return Refused(STATUS_OF_CODE.get(code, 500), code, message, param)
