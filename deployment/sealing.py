"""A durable tier that tells nothing to whoever holds its bytes without its key: AES-256-GCM around every object.

    sealed object    "DFSEALED", the key's id (8 bytes), a nonce (12), the ciphertext, its tag (16)

An object's name is sealed with it, so that none can stand in another's place. Names and sizes stay as they are. A store
is sealed as a whole or not at all, which the object `v1/encryption` says: so a wrong key, or none, is an error before
anything is read, written or taken for damaged. Of several keys the first one seals, and all of them open.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from state.byte_store import Bytes, ByteStore, Entry
from state.errors import ExistsError, StateError, StoreError
from state.names import ENCRYPTION

MARKED = b"dflash-serve"
"""What the store's marker says."""

_MAGIC = b"DFSEALED"
_ID_BYTES, _NONCE_BYTES, _TAG_BYTES = 8, 12, 16
_HEAD_BYTES = len(_MAGIC) + _ID_BYTES + _NONCE_BYTES
OVERHEAD = _HEAD_BYTES + _TAG_BYTES
"""Bytes that an object is larger by."""

_KEY = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class SealingKey:
    """`id`: 8 bytes that say which key it is, and nothing of what it is."""

    id: bytes
    cipher: AESGCM = field(repr=False)

    @classmethod
    def of(cls, key: bytes) -> SealingKey:
        return cls(hashlib.sha256(b"dflash-serve sealing key\0" + key).digest()[:_ID_BYTES], AESGCM(key))


def keys_of(variable: str) -> tuple[SealingKey, ...]:
    """The keys in a variable of the environment, with commas or spaces between them. StateError naming the variable,
    and nothing of what it holds."""
    words = os.environ.get(variable, "").replace(",", " ").split()
    if not words:
        raise StateError(f"durable_key_env: the environment has no {variable}, which must hold the durable tier's key")
    for number, word in enumerate(words, 1):
        if not _KEY.fullmatch(word):
            which = f"key {number} of {len(words)} in {variable}"
            raise StateError(f"durable_key_env: {which} must be 64 hex digits (openssl rand -hex 32)")
    return tuple(SealingKey.of(bytes.fromhex(word)) for word in words)


def sealed_store(store: ByteStore, place: str, keys: Sequence[SealingKey]) -> ByteStore:
    """The store, to be read and written in clear. Raises StateError for one that is not sealed, or with another key."""
    sealed = SealedStore(store, keys)
    marker = store.get(ENCRYPTION)
    if marker is None:
        if next(iter(store.list("v1/")), None) is not None:
            raise StateError(f"durable store: {place!r} holds sessions that are not encrypted; give it an empty place")
        try:
            sealed.create(ENCRYPTION, MARKED)
            return sealed
        except ExistsError:  # another process was first
            marker = store.get(ENCRYPTION) or b""
    if key_id(marker) not in {key.id for key in keys} or sealed.opened(ENCRYPTION, marker) != MARKED:
        which, given = key_id(marker).hex(), ", ".join(key.id.hex() for key in keys)
        raise StateError(f"durable store: {place!r} is encrypted with key {which}, and the environment has {given}")
    if key_id(marker) != keys[0].id:
        sealed.put(ENCRYPTION, MARKED)
    return sealed


def key_id(sealed: bytes) -> bytes:
    """That of the key with which these bytes were sealed."""
    return sealed[len(_MAGIC) : len(_MAGIC) + _ID_BYTES]


class SealedStore:
    """A `ByteStore` in another one, which holds each object under its name, sealed. Sizes are those in clear."""

    def __init__(self, store: ByteStore, keys: Sequence[SealingKey]) -> None:
        self._store = store
        self._first = keys[0]
        self._keys = {key.id: key for key in keys}

    def put(self, name: str, data: Bytes) -> None:
        self._store.put(name, self._sealed(name, data))

    def create(self, name: str, data: Bytes) -> None:
        self._store.create(name, self._sealed(name, data))

    def get(self, name: str) -> bytes | None:
        data = self._store.get(name)
        return None if data is None else self.opened(name, data)

    def list(self, prefix: str) -> Iterator[Entry]:
        for entry in self._store.list(prefix):
            yield Entry(entry.name, max(0, entry.size - OVERHEAD))

    def delete(self, names: Collection[str]) -> None:
        self._store.delete(names)

    def opened(self, name: str, data: bytes) -> bytes:
        """In clear. What is no whole object of that name is empty, and so is damaged to whoever asked for it: also one
        in clear, which anybody could have put there. StoreError where its key is none of those given: nobody may take
        that for damage, and remove it."""
        if len(data) < OVERHEAD or not data.startswith(_MAGIC):
            return b""
        key = self._keys.get(key_id(data))
        if key is None:
            raise StoreError("get", name, f"was encrypted with key {key_id(data).hex()}, which is not given any more")
        try:
            return key.cipher.decrypt(data[_HEAD_BYTES - _NONCE_BYTES : _HEAD_BYTES], data[_HEAD_BYTES:], name.encode())
        except InvalidTag:
            return b""

    def _sealed(self, name: str, data: Bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        head = _MAGIC + self._first.id + nonce
        return head + self._first.cipher.encrypt(nonce, memoryview(data).cast("B"), name.encode())
