"""One scrape of the whole application: its ingress, its replicas, and the host stores of their nodes."""

from __future__ import annotations

import asyncio

from deployment.cluster.transport import Cluster
from deployment.errors import RequestError
from deployment.metrics import catalog, replicas
from deployment.metrics.page import Page
from deployment.metrics.turns import TurnMetrics
from deployment.replica_calls import Replicas


async def scraped(turns: TurnMetrics, asked: Replicas, cluster: Cluster) -> bytes:
    """What does not answer is left out: then it is watching that matters most."""
    try:
        measured = await asked.measured()
    except RequestError:
        measured = []
    nodes = sorted({one.info.node for one in measured})
    rooms = await asyncio.gather(*(cluster.room(node) for node in nodes))
    page = Page()
    page.add(catalog.REPLICAS, len(measured))
    turns.fill(page)
    replicas.fill(page, measured, {node: room for node, room in zip(nodes, rooms, strict=True) if room is not None})
    return page.text
