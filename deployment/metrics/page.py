"""Metrics as Prometheus reads them: text, each family with its HELP and TYPE once, whether or not it has samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.utils import floatToGoString

from deployment.engine.counts import Distribution
from deployment.metrics.catalog import ALL, Family

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Page:
    """One scrape. `add` and `distribution` raise ValueError for labels that are not the family's."""

    def __init__(self) -> None:
        self._metrics = {family: _metric(family) for family in ALL}

    def add(self, family: Family, value: float, **labels: str) -> None:
        self._sample(family, family.name, labels, value)

    def each(self, family: Family, values: Mapping[str, float], by: str, **labels: str) -> None:
        """A sample of each entry, whose key is the label `by`."""
        for name, value in sorted(values.items()):
            self.add(family, value, **labels, **{by: name})

    def distribution(self, family: Family, values: Distribution, **labels: str) -> None:
        so_far = 0
        for bound, count in zip((*values.bounds, float("inf")), values.counts, strict=True):
            so_far += count
            self._sample(family, f"{family.name}_bucket", labels, so_far, le=floatToGoString(bound))
        self._sample(family, f"{family.name}_sum", labels, values.total)
        self._sample(family, f"{family.name}_count", labels, so_far)

    @property
    def text(self) -> bytes:
        return generate_latest(self)  # pyright: ignore[reportArgumentType]

    def collect(self) -> Iterator[Metric]:
        """As the library asks for them."""
        return iter(self._metrics.values())

    def _sample(self, family: Family, name: str, labels: Mapping[str, str], value: float, **more: str) -> None:
        if set(labels) != set(family.labels):
            raise ValueError(f"{family.name}: labels are {sorted(labels)}, must be {sorted(family.labels)}")
        self._metrics[family].add_sample(name, {**labels, **more}, value)


def _metric(family: Family) -> Metric:
    return Metric(family.name.removesuffix("_total"), family.about, family.kind)
