"""Which file is the arena of a node's host store, and whose is it?

    dflash-serve.<application>.<node id>.arena       0600, in a directory of shared memory
        page 0       header: magic, version, size, incarnation, application, node id, CRC-32; the generation word
        the rest     extents (`state/extents.py`)

A file gets its name when it is complete, so a crash leaves none that is half made. Who uses one holds a lock on it that
ends with the process: the store on byte 0, alone; whoever maps it beside the store on byte 1, with others. A header
that is not exactly right is refused: what lies behind it would be a guess.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
import zlib
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from state.errors import ArenaError

SHARED_MEMORY = Path("/dev/shm")
HEADER_BYTES = 4096
"""Where the extents begin. Sizes are multiples of it."""
GENERATION_WORD = 2048
"""Where the last generation that was given stands: beside the header's CRC, since it changes."""

_MAGIC = b"DFARENA\0"
_VERSION = 1
_HEADER = struct.Struct("<8sIQ16sHH")
_CHECKED_BYTES = 1024
_CHECKSUM = struct.Struct("<I")
_SMALLEST = 2 * HEADER_BYTES
_NAME_BYTES = 200
_NAME = re.compile(r"dflash-serve\.([A-Za-z0-9_~%-]+)\.([0-9A-Za-z_-]+)\.arena")
_NODE = re.compile(r"[0-9A-Za-z_-]{1,64}")
_FLOCK = struct.Struct("hhqqi0q")
_STORE, _USER = 0, 1
"""Bytes of the file that stand for the store and for who maps it beside the store."""


@dataclass(frozen=True)
class ArenaHeader:
    """`incarnation`: 32 hex digits, new with every file. `size` of the file in bytes."""

    application: str
    node: str
    incarnation: str
    size: int


class Mapping:
    """A mapped file. All changes go through `write` and `set_word`: the latter is one store of the processor, so that a
    crash leaves the old word or the new one, where `write` can leave any part of its bytes."""

    def __init__(self, path: Path, header: ArenaHeader, descriptor: int, writable: bool) -> None:
        """Owns the descriptor, and with it the lock that it holds."""
        self.path = path
        self.header = header
        self._descriptor = descriptor
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._memory = mmap.mmap(descriptor, header.size, access=access)
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("Q")

    def word(self, at: int) -> int:
        return self._words[at >> 3]

    def set_word(self, at: int, value: int) -> None:
        self._words[at >> 3] = value

    def read(self, at: int, size: int) -> bytes:
        return bytes(self._bytes[at : at + size])

    def write(self, at: int, data: bytes | memoryview) -> None:
        self._bytes[at : at + len(data)] = data

    def view(self, at: int, size: int) -> memoryview:
        return self._bytes[at : at + size]

    def close(self) -> None:
        """Gives up lock and mapping; memory that views still refer to stays mapped until they are gone."""
        for place in (_STORE, _USER):
            _set_lock(self._descriptor, place, fcntl.F_UNLCK)  # the mapping has a duplicate of the descriptor
        self._words.release()
        self._bytes.release()
        with suppress(BufferError):
            self._memory.close()
        os.close(self._descriptor)


def arena_path(directory: Path, application: str, node: str) -> Path:
    """Raises `ArenaError` for names that no file can carry."""
    name = f"dflash-serve.{quote(application, safe='').replace('.', '%2E')}.{node}.arena"
    if not application or not _NODE.fullmatch(node) or len(name) > _NAME_BYTES:
        problem = (
            "an application of at least one character and a node id of letters, digits, '-' and '_' must make a file "
            f"name of at most {_NAME_BYTES} characters"
        )
        raise ArenaError(f"of application {application!r} on node {node!r}", problem)
    return directory / name


def open_store(directory: Path, application: str, node: str, size: int) -> Mapping:
    """The store's own mapping of the node's arena: of the one that is there, else of a fresh one of `size` bytes.

    One that is there keeps its size, since what it holds is worth more than another size. Raises `ArenaError`.
    """
    path = arena_path(directory, application, node)
    while True:
        found = _attach(path, application, node, _STORE, writable=True)
        if found is not None:
            return found
        made = _create(path, application, node, size)
        if made is not None:
            return made


def open_user(directory: Path, application: str, node: str, incarnation: str, *, writable: bool) -> Mapping:
    """A mapping beside the store's. Raises `ArenaError` if the arena is not there, or is another than the one meant."""
    path = arena_path(directory, application, node)
    mapping = _attach(path, application, node, _USER, writable=writable)
    if mapping is None:
        raise ArenaError(path, "is not there: the node's host store has not made it, or it was removed")
    if mapping.header.incarnation != incarnation:
        found = mapping.header.incarnation
        mapping.close()
        raise ArenaError(path, f"has incarnation {found}, asked for was {incarnation}: it was made anew")
    return mapping


def sweep(directory: Path, live: Collection[tuple[str, str]]) -> tuple[Path, ...]:
    """Removes the arenas that belong to no application and node id of `live`, and gives their paths.

    What a running process has open stays, whoever it belongs to: it may be another cluster's on this machine. What
    belongs to another user stays too.
    """
    removed: list[Path] = []
    for path in sorted(directory.iterdir()):
        found = _NAME.fullmatch(path.name)
        if found is None or (unquote(found[1]), found[2]) in live:
            continue
        with suppress(OSError, ArenaError):  # it went meanwhile, or is not ours
            descriptor = _open_ours(path, writable=True)
            try:
                if all(_set_lock(descriptor, place, fcntl.F_WRLCK) for place in (_STORE, _USER)):
                    path.unlink()
                    removed.append(path)
            finally:
                os.close(descriptor)
    return tuple(removed)


