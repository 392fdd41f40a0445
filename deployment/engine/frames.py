"""Lists of messages over a socket between an engine's process and its parent.

Twelve bytes: the length of the list, and how many parts follow it. Then the list; then each part with eight bytes of
length: what `message_codec.py` puts beside the messages.
"""

from __future__ import annotations

import queue
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

from deployment.engine import errors
from deployment.engine.events import Failed, Suspended
from deployment.engine.message_codec import decode, encode
from state.container import Blob

_HEAD = struct.Struct("<QI")
_LENGTH = struct.Struct("<Q")


def send_messages(connection: socket.socket, messages: list[Any]) -> None:
    """An empty list says goodbye; nothing may follow it. Raises OSError when the other side is gone; what `encode`
    raises, before anything is sent."""
    beside: list[Blob] = []
    data = encode(messages, beside)
    connection.sendall(_HEAD.pack(len(data), len(beside)))
    connection.sendall(data)
    for part in beside:
        connection.sendall(_LENGTH.pack(memoryview(part).nbytes))
        connection.sendall(part)


def receive_messages(connection: socket.socket) -> list[Any] | None:
    """The next list; None at the end of the stream, also at one in the middle of a list."""
    head = _receive(connection, _HEAD.size)
    if head is None:
        return None
    size, parts = _HEAD.unpack(head)
    body = _receive(connection, size)
    beside: list[Blob] = []
    while body is not None and len(beside) < parts:
        length = _receive(connection, _LENGTH.size)
        part = None if length is None else _receive(connection, _LENGTH.unpack(length)[0])
        if part is None:
            return None
        beside.append(part.toreadonly())
    return None if body is None else decode(body, beside)


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
        if messages := [message for message in batch if message is not None]:
            try:
                send_messages(connection, messages)
            except OSError:
                raise
            except Exception:  # nothing was sent
                if sendable := _sendable(messages, unsendable):
                    send_messages(connection, sendable)
    send_messages(connection, [])


def unsent(message: Any, error: Exception) -> Failed:
    """What whoever waits for a message hears instead of it, where it cannot be sent. Raises `error` if nobody in
    particular does, or two do, or it was the last that they would have heard."""
    waits = next((ref for name in ("call", "turn") if (ref := getattr(message, name, None)) is not None), None)
    if waits is None or isinstance(message, Suspended):
        raise error
    what = f"its {type(message).__name__} cannot be sent between the engine and its replica"
    return Failed(waits, errors.INTERNAL_ERROR, f"{what}: {error}")


def _sendable(messages: Sequence[Any], unsendable: Callable[[Any, Exception], None]) -> list[Any]:
    sendable: list[Any] = []
    for message in messages:
        try:
            encode(message, [])
            sendable.append(message)
        except Exception as error:  # whatever it holds: the others must not wait for it
            unsendable(message, error)
    return sendable


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
