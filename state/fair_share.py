"""Whose state goes first where there is not room for all? One rule for every tier: theirs who hold more than a share.

A share is what all hold divided by those who hold anything. So a tenant keeps what it has up to its share, whatever
others do, and may hold more while nobody else wants the room.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

Tenant = TypeVar("Tenant", bound=Hashable)


def first_to_go(used: Mapping[Tenant, float]) -> frozenset[Tenant]:
    """The tenants from whom is taken first, by what each of them holds, in any unit: those above the share, or all of
    them where nobody is. To be asked again after each piece that went."""
    holders = [tenant for tenant, amount in used.items() if amount > 0]
    share = sum(used[tenant] for tenant in holders) / max(1, len(holders))
    return frozenset(tenant for tenant in holders if used[tenant] > share) or frozenset(holders)
