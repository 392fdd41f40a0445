"""Opens the place of the durable tier that the settings name: a directory or a URL, encrypted or not."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from state.byte_store import ByteStore, DirectoryStore
from state.errors import StateError
from state.names import ENCRYPTION


def open_place(place: str, key_env: str | None = None) -> ByteStore:
    """The store in an absolute path or under a URL, in clear. `key_env`: the variable of the environment with the keys
    of an encrypted one. Raises StateError for a place that cannot be opened, for a key that is none or another one, and
    for a place that is encrypted and should not be, or the reverse: before anything is taken for damaged."""
    store = _opened(place)
    if key_env is None:
        if store.get(ENCRYPTION) is not None:
            raise StateError(
                f"durable store: {place!r} is encrypted; durable_key_env must name the variable of its key"
            )
        return store
    sealing = _sealing()
    return sealing.sealed_store(store, place, sealing.keys_of(key_env))


def check_keys(key_env: str) -> None:
    """Raises StateError for a variable that holds no keys."""
    _sealing().keys_of(key_env)


def _sealing() -> ModuleType:
    """The one module that needs the cipher library."""
    try:
        from deployment import sealing
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("cryptography"):
            raise
        raise StateError("durable_key_env: needs the extra: pip install 'dflash-serve[encryption]'") from None
    return sealing


def _opened(place: str) -> ByteStore:
    if place.startswith("/"):
        return DirectoryStore(Path(place))
    # Only URLs need the storage library, which a bare GPU machine may not have.
    from deployment.stores import open_store

    return open_store(place)
