"""Several applications in one cluster: each finds and ends its own actors, and no other's."""

from __future__ import annotations

import itertools

import pytest
import ray

from deployment.cluster import names
from deployment.durable_place import default_place
from deployment.ownership.directory import Directory
from deployment.ownership.registry import Registry
from deployment.ownership.words import Member
from state.arena_file import SHARED_MEMORY, arena_path
from tests.ownership.fake_storage import FakeValues

APPS = ("a", "a/v4", "a/vision", "ab", "a.v4", "b")
NODE = "7" * 56
STORE = Member(NODE, "0" * 32)


class Actor:
    """Whom `remove` has ended."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A cluster where all of the applications run, in this version of the protocol and in an older one."""
    there: list[str] = []
    for app, version in itertools.product(APPS, (names.PROTOCOL, names.PROTOCOL - 1)):
        there += [f"{app}/v{version}/directory", f"{app}/v{version}/host-store/{NODE}"]
    gone: list[str] = []
    listed = [{"name": name, "namespace": names.NAMESPACE} for name in there]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: listed)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: Actor(name))
    monkeypatch.setattr(ray, "kill", lambda actor: gone.append(actor.name))
    values = FakeValues()
    monkeypatch.setattr(names, "GcsValues", lambda: values)
    return gone


def test_names_carry_the_application():
    assert names.directory_name("a") == f"a/v{names.PROTOCOL}/directory"
    places = [arena_path(SHARED_MEMORY, names.versioned(app), NODE) for app in APPS]
    assert len(set(places)) == len({default_place(app) for app in APPS}) == len(APPS)


@pytest.mark.parametrize("app", APPS)
def test_who_takes_an_application_down_ends_its_actors_of_all_versions_and_no_others(ended: list[str], app: str):
    assert names.remove(app) == 4
    versions = (names.PROTOCOL, names.PROTOCOL - 1)
    kinds = ("directory", f"host-store/{NODE}")
    assert set(ended) == {f"{app}/v{version}/{kind}" for version in versions for kind in kinds}


def test_to_who_is_deployed_again_the_cluster_is_new_and_to_other_applications_it_is_not(ended: list[str]):
    ours, others = (Registry(names.GcsValues(), names.versioned(app)) for app in ("a", "a/v4"))
    for registry in (ours, others):
        assert registry.next_incarnation(5.0) == 5
        registry.register(STORE)
    assert not Directory(ours, 6.0, 0.0).is_first
    names.remove("a")
    again = Directory(ours, 7.0, 0.0)
    assert again.is_first and again.incarnation == 7 and ours.stores() == ()
    assert not ours.may_count(STORE), "what an older store holds counts for nothing"
    assert others.stores() == (STORE,) and others.first_incarnation() == 5


def test_an_incarnation_never_comes_again_whatever_the_clock_says_after_an_end(ended: list[str]):
    ours = Registry(names.GcsValues(), names.versioned("a"))
    highest = [Directory(ours, now, 0.0).incarnation for now in (9.0, 9.0, 3.0)][-1]
    for clock in (3.0, 4.0):
        names.remove("a")
        again = Directory(ours, clock, 0.0)
        assert again.is_first and again.incarnation == highest + 1, (
            "the durable tier may hold what was written under it"
        )
        highest = again.incarnation
    names.remove("a")
    assert Directory(ours, 50.0, 0.0).incarnation == 50


def test_a_new_version_ends_the_old_ones_of_its_own_application(ended: list[str]):
    assert names.remove_other_versions("a") == 2
    assert set(ended) == {f"a/v{names.PROTOCOL - 1}/directory", f"a/v{names.PROTOCOL - 1}/host-store/{NODE}"}
