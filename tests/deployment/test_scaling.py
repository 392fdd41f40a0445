"""When does Serve start another replica, and when does it end one? Its own autoscaler asks ours, without Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.serve import autoscaling_policy
from ray.serve._private import autoscaling_state
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue

from deployment.app import scaling
from deployment.ownership.words import SessionKey
from deployment.replica import EngineReplica
from deployment.scaling import BUSY, FULL, RECENT_SECONDS, Demand, for_sessions, heard
from deployment.settings import AppArgs
from deployment.wire import TurnRequest
from tests.deployment.places import KEY, Place, asked, places, run, told

LANES = 10
STORE = 1000
ARGS = AppArgs(replicas=1, most_replicas=8, lanes=LANES)
IDLE = Demand(LANES, 0, 0, "x", STORE)

ENGINES = DeploymentID("EngineReplica", "dflash")


class Autoscaler:
    """Serve's, of one deployment. It is told every second what its replicas say."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1e9
        for module in (autoscaling_policy, autoscaling_state):
            patch.setattr(module, "time", SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now))
        config = SimpleNamespace(gang_scheduling_config=None, **scaling(ARGS))
        info = SimpleNamespace(deployment_config=config, target_capacity=None, target_capacity_direction=None)
        self._state: Any = DeploymentAutoscalingState(ENGINES)
        self.target: int = self._state.register(cast(Any, info), 1)

    def passes(self, seconds: int, demands: Sequence[Demand | None]) -> int:
        """How many replicas Serve wants then. None: a replica that has not said anything yet."""
        running = [ReplicaID(str(number), ENGINES) for number in range(len(demands))]
        self._state.update_running_replica_ids(running)
        for _ in range(seconds):
            self.now += 1
            for replica, demand in zip(running, demands, strict=True):
                if demand is not None:
                    told = {name: [TimeStampedValue(self.now, value)] for name, value in demand.told().items()}
                    self._state.record_request_metrics_for_replica(ReplicaMetricReport(replica, told, self.now))
            self.target = self._state.get_decision_num_replicas(self.target)
        return self.target


@pytest.fixture
def autoscaler(monkeypatch: pytest.MonkeyPatch) -> Autoscaler:
    return Autoscaler(monkeypatch)


def test_replicas_come_with_turns_that_run_and_wait_after_a_moment_and_go_after_five_minutes(autoscaler: Autoscaler):
    busy = replace(IDLE, lanes_wanted=BUSY * LANES)
    more = replace(IDLE, lanes_wanted=3 * LANES)
    assert autoscaler.passes(60, [busy]) == 1
    assert autoscaler.passes(5, [more]) == 1, "a burst"
    assert autoscaler.passes(2, [more]) == 4
    assert autoscaler.passes(60, [more] * 4) == 8, "there are no more"
    assert autoscaler.passes(299, [IDLE] * 8) == 8
    assert autoscaler.passes(1, [busy] * 8) == 8, "as long as there is something to do"
    assert autoscaler.passes(300, [IDLE] * 8) == 8
    assert autoscaler.passes(2, [IDLE] * 8) == 1


def test_nodes_whose_memory_recent_sessions_need_keep_a_replica_each(autoscaler: Autoscaler):
    resting = [replace(IDLE, node=node, session_bytes=0.6 * STORE) for node in "abcd"]
    assert autoscaler.passes(1, [replace(IDLE, lanes_wanted=3.2 * LANES)]) == 1
    assert autoscaler.passes(6, [replace(IDLE, lanes_wanted=3.2 * LANES)]) == 4
    assert autoscaler.passes(302, resting) == 3, "2.4 stores are too much for two of them"
    assert autoscaler.passes(1000, [replace(one, session_bytes=0.79 * STORE) for one in resting[:3]]) == 3
    assert autoscaler.passes(1000, [replace(one, session_bytes=0) for one in resting[:3]]) == 1


@pytest.mark.parametrize(
    ("nodes", "stores", "fewest"),
    [("aaaa", 3.0, 1), ("aaab", 1.5 * FULL, 4), ("aabb", 1.5 * FULL, 3), ("aabb", FULL, 1), ("abcd", 9.0, 4)],
)
def test_sessions_need_nodes_not_replicas_and_never_more_than_there_are(nodes: str, stores: float, fewest: int):
    each = stores * STORE / len(nodes)
    assert for_sessions([replace(IDLE, node=node, session_bytes=each) for node in nodes]) == fewest


def test_nothing_changes_while_nobody_knows_what_the_replicas_hold(autoscaler: Autoscaler):
    more = replace(IDLE, lanes_wanted=3 * LANES)
    assert autoscaler.passes(10, [more]) == 4
    assert autoscaler.passes(1000, [IDLE, None, None, None]) == 4
    assert autoscaler.passes(400, [IDLE] * 4) == 1


async def said_by(place: Place) -> Demand:
    """What a replica tells Serve of itself."""
    replica: Any = SimpleNamespace(
        _keeper=place.keeper, _turns=place.desk._table, _lanes=2, _store_bytes=STORE, _cluster=SimpleNamespace(node="x")
    )
    told = await EngineReplica.record_autoscaling_stats(replica)
    (demand,) = heard({name: {"r": value} for name, value in told.items()})
    return demand


def test_turns_in_the_background_count_though_no_call_is_open_and_readers_do_not():
    async def steps() -> None:
        async with places() as (_, (a, _)):
            assert await said_by(a) == Demand(2, 0, 0, "x", STORE)
            held = [await a.begin(in_background(number)) for number in range(3)]
            assert (await said_by(a)).lanes_wanted == 3, "two run, and one waits"
            readers = [asyncio.create_task(told(held[0])) for _ in range(5)]
            await asyncio.sleep(0)
            assert (await said_by(a)).lanes_wanted == 3
            await asyncio.gather(*readers, *(one.ended() for one in held))
            assert (await said_by(a)).lanes_wanted == 0

    run(steps)


def in_background(number: int) -> TurnRequest:
    return replace(asked(64), key=SessionKey(KEY.tenant, f"s{number}"), turn=f"{number:032x}", unattended=True)


def test_a_session_counts_with_its_image_while_it_is_used_and_for_some_time_after_its_last_turn():
    async def steps() -> None:
        async with places() as (_, (a, _)):
            await told(await a.begin(asked(8)))
            while not len(a.session.newest.document):
                await asyncio.sleep(0.01)
            assert (await said_by(a)).session_bytes == len(a.session.newest.document)
            (turn,) = a.session.turns
            a.session.turns = [replace(turn, ended_at=time.time() - RECENT_SECONDS - 1)]
            assert (await said_by(a)).session_bytes == 0
            held = await a.begin(replace(asked(8, "Again."), turn=f"{8:032x}"))
            assert (await said_by(a)).session_bytes > 0
            await told(held)

    run(steps)
