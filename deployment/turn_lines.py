"""What the log says of a turn: one line at its end, with numbers and names. Texts only where that was asked for."""

from __future__ import annotations

import logging
from typing import Any

from deployment.errors import Refused
from deployment.held_turn import HeldTurn
from deployment.session import Session
from deployment.wire import Closed, Moved, TurnEvent

log = logging.getLogger("ray.serve")


class TurnLines:
    """`texts`: what was asked and answered is logged too."""

    def __init__(self, texts: bool = False) -> None:
        self._texts = texts

    def ended(self, held: HeldTurn, choice: int, session: Session | None, last: TurnEvent) -> None:
        """One choice of a turn has had its last event."""
        facts: dict[str, Any] = {"turn": held.id, "choice": choice, "prompt_tokens": held.stream.start}
        if session is not None:
            facts |= {"session": session.key.session, "tenant": session.key.tenant[:16], "epoch": str(session.epoch)}
        match last:
            case Closed():
                self._closed(held, facts, last)
            case Refused():
                # Not its message, which may repeat what the client said.
                facts |= {"code": last.code, "status": last.status}
                log.info("turn %s was refused: %s", held.id, last.code, extra=facts)
            case Moved():
                log.info("turn %s goes on at %s", held.id, last.owner or "another replica", extra=facts)
            case _:
                raise AssertionError(f"{type(last).__name__} is no last event")

    def _closed(self, held: HeldTurn, facts: dict[str, Any], closed: Closed) -> None:
        facts |= {
            "finish_reason": closed.finish_reason,
            "completion_tokens": closed.completion_tokens,
            "rounds": len(closed.rounds),
            "acceptance_length": round(closed.acceptance_length, 3),
            "seconds": round(closed.seconds, 6),
        }
        if closed.session is not None:
            facts |= {"hit": closed.session.hit, "reused": closed.session.reused, "prefilled": closed.session.prefilled}
        if self._texts:
            reasoning, content = held.stream.said(facts["choice"])
            asked = held.request.messages or held.request.prompt
            facts |= {"asked": asked, "reasoning": reasoning, "answer": content}
        log.info(
            "turn %s is over: %s, %d tokens in %d rounds and %.3f s",
            held.id, closed.finish_reason, closed.completion_tokens, len(closed.rounds), closed.seconds, extra=facts,
        )  # fmt: skip
