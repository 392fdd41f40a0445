"""Owners, host stores and the directory as real Ray actors, killed for real. The replicas here have no engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from deployment.cluster.names import (
    NAMESPACE,
    PROTOCOL,
    directory_name,
    remove,
    remove_other_versions,
    store_name,
    versioned,
)
from deployment.cluster.transport import start_directory
from deployment.ownership.liveness import LEASE_SECONDS, LEASE_SLACK
from deployment.ownership.words import SessionKey
from tests.deployment.cluster.replicas import APP, Replica


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(address="local", include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
        start_directory(APP)
        yield tmp_path_factory.mktemp("shm")
        remove(APP)
        ray.shutdown()


_names = iter(range(1000))


@pytest.fixture
def replicas(cluster: Path) -> Iterator[list[Any]]:
    actors = [Replica.options(name=None).remote(f"replica-{next(_names)}", cluster) for _ in range(2)]
    ray.get([actor.start.remote() for actor in actors])
    yield actors
    for actor in actors:
        ray.kill(actor)


def key() -> SessionKey:
    return SessionKey("a" * 64, f"session-{next(_names)}")


def kill(actor: Any) -> None:
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)


def taken(replica: Any, session: SessionKey, seconds: float) -> Any:
    """What `take` gives once it is no other replica's."""
    deadline = time.monotonic() + seconds
    while isinstance(answer := ray.get(replica.take.remote(session)), str):
        if time.monotonic() > deadline:
            raise TimeoutError(answer)
        time.sleep(0.05)
    return answer


def test_what_was_published_is_what_the_next_owner_finds(replicas: list[Any]):
    one, two = replicas
    session = key()
    assert ray.get(one.take.remote(session)) == ()
    ray.get(one.begin.remote(session))
    assert ray.get(one.publish.remote(session, (5, 6))) is None
    assert isinstance(ray.get(two.take.remote(session)), str), "its owner lives"
    kill(one)
    began = time.monotonic()
    assert taken(two, session, 5) == (5, 6)
    assert time.monotonic() - began < 3.0
    assert ray.get(two.publish.remote(session, (7,))) is None


def test_a_killed_directory_disturbs_nobody_who_publishes_and_knows_all_sessions_again(replicas: list[Any]):
    one, two = replicas
    session = key()
    ray.get(one.take.remote(session))
    ray.get(one.begin.remote(session))
    directory = ray.get_actor(directory_name(APP), NAMESPACE)
    ray.kill(directory, no_restart=False)
    assert ray.get(one.publish.remote(session, (5,)), timeout=3) is None
    deadline = time.monotonic() + 10
    while True:
        try:
            answer = ray.get(directory.locate.remote(session), timeout=5)
        except RayActorError:
            answer = None
        if getattr(answer, "owner", None) is not None:
            break
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
    assert isinstance(ray.get(two.take.remote(session)), str)
    assert ray.get(one.publish.remote(session, (6,))) is None


def test_a_killed_host_store_comes_back_with_all_that_it_had_and_publishing_waits_for_it(replicas: list[Any]):
    one, two = replicas
    session = key()
    ray.get(one.take.remote(session))
    ray.get(one.begin.remote(session))
    assert ray.get(one.publish.remote(session, (5,))) is None
    store = ray.get_actor(store_name(APP, ray.get_runtime_context().get_node_id()), NAMESPACE)
    ray.kill(store, no_restart=False)
    assert ray.get(one.publish.remote(session, (6,)), timeout=20) is None
    kill(one)
    assert taken(two, session, 5) == (5, 6)


def test_a_host_store_that_was_started_again_makes_itself_known_to_a_directory_that_was_too(replicas: list[Any]):
    """As long as it does not, no session can be taken over and no unknown name is known to be free."""
    directory = ray.get_actor(directory_name(APP), NAMESPACE)
    store = ray.get_actor(store_name(APP, ray.get_runtime_context().get_node_id()), NAMESPACE)
    for _ in range(4):
        for actor in (store, directory):
            pid: Any = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
            os.kill(pid, signal.SIGKILL)
            answered(actor)
        deadline = time.monotonic() + 30
        while (placed := ray.get(directory.locate.remote(key()), timeout=30)) is not None:
            assert time.monotonic() < deadline, placed
            time.sleep(0.1)


def answered(actor: Any) -> None:
    """Waits until an actor that is being started again answers. What was asked too early may never be answered."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return ray.get(actor.__ray_ready__.remote(), timeout=5)
        except (RayActorError, GetTimeoutError):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_an_owner_that_stalls_beyond_its_lease_is_fenced_when_it_wakes(replicas: list[Any]):
    one, two = replicas
    session = key()
    ray.get(one.take.remote(session))
    ray.get(one.begin.remote(session))
    assert ray.get(one.publish.remote(session, (5,))) is None
    stalled = one.stall.remote(13)
    assert taken(two, session, 13) == (5,)
    ray.get(stalled)
    assert "owner" in (ray.get(one.publish.remote(session, (6,))) or "")
    assert ray.get(two.publish.remote(session, (7,))) is None


def test_a_round_of_many_lanes_is_one_call(replicas: list[Any]):
    one, _ = replicas
    sessions = [key() for _ in range(64)]
    ray.get([one.take.remote(session) for session in sessions])
    ray.get([one.begin.remote(session) for session in sessions])
    seconds: Any = ray.get(one.rounds.remote(sessions, 20))
    alone: Any = ray.get(one.rounds.remote(sessions[:1], 20))
    print(f"64 lanes: {seconds * 1e3:.1f} ms a round; one: {alone * 1e3:.1f} ms")
    assert seconds < 1.0


@ray.remote(num_cpus=0)
class Idle:
    pass


def test_actors_of_other_versions_end_without_ours_and_all_of_an_application_go_down_together(replicas: list[Any]):
    others = [f"{APP}/v1/directory", f"{APP}/v{PROTOCOL + 1}/host-store/node", f"{APP}-2/v1/directory"]
    assert is_lost_soon("stranger"), "nobody else could know it"
    for name in others:
        actor: Any = Idle.options(name=name, namespace=NAMESPACE, lifetime="detached").remote()
        ray.get(actor.__ray_ready__.remote())
    assert not ray.get(start_directory(APP).is_lost.remote("stranger")), "it may renew with the other directory"
    ours = {name for name in named() if name.startswith(f"{versioned(APP)}/")}
    assert ours and remove_other_versions(APP) == 2
    assert named_soon(ours | {others[2]})
    assert remove(APP) == len(ours)
    assert named_soon({others[2]}), "another application keeps its own"
    assert remove(f"{APP}-2") == 1


def is_lost_soon(replica: str) -> bool:
    deadline = time.monotonic() + LEASE_SECONDS + LEASE_SLACK + 5.0
    while not (lost := bool(ray.get(start_directory(APP).is_lost.remote(replica)))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return lost


def named() -> set[str]:
    listed: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in listed if actor["namespace"] == NAMESPACE}


def named_soon(names: set[str]) -> bool:
    deadline = time.monotonic() + 10
    while named() != names and time.monotonic() < deadline:
        time.sleep(0.05)
    return named() == names
