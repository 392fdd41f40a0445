"""Where do sessions outlive the cluster if nobody has named a place? In a directory of the user of its head node.

Replicas of other nodes could not write there, so that they refuse it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from deployment.settings import DEFAULT_PLACE, AppArgs

_NAME_ANOTHER = (
    "name a place that all nodes reach (an absolute path in a shared file system, or a URL such as "
    "s3://bucket/prefix), or none"
)


def settled(args: AppArgs, app: str, *, on_head: bool) -> AppArgs:
    """The settings with the place that they mean. `on_head`: whether this process is on the cluster's first node, from
    whose disk a new cluster would go on. Raises ValueError."""
    if args.durable != DEFAULT_PLACE:
        return args
    if not on_head:
        raise ValueError(
            f"durable: the default is a directory of the head node, and this is another one; {_NAME_ANOTHER}"
        )
    return args.model_copy(update={"durable": default_place(app)})


def default_place(app: str) -> str:
    """An application's own directory, by the XDG base directory specification: `$XDG_STATE_HOME/dflash-serve/APP`.
    Raises ValueError where the user has no home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        root = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        raise ValueError(
            "durable: this user has no home directory, where the default would be; name a place, or none"
        ) from None
    return str(root / "dflash-serve" / quote(app, safe="").replace(".", "%2E"))


@contextlib.contextmanager
def held(place: str) -> Iterator[None]:
    """Two clusters that went on from one directory would both write what only one of them may: the second one gets a
    ValueError. The lock lies beside the directory and goes with this process."""
    lock = Path(f"{place}.lock")
    try:
        lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ValueError(f"durable: {place} cannot be used: {error.strerror}; name another place, or none") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"durable: another server uses {place}; name another place, or none") from None
        yield
    finally:
        os.close(descriptor)
