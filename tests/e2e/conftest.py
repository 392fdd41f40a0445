"""The application deployed by its config, which a module's tests change and put load on, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.deployed import Deployed, asking, deploying


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    with deploying() as deployed:
        yield deployed


@pytest.fixture
def client(deployed: Deployed) -> Iterator[httpx.Client]:
    with asking(deployed) as client:
        yield client
