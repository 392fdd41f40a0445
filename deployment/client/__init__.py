"""A client of the HTTP interface (`docs/client.md`): turns whose streams survive a broken connection, and sessions."""

from deployment.client.asynchronous import AsyncClient
from deployment.client.errors import (
    ClientError,
    Conflict,
    Contradiction,
    Gone,
    InvalidRequest,
    NotFound,
    Overloaded,
    Refusal,
    ServerFault,
    Unauthorized,
    Unavailable,
    UnexpectedAnswer,
    Unreachable,
)
from deployment.client.events import (
    Answer,
    AnswerEvent,
    Began,
    Called,
    Choice,
    Ended,
    Interrupted,
    Resume,
    Resumed,
    Text,
    Usage,
)
from deployment.client.synchronous import Client

__all__ = [
    "Answer", "AnswerEvent", "AsyncClient", "Began", "Called", "Choice", "Client", "ClientError", "Conflict",
    "Contradiction", "Ended", "Gone", "Interrupted", "InvalidRequest", "NotFound", "Overloaded", "Refusal", "Resume",
    "Resumed", "ServerFault", "Text", "Unauthorized", "Unavailable", "UnexpectedAnswer", "Unreachable", "Usage",
]  # fmt: skip
