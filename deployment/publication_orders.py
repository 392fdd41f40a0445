"""Under which order is a session written to the durable tier, whose log may stand still between two publications?"""

from __future__ import annotations

from deployment.ownership.words import Order

PUBLICATIONS = 1 << 16
"""Of what a log said at one time, at most: its record at the turn's end, and its state once the session rests."""


def published_as(logged: Order, number: int) -> Order:
    """The order of a publication: the tier takes none that is not later than the one before, and a session is written
    more than once while its log stands still. `number`: how often it was since then."""
    return Order(logged.epoch, logged.sequence * PUBLICATIONS + min(number, PUBLICATIONS - 1))


def logged_at(published: Order) -> Order:
    """Where the log stood when that was published."""
    return Order(published.epoch, published.sequence // PUBLICATIONS)
