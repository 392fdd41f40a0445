"""The cluster, which a directory's files share, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from deployment.settings import AppArgs
from tests.e2e.cluster import keyed, two_replicas


@pytest.fixture(scope="package")
def url() -> Iterator[str]:
    with two_replicas(AppArgs(detach_seconds=2, durable=None)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with keyed(url) as client:
        yield client
