"""What are an application's detached actors called, and how are they found and removed?

Names carry the application and the protocol's version, so that several applications share a cluster and a new version
never talks to an old one's actors.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv

from deployment.ownership.registry import Registry

PROTOCOL = 7
NAMESPACE = "dflash-serve"
# An application's name may have slashes, and begin as another one's actors do.
_NAME = re.compile(r"((?P<app>.+)/v\d+)/(directory|host-store/(?P<node>[^/]+))")
END_SECONDS = 5.0


def directory_name(app: str) -> str:
    return f"{_prefix(app)}directory"


def store_name(app: str, node: str) -> str:
    return f"{_prefix(app)}host-store/{node}"


def versioned(app: str) -> str:
    """Whose arenas and registry entries are: what another version still writes is not this one's to attach or to wait
    for. To a new version the cluster is a new one."""
    return f"{app}/v{PROTOCOL}"


def named_actor(name: str) -> Any:
    """Raises ValueError if there is none."""
    return ray.get_actor(name, NAMESPACE)


def remove(app: str) -> int:
    """Ends all detached actors of an application, of every protocol version, and forgets all that the cluster knows of
    them. Returns how many there were."""
    ended = _end(_actors(app))
    for version in range(1, PROTOCOL + 1):
        Registry(GcsValues(), f"{app}/v{version}").forget()
    return ended


def remove_other_versions(app: str) -> int:
    """Ends those of every protocol version but this one. What their stores held is what the durable tier has of it."""
    return _end([name for name in _actors(app) if not name.startswith(_prefix(app))])


def has_other_directories(app: str) -> bool:
    """Whether replicas of another protocol version may be there."""
    return any(name.endswith("/directory") and name != directory_name(app) for name in _actors(app))


def host_stores() -> set[tuple[str, str]]:
    """(application with version, node) of all host stores of this cluster."""
    return {(found[1], found["node"]) for found in _all_actors() if found["node"]}


def _actors(app: str) -> list[str]:
    return [found[0] for found in _all_actors() if found["app"] == app]


def _all_actors() -> list[re.Match[str]]:
    # With all namespaces, Ray gives dictionaries instead of names.
    actors: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    names = [_NAME.fullmatch(actor["name"]) for actor in actors if actor["namespace"] == NAMESPACE]
    return [found for found in names if found is not None]


def _end(names: list[str]) -> int:
    """Returns how many there were."""
    # The directory first: nobody should hear of stores that go one after the other.
    for name in sorted(names):
        with contextlib.suppress(ValueError):  # it went meanwhile
            actor = ray.get_actor(name, NAMESPACE)
            if "/host-store/" in name:
                _let_go(actor)
            ray.kill(actor)
    return len(names)


def _let_go(store: Any) -> None:
    """What a store holds in shared memory would outlive its process. One that does not answer is left to `sweep`."""
    with contextlib.suppress(RayError, AttributeError):
        ray.get(store.end.remote(), timeout=END_SECONDS)


def _prefix(app: str) -> str:
    return f"{versioned(app)}/"


class GcsValues:
    """`KeyValues` in Ray's GCS, which lives as long as the cluster's head."""

    def add(self, name: str, value: bytes) -> bool:
        return not internal_kv._internal_kv_put(name, value, overwrite=False)

    def names(self, prefix: str) -> list[str]:
        return [key.decode() for key in internal_kv._internal_kv_list(prefix)]

    def value(self, name: str) -> bytes | None:
        return internal_kv._internal_kv_get(name)

    def remove(self, name: str) -> None:
        internal_kv._internal_kv_del(name)
