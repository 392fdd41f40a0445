"""Sessions and replicas as objects of the interface."""

from __future__ import annotations

import json
from typing import Any

from deployment.ownership.messages import Placed
from deployment.wire import Adopted, ReplicaInfo, SessionInfo
from state.session_record import ForkPoint


def listed(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": objects}


def model_object(name: str, model: str, info: ReplicaInfo) -> dict[str, Any]:
    """`name`: one of the model's, of which `model` is the one that answers have."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "dflash-serve",
        "root": model,
        "max_model_len": info.context_limit,
        "speculative": info.backend,
    }


def placement_object(placement: Placed) -> dict[str, Any]:
    return {
        "id": placement.key.session,
        "object": "session",
        "replica": placement.owner,
        "epoch": str(placement.epoch),
        "store": not placement.alone,
        "copies": [{"node": member.node} for member in placement.members],
    }


def session_details(placement: Placed, known: SessionInfo | None) -> dict[str, Any]:
    """With what the owner knows, if it does. Bytes, which only an imported session can hold, are shown as hex."""
    shown = placement_object(placement)
    if known is not None:
        shown |= {
            "tokens": known.tokens,
            "frontier": known.frontier,
            "running": known.running,
            "transcript": list(known.transcript),
            "turns": list(known.turns),
        }
    return _plain(shown)


def turns_object(known: SessionInfo) -> dict[str, Any]:
    """The session's turns, oldest first; the last one may be running."""
    turns = [{**turn, "object": "session.turn", "status": "over"} for turn in known.turns]
    if known.running is not None:
        turns.append({"id": known.running, "object": "session.turn", "status": "running"})
    return _plain(listed(turns))


def checkpoint_object(point: ForkPoint, **more: Any) -> dict[str, Any]:
    """An explicit checkpoint. `image`: up to where a fork finds state; what comes after it is prefilled."""
    return {
        "name": point.name,
        "object": "session.checkpoint",
        "kind": "explicit",
        **more,
        "turn": point.turn,
        "frontier": point.frontier,
        "image": point.image or None,
    }


def checkpoints_object(known: SessionInfo) -> dict[str, Any]:
    """The explicit checkpoints, oldest first; then the other state of the session. `places`: where their state lies."""
    kept = {state.frontier: list(state.places) for state in known.checkpoints if state.kind == "explicit"}
    explicit = [
        checkpoint_object(point, places=kept.get(point.image, []))
        for point in known.fork_points
        if point.name is not None
    ]
    others = [
        {"object": "session.checkpoint", "kind": state.kind, "frontier": state.frontier, "places": list(state.places)}
        for state in known.checkpoints
        if state.kind != "explicit"
    ]
    return listed(explicit + others)


def adopted_object(session: str, kind: str, answer: Adopted, **more: Any) -> dict[str, Any]:
    """What was done to a session, and where it lives now."""
    return {
        "id": session,
        "object": f"session.{kind}",
        **more,
        "replica": answer.replica,
        "epoch": str(answer.epoch),
        "frontier": answer.frontier,
    }


def _plain(shown: Any) -> Any:
    return json.loads(json.dumps(shown, default=bytes.hex))


def replica_object(replica: ReplicaInfo) -> dict[str, Any]:
    return {
        "id": replica.replica,
        "object": "replica",
        "pid": replica.pid,
        "node": replica.node,
        "model": replica.model,
        "backend": replica.backend,
        "sessions": replica.sessions,
        "running": replica.running,
        "engine": replica.engine,
    }
