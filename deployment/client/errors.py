"""What can go wrong, as the caller sees it: the server refused, is not there, or contradicts itself."""

from __future__ import annotations


class ClientError(RuntimeError):
    """One sentence about why there is no answer, or no more of it."""


class Unreachable(ClientError):
    """Nobody answered for as long as the client was told to try."""


class UnexpectedAnswer(ClientError):
    """Somebody answered, but not in the way of this interface."""


class Contradiction(ClientError):
    """A stream that was taken up again does not fit what was read before: a token would be lost, repeated or changed.
    What was handed out until then is from one and the same turn."""


class Refusal(ClientError):
    """The server's own error object. `code` stays the same between versions; `param` names the field at fault."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(f"the server answers {status}: {message}")
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after


class InvalidRequest(Refusal):
    """400, 413, 422: the same request will never be taken."""


class Unauthorized(Refusal):
    """401: the server does not know the API key, or needs one."""


class NotFound(Refusal):
    """404: there is no such session, turn, model or replica."""


class Conflict(Refusal):
    """409: the session's state does not allow it, or not now."""


class Gone(Refusal):
    """410: the turn is over and its events are not kept any more."""


class Overloaded(Refusal):
    """429: later."""


class Unavailable(Refusal):
    """503: something is gone or being replaced, or no lane was free in time."""


class ServerFault(Refusal):
    """Any other status: the fault is the server's."""


_KIND_OF_STATUS: dict[int, type[Refusal]] = {
    400: InvalidRequest, 401: Unauthorized, 404: NotFound, 409: Conflict, 410: Gone, 413: InvalidRequest,
    422: InvalidRequest, 429: Overloaded, 503: Unavailable,
}  # fmt: skip

_STATUS_OF_TYPE = {"invalid_request_error": 400, "conflict_error": 409, "rate_limit_error": 429,
                   "unavailable_error": 503}  # fmt: skip
"""For an error that comes as a stream's last event, without a status of its own."""


def refusal_of(error: object, status: int | None = None, retry_after: float | None = None) -> Refusal | None:
    """The refusal that an OpenAI error object is; None if it is none."""
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return None
    if status is None:
        status = _STATUS_OF_TYPE.get(str(error.get("type")), 500)
    code, param = error.get("code"), error.get("param")
    kind = _KIND_OF_STATUS.get(status, ServerFault)
    return kind(status, str(code or ""), error["message"], None if param is None else str(param), retry_after)


def worth_another_try(refusal: Refusal) -> bool:
    """Whether the same request may be taken later. A turn that waited for as long as it may has its answer."""
    return isinstance(refusal, Overloaded | Unavailable) and refusal.code != "queue_timeout"
