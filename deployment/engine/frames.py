"""Lists of messages over a socket between an engine's process and its parent: eight bytes of length, then the list."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
from collections.abc import Iterable
from typing import Any

from deployment.engine.message_codec import decode, encode

_LENGTH = struct.Struct("<Q")


def send_messages(connection: socket.socket, messages: Iterable[Any]) -> None:
    """An empty list says goodbye; nothing may follow it. Raises OSError when the other side is gone."""
    data = encode(list(messages))
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def receive_messages(connection: socket.socket) -> list[Any] | None:
    """The next list; None at the end of the stream, also at one in the middle of a list."""
    head = _receive(connection, _LENGTH.size)
    body = None if head is None else _receive(connection, _LENGTH.unpack(head)[0])
    return None if body is None else decode(body)


def send_queued(connection: socket.socket, waiting: queue.SimpleQueue[Any]) -> None:
    """Sends what comes into the queue, all that waits in one list, until a None comes out of it (then an empty list is
    the goodbye) or the other side is gone. For a thread of its own: who puts in never waits for the other side."""
    batch: list[Any] = []
    while None not in batch:
        batch = [waiting.get()]
        while not waiting.empty():
            batch.append(waiting.get())
        try:
            messages = [message for message in batch if message is not None]
            if messages:
                send_messages(connection, messages)
        except OSError:
            return
    with contextlib.suppress(OSError):
        send_messages(connection, [])


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
