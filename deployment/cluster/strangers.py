"""May somebody without a secret use the cluster's Ray, and with it run code on its nodes?"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any

from ray._private.authentication.authentication_utils import is_token_auth_enabled


def let_in(nodes: Iterable[Mapping[str, Any]]) -> str | None:
    """A sentence that says so, where this process's Ray has no token and any of `ray.nodes()` can be reached from other
    machines; None: nobody is let in."""
    reached = sorted({str(node["NodeManagerAddress"]) for node in nodes if node["Alive"]} - {""})
    beyond = [address for address in reached if not _is_loopback(address)]
    if not beyond or is_token_auth_enabled():
        return None
    return (
        f"Ray has no token, so that whoever reaches its ports on {', '.join(beyond)} can run code there: start it with "
        "RAY_AUTH_MODE=token on every node (docs/security.md)"
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
