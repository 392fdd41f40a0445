"""How much of a pool do each tenant's checkpoints hold? Counted as they come and go."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable


class TenantUse:
    """Of one pool. A page that several of a tenant's checkpoints share counts once."""

    def __init__(self) -> None:
        self._holders: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def add(self, tenant: str, pages: Iterable[int]) -> None:
        """One more checkpoint of the tenant holds these pages."""
        self._holders[tenant].update(pages)

    def remove(self, tenant: str, pages: Iterable[int]) -> None:
        """One that held them is gone."""
        holders = self._holders[tenant]
        for page in pages:
            if holders[page] == 1:
                del holders[page]
            else:
                holders[page] -= 1
        if not holders:
            del self._holders[tenant]

    @property
    def of_each(self) -> dict[str, int]:
        """Pages by tenant, of those that hold any."""
        return {tenant: len(holders) for tenant, holders in self._holders.items() if holders}
