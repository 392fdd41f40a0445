"""What a replica is told when one of the application's actors is gone, without Ray's processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

from deployment.actors import Cluster
from deployment.host_store import Receipt
from deployment.ownership import Epoch, SessionKey
from deployment.wire import HandedOver

KEY = SessionKey("t" * 64, "one")
STATE = HandedOver(Epoch(1, 1), 1, (3,), np.zeros(4, np.uint8))


def cluster_of(stored: Receipt | Exception, recorded: bool | Exception) -> Cluster:
    """A cluster whose actors answer so."""

    def method(answer: object) -> Any:
        async def remote(*args: object) -> object:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(remote=remote)

    cluster = object.__new__(Cluster)
    cluster.node = "node-1"
    cluster._store = SimpleNamespace(put=method(stored))
    cluster._directory = SimpleNamespace(record_copy=method(recorded))
    return cluster


@pytest.mark.parametrize(
    ("stored", "recorded"),
    [(RayActorError(), True), (Receipt(True), RayActorError())],
    ids=["the host store", "the directory"],
)
def test_a_copy_whose_actor_is_gone_is_refused_and_raises_nothing(stored: Receipt | Exception, recorded: Any) -> None:
    receipt = asyncio.run(cluster_of(stored, recorded).put(KEY, "a", STATE))
    assert not receipt.accepted and not receipt.fenced
    assert "node-1" in receipt.reason and "gone" in receipt.reason


def test_a_copy_that_the_directory_gives_to_another_owner_is_fenced() -> None:
    receipt = asyncio.run(cluster_of(Receipt(True), False).put(KEY, "a", STATE))
    assert receipt.fenced and "another owner than a" in receipt.reason
