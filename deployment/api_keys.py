"""Whose key is it? A file of keys and their tenants, or, without one, a tenant for whatever key comes.

A line of the file is a tenant's name and one of its keys: the key itself, or `sha256:` and its digest in hex, so that
the file is no secret. Of keys only digests are kept here, and nothing here prints either.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FIELD = "api_keys"

MIN_KEY_CHARACTERS = 16
"""A digest does not hide what can be guessed."""

MAX_FILE_BYTES = 1 << 20
LOOK_SECONDS = 1.0
"""How long a changed file may go unnoticed."""

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")

log = logging.getLogger("ray.serve")

TenantOf = Callable[[str], str | None]
"""The tenant of a key, 64 hex digits; None: the key is nobody's."""


def any_key(key: str) -> str:
    """Every key is a tenant of its own, no key too: what keys are without a list of them."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True)
class ApiKey:
    """`digest`: sha256 of the key, 32 bytes. `tenant`: 64 hex digits."""

    digest: bytes
    tenant: str


def tenant_id(name: str) -> str:
    """A name's tenant, which no key is without a list: a header cannot hold a zero byte."""
    return any_key(f"tenant\0{name}")


def tenant_among(keys: tuple[ApiKey, ...], key: str) -> str | None:
    """Takes the same time for every key that comes, whether it is one of them, and nearly one, or not."""
    digest, found = hashlib.sha256(key.encode()).digest(), None
    for known in keys:
        if hmac.compare_digest(known.digest, digest):
            found = known.tenant
    return found


class KeyFile:
    """A `TenantOf` that reads its file again when that has changed. What cannot be read then changes nothing."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """ValueError naming what is wrong with the file."""
        self._file = file
        self._clock = clock
        self._keys, self._version = _read(file)
        self._said: tuple[_Version | None, str] | None = None
        self._looked = clock()

    def __call__(self, key: str) -> str | None:
        now = self._clock()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._look()
        return tenant_among(self._keys, key)

    def _look(self) -> None:
        version: _Version | None = None
        try:
            version = _version(self._file.stat())
            if version == self._version:
                self._said = None
                return
            # One that is refused is read again each time: what was wrong may not have been in it.
            self._keys, self._version = _read(self._file)
        except OSError as error:
            self._say(version, f"{FIELD}: {self._file} cannot be read: {error.strerror}")
        except ValueError as error:
            self._say(version, str(error))
        else:
            self._said = None
            tenants = len({key.tenant for key in self._keys})
            log.info("%s: %s has changed: %d keys of %d tenants", FIELD, self._file, len(self._keys), tenants)

    def _say(self, version: _Version | None, wrong: str) -> None:
        """Once a change of the file, not once a request."""
        if self._said != (version, wrong):
            self._said = version, wrong
            log.error("%s; the keys stay as they were", wrong)


_Version = tuple[int, int, int, int]


def _version(facts: os.stat_result) -> _Version:
    """Changes with what the file says, and with who may read it."""
    return facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino, facts.st_size


def read_keys(file: Path) -> tuple[ApiKey, ...]:
    """ValueError naming the line at fault, never what it says of a key."""
    return _read(file)[0]


def _read(file: Path) -> tuple[tuple[ApiKey, ...], _Version]:
    try:
        with file.open("rb") as stream:
            facts = os.fstat(stream.fileno())
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{FIELD}: {file} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{FIELD}: {file} is larger than {MAX_FILE_BYTES} bytes")
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{FIELD}: {file} is no text in UTF-8") from None
    keys: dict[bytes, ApiKey] = {}
    open_to_all = bool(facts.st_mode & stat.S_IRWXO)
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{FIELD}: {file}, line {number}"
        key = _read_line(line, where)
        if open_to_all and not _DIGEST.search(line):
            raise ValueError(f"{where}: a key that every user of this machine can read; chmod 600, or give its digest")
        if key.digest in keys:
            raise ValueError(f"{where}: this key stands on a line above already")
        keys[key.digest] = key
    if not keys:
        raise ValueError(f"{FIELD}: {file} has no key; a line is a tenant's name and its key")
    return tuple(keys.values()), _version(facts)


def _read_line(line: str, where: str) -> ApiKey:
    fields = line.split()
    if len(fields) != 2:
        raise ValueError(f"{where}: has {len(fields)} words, must be a tenant's name and its key")
    name, key = fields
    if not _TENANT.fullmatch(name):
        raise ValueError(f"{where}: the tenant's name must be 1 to 64 letters, digits and ._@-")
    if key.startswith("sha256:"):
        digest = _DIGEST.fullmatch(key)
        if digest is None:
            raise ValueError(f"{where}: sha256: must be followed by the 64 hex digits of the key's digest")
        return ApiKey(bytes.fromhex(digest[1]), tenant_id(name))
    if len(key) < MIN_KEY_CHARACTERS or not all("!" <= character <= "~" for character in key):
        raise ValueError(f"{where}: a key has at least {MIN_KEY_CHARACTERS} visible ASCII characters")
    return ApiKey(hashlib.sha256(key.encode()).digest(), tenant_id(name))