# ---------------------------------------------------------------------------------------------------- making


def _create(path: Path, application: str, node: str, size: int) -> Mapping | None:
    """None if another process made one meanwhile."""
    if size < _SMALLEST:
        raise ArenaError(path, f"size is {size} bytes, must be at least {_SMALLEST}")
    size -= size % HEADER_BYTES
    header = ArenaHeader(application, node, secrets.token_hex(16), size)
    try:
        descriptor = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ArenaError(path, f"cannot be made in {path.parent}: {error.strerror}") from error
    try:
        _reserve(descriptor, path, size)
        os.fchmod(descriptor, 0o600)  # whatever the umask says
        os.pwrite(descriptor, _header_bytes(header), 0)
        mapping = Mapping(path, header, descriptor, writable=True)
    except BaseException:
        os.close(descriptor)
        raise
    try:
        _set_lock(descriptor, _STORE, fcntl.F_WRLCK)
        # A directory descriptor, though not looked at for a whole path, makes the call follow the link.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
    except FileExistsError:
        mapping.close()
        return None
    except OSError as error:
        mapping.close()
        raise ArenaError(path, f"cannot be made: {error.strerror}") from error
    return mapping


def _reserve(descriptor: int, path: Path, size: int) -> None:
    """All of the memory now, so that no later write can find that there is none (SIGBUS)."""
    facts = os.fstatvfs(descriptor)
    free = min(facts.f_bavail * facts.f_frsize, _available_memory())
    try:
        if size > free:
            raise OSError
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        reason = f" ({error.strerror})" if error.strerror else ""
        raise ArenaError(path, f"{size} bytes asked for, {free} are free in {path.parent}{reason}") from error


def _available_memory() -> int:
    """Bytes. A directory of shared memory may promise more than there is, and who then takes it is killed."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        field, _, value = line.partition(":")
        if field == "MemAvailable":
            return int(value.split()[0]) << 10
    return 1 << 63


def _header_bytes(header: ArenaHeader) -> bytes:
    application, node = header.application.encode(), header.node.encode()
    incarnation = bytes.fromhex(header.incarnation)
    head = _HEADER.pack(_MAGIC, _VERSION, header.size, incarnation, len(application), len(node)) + application + node
    head = head.ljust(_CHECKED_BYTES - _CHECKSUM.size, b"\0")
    return head + _CHECKSUM.pack(zlib.crc32(head))


# ---------------------------------------------------------------------------------------------------- attaching


def _attach(path: Path, application: str, node: str, place: int, *, writable: bool) -> Mapping | None:
    """None if the file is not there. Raises `ArenaError` for one that is not ours or not right, or has its store."""
    try:
        descriptor = _open_ours(path, writable=writable)
    except FileNotFoundError:
        return None
    try:
        if not _set_lock(descriptor, place, fcntl.F_WRLCK if place == _STORE else fcntl.F_RDLCK):
            raise ArenaError(path, "is in use by another host store process, or being swept")
        if not _is_named(path, descriptor):
            os.close(descriptor)
            return None  # swept before it was locked
        header = _read_header(path, descriptor)
        if (header.application, header.node) != (application, node):
            problem = f"belongs to application {header.application!r} on node {header.node!r}, asked for were "
            raise ArenaError(path, f"{problem}{application!r} and {node!r}")
        return Mapping(path, header, descriptor, writable)
    except BaseException:
        os.close(descriptor)
        raise


def _open_ours(path: Path, *, writable: bool) -> int:
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ArenaError(path, f"cannot be opened: {error.strerror}") from error
    facts = os.fstat(descriptor)
    mode = stat.S_IMODE(facts.st_mode)
    problem = ""
    if not stat.S_ISREG(facts.st_mode):
        problem = "is no regular file"
    elif facts.st_uid != os.geteuid():
        problem = f"belongs to user {facts.st_uid}, must belong to user {os.geteuid()}"
    elif mode != 0o600:
        problem = f"has mode {mode:04o}, must have 0600"
    if problem:
        os.close(descriptor)
        raise ArenaError(path, problem)
    return descriptor


def _read_header(path: Path, descriptor: int) -> ArenaHeader:
    data = os.pread(descriptor, _CHECKED_BYTES, 0)
    length = os.fstat(descriptor).st_size
    if len(data) < _CHECKED_BYTES:
        raise ArenaError(path, f"has {length} bytes, which is less than its header takes")
    magic, version, size, incarnation, application_bytes, node_bytes = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ArenaError(path, f"header: magic is {magic.hex(' ')}, must be {_MAGIC.hex(' ')}: this is no arena")
    if version != _VERSION:
        raise ArenaError(path, f"header: version is {version}, this reader knows {_VERSION}")
    if _CHECKSUM.pack(zlib.crc32(data[: -_CHECKSUM.size])) != data[-_CHECKSUM.size :]:
        raise ArenaError(path, "header: its CRC-32 is not that of its bytes: it is torn or was changed")
    if size != length:
        raise ArenaError(path, f"header: size is {size} bytes, but the file has {length}")
    names = data[_HEADER.size :]
    application, node = names[:application_bytes], names[application_bytes : application_bytes + node_bytes]
    return ArenaHeader(application.decode(), node.decode(), incarnation.hex(), size)


def _is_named(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _set_lock(descriptor: int, place: int, kind: int) -> bool:
    """Whether the lock is got now. It belongs to the open file, so it ends with the last process that has that open."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))
    except BlockingIOError:
        return False
    return True
