"""Where does a turn live that belongs to no session, but has an Idempotency-Key? (decision 21)

In a session of its own, which no client can name or see, so that its log outlives its replica: a request that comes
again after that has died finds the answer, or the turn that goes on. Nothing will ever continue it, so that the log is
all there is: the engine knows no such session, and no copy has an image.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from deployment.ownership.words import SessionKey
from deployment.wire import TurnRequest

KEYED = "idempotency key "
"""How the name of such a session begins. With its spaces it is none that a client can choose."""


def is_keyed(key: SessionKey) -> bool:
    return key.session.startswith(KEYED)


def with_session(request: TurnRequest) -> TurnRequest:
    """The request in the session of its key, if it has a key and no session, and a log can tell it: it says nothing of
    how likely a prompt is."""
    scored = request.echo and request.logprobs is not None
    if request.key is not None or request.idempotency_key is None or scored:
        return request
    name = hashlib.sha256(request.idempotency_key.encode()).hexdigest()
    return replace(request, key=SessionKey(request.tenant, f"{KEYED}{name}"))
