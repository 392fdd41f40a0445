"""What replicas and host stores say of themselves, on a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from deployment.engine.counts import Counts, Distribution
from deployment.metrics import catalog
from deployment.metrics.measured import Measured, Room, TransferCounts
from deployment.metrics.page import Page


def fill(page: Page, replicas: Iterable[Measured], stores: Mapping[str, Room]) -> None:
    """`stores`: of each node that answered."""
    for measured in replicas:
        _load(page, measured)
        _rounds(page, measured.counts, measured.info.replica)
        _state(page, measured)
        _transfers(page, measured.counts, measured.transfers, measured.info.replica)
    for node, room in sorted(stores.items()):
        page.add(catalog.HOST_SIZE, room.size, node=node)
        page.add(catalog.HOST_USED, room.used, node=node)


def _load(page: Page, measured: Measured) -> None:
    info, counts = measured.info, measured.counts
    replica, engine = info.replica, info.engine
    page.add(catalog.REPLICA, 1, replica=replica, node=info.node, model=info.model, backend=info.backend)
    page.add(catalog.LANES, engine["lanes"], replica=replica)
    page.add(catalog.LANES_RUNNING, engine["lanes_running"], replica=replica)
    page.add(catalog.QUEUED, engine["turns_queued"], replica=replica)
    page.add(catalog.PREEMPTED_NOW, engine["turns_preempted"], replica=replica)
    page.add(catalog.SESSIONS, info.sessions, replica=replica)
    page.distribution(catalog.LANE_WAIT, counts.waits, replica=replica)
    page.add(catalog.PREEMPTIONS, counts.preempted, replica=replica)
    page.each(catalog.ENDED, counts.ended, "reason", replica=replica)
    page.each(catalog.FAILED, counts.failed, "code", replica=replica)


def _rounds(page: Page, counts: Counts, replica: str) -> None:
    page.add(catalog.ROUNDS, counts.rounds, replica=replica)
    page.each(catalog.PART_SECONDS, counts.part_seconds, "part", replica=replica)
    page.distribution(catalog.ACCEPTANCE, _acceptance(counts.accepted), replica=replica)
    page.each(catalog.VERIFIED, _by_position(counts.drafted), "position", replica=replica)
    page.each(catalog.ACCEPTED, _by_position(counts.accepted), "position", replica=replica)
    page.add(catalog.TOKENS, counts.tokens, replica=replica)


def _state(page: Page, measured: Measured) -> None:
    replica, engine, counts = measured.info.replica, measured.info.engine, measured.counts
    page.each(catalog.STARTED, counts.started, "hit", replica=replica)
    page.each(catalog.REUSED, counts.reused, "hit", replica=replica)
    page.add(catalog.PREFILLED, counts.prefilled, replica=replica)
    page.add(catalog.PREFILL_SECONDS, counts.prefill_seconds, replica=replica)
    page.add(catalog.PREFILL_SLICES, counts.slices, replica=replica)
    page.each(catalog.CHECKPOINTS, counts.captured, "kind", replica=replica)
    page.add(catalog.EVICTIONS, counts.evicted, replica=replica)
    page.add(catalog.PAGES, engine["pages"], replica=replica)
    page.add(catalog.PAGES_FREE, engine["pages_free"], replica=replica)
    page.add(catalog.IMAGES, engine["images"], replica=replica)
    page.add(catalog.IMAGES_FREE, engine["images_free"], replica=replica)
    page.add(catalog.STAGED, engine["staged_bytes"], replica=replica)


def _transfers(page: Page, counts: Counts, sent: TransferCounts, replica: str) -> None:
    flows = {
        ("host", "out"): sent.copied,
        ("host", "in"): sent.fetched,
        ("durable", "out"): counts.durable_written,
        ("durable", "in"): counts.durable_read,
    }
    for (tier, direction), flow in flows.items():
        where = {"replica": replica, "tier": tier, "direction": direction}
        page.add(catalog.TRANSFERS, flow.transfers, **where)
        page.add(catalog.TIER_BYTES, flow.bytes, **where)
        page.add(catalog.TIER_SECONDS, flow.seconds, **where)
    page.each(catalog.MIGRATIONS, {"moved": sent.moved, "stayed": sent.stayed}, "outcome", replica=replica)
    phases = {"ahead": sent.bytes_ahead, "pause": sent.bytes_in_pause}
    page.each(catalog.MIGRATION_BYTES, phases, "phase", replica=replica)
    page.add(catalog.MIGRATION_SECONDS, sent.seconds, replica=replica)
    page.distribution(catalog.MIGRATION_PAUSE, sent.pauses, replica=replica)


def _acceptance(accepted: tuple[int, ...]) -> Distribution:
    """Of rows by accepted drafts: a round licenses one token more."""
    bounds = tuple(float(number + 1) for number in range(len(accepted)))
    total = sum(number * rows for number, rows in zip(bounds, accepted, strict=True))
    return Distribution(bounds, (*accepted, 0), total)


def _by_position(rows: tuple[int, ...]) -> dict[str, float]:
    """`rows[n]` had n drafts: how many had one at each position, from 1."""
    at_least = list(accumulate(reversed(rows)))[::-1]
    return {str(position): count for position, count in enumerate(at_least) if position}
