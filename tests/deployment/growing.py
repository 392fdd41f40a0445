"""A session that grows by turns of a tiny engine."""

from __future__ import annotations

from deployment.engine.commands import Submit
from deployment.engine.events import Finished
from deployment.engine.service import EngineService
from deployment.ownership.words import SessionKey
from deployment.session import Session

KEY = SessionKey("a" * 64, "s")


async def grown(service: EngineService, session: Session, asked: int) -> None:
    """A turn of so many tokens."""
    prompt = (*session.ledger, *[len(session.ledger) % 7] * asked)
    async for event in service.turn(Submit("t", prompt, session=session.engine_id, max_tokens=2)):
        if isinstance(event, Finished):
            session.ledger = prompt + event.token_ids + event.hidden_ids
            session.frontier = event.frontier
