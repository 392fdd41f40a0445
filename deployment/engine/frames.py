"""Lists of messages over a socket between an engine's process and its parent: eight bytes of length, then the list."""

from __future__ import annotations

import queue
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from deployment.engine import errors
from deployment.engine.events import Failed, Suspended
from deployment.engine.message_codec import decode, encode

_LENGTH = struct.Struct("<Q")
_ARRAY_32 = struct.Struct(">BI")
"""msgpack's head of a list."""


def send_messages(connection: socket.socket, messages: Iterable[Any]) -> None:
    """An empty list says goodbye; nothing may follow it. Raises OSError when the other side is gone."""
    _send(connection, [encode(message) for message in messages])


def receive_messages(connection: socket.socket) -> list[Any] | None:
    """The next list; None at the end of the stream, also at one in the middle of a list."""
    head = _receive(connection, _LENGTH.size)
    body = None if head is None else _receive(connection, _LENGTH.unpack(head)[0])
    return None if body is None else decode(body)


def send_queued(
    connection: socket.socket, waiting: queue.SimpleQueue[Any], unsendable: Callable[[Any, Exception], None]
) -> None:
    """Sends what comes into the queue, all that waits in one list, until a None comes out of it; then an empty list is
    the goodbye. For a thread of its own: who puts in never waits for the other side.

    A message that has no form on the pipe is given to `unsendable`, and the others go on. Raises OSError when the other
    side is gone, and what `unsendable` raises.
    """
    batch: list[Any] = []
    while None not in batch:
        batch = [waiting.get()]
        while not waiting.empty():
            batch.append(waiting.get())
        encoded: list[bytes] = []
        for message in batch:
            if message is None:
                continue
            try:
                encoded.append(encode(message))
            except Exception as error:  # whatever it holds: the others must not wait for it
                unsendable(message, error)
        if encoded:
            _send(connection, encoded)
    _send(connection, [])


def unsent(message: Any, error: Exception) -> Failed:
    """What whoever waits for a message hears instead of it, where it cannot be sent. Raises `error` if nobody in
    particular does, or two do, or it was the last that they would have heard."""
    waits = next((ref for name in ("call", "turn") if (ref := getattr(message, name, None)) is not None), None)
    if waits is None or isinstance(message, Suspended):
        raise error
    what = f"its {type(message).__name__} cannot be sent between the engine and its replica"
    return Failed(waits, errors.INTERNAL_ERROR, f"{what}: {error}")


def _send(connection: socket.socket, messages: Sequence[bytes]) -> None:
    data = b"".join([_ARRAY_32.pack(0xDD, len(messages)), *messages])
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def _receive(connection: socket.socket, size: int) -> memoryview | None:
    data = memoryview(bytearray(size))
    got = 0
    while got < size:
        try:
            more = connection.recv_into(data[got:])
        except OSError:
            return None
        if not more:
            return None
        got += more
    return data
